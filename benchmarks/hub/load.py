"""Callers: connections that send prepared requests and read whole answers. Closed loop for rates, open loop for latency."""

import asyncio
import json
import random
import time
from dataclasses import dataclass, field
from typing import cast

from benchmarks.hub.canned_engine import END_OF_HEAD, end_of_message

WRONG_STATUS = "an answer must have status 200, got {}"


@dataclass
class Answers:
    """What callers got: seconds from each request's due time to its whole answer, and what was wrong."""

    latencies_s: list[float] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


class Caller(asyncio.Protocol):
    """One connection with one request at a time; `on_answer` is called with its problem, or None."""

    def __init__(self) -> None:
        self.answered: asyncio.Future[str | None] | None = None
        self._unread: list[bytes] = []
        self._missing = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, error: Exception | None) -> None:
        self._settle(f"the router closed the connection: {error}")

    def send(self, request: bytes) -> asyncio.Future[str | None]:
        self.answered = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        return self.answered

    def data_received(self, data: bytes) -> None:
        self._unread.append(data)
        self._missing -= len(data)
        if self._missing > 0:
            return
        whole = b"".join(self._unread)
        self._unread = [whole]
        end = end_of_message(whole)
        if end is None:
            self._missing = missing_bytes(whole)
            return
        self._unread = []
        self._missing = 0
        self._settle(None if whole[9:12] == b"200" else WRONG_STATUS.format(whole[9:12].decode()))

    def close(self) -> None:
        self.answered = None
        self._transport.close()

    def _settle(self, problem: str | None) -> None:
        if self.answered is not None and not self.answered.done():
            self.answered.set_result(problem)


def missing_bytes(data: bytes) -> int:
    """How many bytes more an answer with a length has; 1 where it does not say."""
    head, found, rest = data.partition(END_OF_HEAD)
    at = head.lower().find(b"content-length:")
    if not found or at < 0:
        return 1
    return max(1, int(head[at + 15 :].split(b"\r", 1)[0]) - len(rest))


async def connect(port: int, number: int) -> list[Caller]:
    loop = asyncio.get_running_loop()
    callers = []
    for _ in range(number):
        _, caller = await loop.create_connection(Caller, "127.0.0.1", port)
        callers.append(caller)
    return callers


async def closed_loop(callers: list[Caller], requests: list[bytes], *, seconds: float) -> tuple[int, list[str]]:
    """Each caller sends its next request when it has the answer. Returns the answers in time, and problems."""
    until = time.perf_counter() + seconds
    problems: list[str] = []

    async def call(caller: Caller, request: bytes) -> int:
        number = 0
        while time.perf_counter() < until:
            problem = await caller.send(request)
            if problem is not None:
                problems.append(problem)
                return number
            number += 1
        return number

    numbers = await asyncio.gather(*(call(*pair) for pair in zip(callers, requests, strict=True)))
    return sum(numbers), problems


async def open_loop(callers: list[Caller], requests: list[bytes], *, per_s: float, seconds: float, seed: int) -> Answers:
    """Requests at Poisson times, whether or not earlier ones were answered; a latency counts from the time a request was due."""
    chance = random.Random(seed)
    answers = Answers()
    free = list(zip(callers, requests, strict=True))
    began = time.perf_counter()
    due = began

    def send() -> None:
        caller, request = free.pop()
        due_at = due

        def answered(future: asyncio.Future[str | None]) -> None:
            if (problem := future.result()) is not None:
                answers.problems.append(problem)
            answers.latencies_s.append(time.perf_counter() - due_at)
            free.append((caller, request))

        caller.send(request).add_done_callback(answered)

    while due < began + seconds:
        now = time.perf_counter()
        while due <= now and free and due < began + seconds:
            send()
            due += chance.expovariate(per_s)
        await asyncio.sleep(max(0.0, due - time.perf_counter()))
    while len(free) < len(callers):  # noqa: ASYNC110 - the last few answers
        await asyncio.sleep(0.01)
    return answers


async def check_answer(port: int, request: bytes, expected_body: bytes) -> None:
    """Raises: AssertionError unless a router's answer has the engine's tokens."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request.replace(b"Content-Length", b"Connection: close\r\nContent-Length", 1))
    whole = await asyncio.wait_for(reader.read(), 30)
    writer.close()
    head, _, body = whole.partition(END_OF_HEAD)
    assert head[9:12] == b"200", whole[:500]
    body = body[body.index(b"{") : body.rindex(b"}") + 1]
    assert json.loads(body)["output_ids"] == json.loads(expected_body)["output_ids"]
