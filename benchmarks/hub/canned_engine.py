"""An engine that answers every generate call with the same tokens, at once or after a delay: what is left to measure is the router.

`python -m benchmarks.hub.canned_engine --port 30000 --output-tokens 256`. It reads as little of a request as it can.
"""

import argparse
import asyncio
from typing import cast

import uvloop

from benchmarks.hub.messages import VOCABULARY_ANSWER, Shape, answer, answer_body, control_answer

END_OF_HEAD = b"\r\n\r\n"
GENERATE = b"POST /generate"
BEYOND_VOCABULARY = b'"token_ids_logprob"'


class CannedConnection(asyncio.Protocol):
    def __init__(self, generated: bytes, delay_s: float) -> None:
        self._generated = generated
        self._delay_s = delay_s
        self._unread = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        data = self._unread + data if self._unread else data
        while (end := end_of_message(data)) is not None:
            self._answer(data[: data.index(b" HTTP/1.1")], is_probe=BEYOND_VOCABULARY in data)
            data = data[end:]
        self._unread = data

    def _answer(self, request_line: bytes, *, is_probe: bool) -> None:
        if is_probe:
            self._transport.write(VOCABULARY_ANSWER)
        elif request_line != GENERATE:
            self._transport.write(control_answer(request_line.split(b" ")[1].decode()))
        elif self._delay_s:
            asyncio.get_running_loop().call_later(self._delay_s, self._transport.write, self._generated)
        else:
            self._transport.write(self._generated)


def end_of_message(data: bytes) -> int | None:
    """Where the first HTTP message of `data` ends; None if it is not complete."""
    head_end = data.find(END_OF_HEAD)
    if head_end < 0:
        return None
    head = data[:head_end].lower()
    body_start = head_end + len(END_OF_HEAD)
    if b"transfer-encoding: chunked" in head:
        end = data.find(b"0\r\n\r\n", body_start)
        return None if end < 0 else end + 5
    length_at = head.find(b"content-length:")
    length = int(head[length_at + 15 : (head + b"\r").index(b"\r", length_at)]) if length_at >= 0 else 0
    return body_start + length if len(data) >= body_start + length else None


async def serve(port: int, shape: Shape, delay_s: float) -> None:
    generated = answer(answer_body(shape))
    server = await asyncio.get_running_loop().create_server(
        lambda: CannedConnection(generated, delay_s), "127.0.0.1", port, backlog=16_384
    )
    await server.serve_forever()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.hub.canned_engine", description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--prompt-tokens", type=int, default=512)
    parser.add_argument("--output-tokens", type=int, default=256)
    parser.add_argument("--delay-s", type=float, default=0.0)
    arguments = parser.parse_args()
    uvloop.run(serve(arguments.port, Shape(arguments.prompt_tokens, arguments.output_tokens), arguments.delay_s))


if __name__ == "__main__":
    main()
