"""Generate calls over raw sockets: what HTTP allows on a connection, and what happens where it ends."""

import asyncio
import errno
import gc
import itertools
import weakref
from urllib.parse import urlsplit

import msgspec

from services.inference_hub import engine_connection
from services.inference_hub.caller_connection import CallerConnection
from services.inference_hub.engine_connection import KEEPALIVE_S, EngineConnection, EngineConnections

BODY = msgspec.json.encode({"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 2}})


def call(body: bytes = BODY, *headers: str) -> bytes:
    lines = ["POST /generate HTTP/1.1", "Host: hub", f"Content-Length: {len(body)}", *headers, "", ""]
    return "\r\n".join(lines).encode() + body


class Connection:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    async def send(self, data: bytes) -> None:
        self._writer.write(data)
        await self._writer.drain()

    async def answer(self) -> tuple[int, dict]:
        head = await asyncio.wait_for(self._reader.readuntil(b"\r\n\r\n"), 20)
        headers = dict(line.split(": ", 1) for line in head.decode().lower().split("\r\n")[1:] if line)
        body = await self._reader.readexactly(int(headers["content-length"]))
        return int(head.split()[1]), msgspec.json.decode(body)

    async def interim(self) -> bytes:
        return await asyncio.wait_for(self._reader.readuntil(b"\r\n\r\n"), 20)

    async def is_closed(self) -> bool:
        rest = await asyncio.wait_for(self._reader.read(), 20)
        self.close()
        return rest == b""

    def close(self) -> None:
        self._writer.close()


async def connected(served) -> Connection:
    await served.wait_until(lambda: bool(served.hub.registry.routable), description="an engine is ready")
    parts = urlsplit(served.url)
    return Connection(*await asyncio.open_connection(parts.hostname, parts.port))


async def test_calls_follow_each_other_on_a_connection(serve_hub, start_engine):
    engine = await start_engine()
    async with serve_hub(engine.url) as served:
        connection = await connected(served)
        for _ in range(3):
            await connection.send(call())
            status, answer = await connection.answer()
            assert (status, answer["output_ids"]) == (200, [4, 5])
        connection.close()


async def test_a_call_may_arrive_byte_by_byte(serve_hub, start_engine):
    engine = await start_engine()
    async with serve_hub(engine.url) as served:
        connection = await connected(served)
        for byte in call():
            await connection.send(bytes([byte]))
        assert (await connection.answer())[1]["output_ids"] == [4, 5]
        connection.close()


async def test_a_chunked_body_is_read(serve_hub, start_engine):
    engine = await start_engine()
    async with serve_hub(engine.url) as served:
        connection = await connected(served)
        head = b"POST /generate HTTP/1.1\r\nHost: hub\r\nTransfer-Encoding: chunked\r\n\r\n"
        await connection.send(head + b"%x\r\n%b\r\n%x\r\n%b\r\n0\r\n\r\n" % (10, BODY[:10], len(BODY) - 10, BODY[10:]))
        assert (await connection.answer())[1]["output_ids"] == [4, 5]
        connection.close()


async def test_a_caller_that_waits_for_leave_to_send_gets_it(serve_hub, start_engine):
    engine = await start_engine()
    async with serve_hub(engine.url) as served:
        connection = await connected(served)
        whole = call(BODY, "Expect: 100-continue")
        await connection.send(whole[: -len(BODY)])
        assert await connection.interim() == b"HTTP/1.1 100 Continue\r\n\r\n"
        await connection.send(BODY)
        assert (await connection.answer())[0] == 200
        connection.close()


async def test_generate_calls_and_others_share_a_connection(serve_hub, start_engine):
    engine = await start_engine()
    async with serve_hub(engine.url) as served:
        connection = await connected(served)
        await connection.send(call())
        assert (await connection.answer())[1]["output_ids"] == [4, 5]
        await connection.send(b"GET /health HTTP/1.1\r\nHost: hub\r\n\r\n")
        assert await connection.answer() == (200, {"status": "ok"})
        await connection.send(call())
        assert (await connection.answer())[1]["output_ids"] == [4, 5]
        connection.close()


async def test_of_calls_sent_before_their_answer_the_first_is_answered_and_the_connection_closed(serve_hub, start_engine):
    engine = await start_engine()
    async with serve_hub(engine.url) as served:
        connection = await connected(served)
        await connection.send(call() * 3)
        assert (await connection.answer())[1]["output_ids"] == [4, 5]
        assert await connection.is_closed()
    assert len(engine.requests) == 1


async def test_headers_without_end_are_refused(serve_hub, start_engine):
    engine = await start_engine()
    async with serve_hub(engine.url) as served:
        connection = await connected(served)
        await connection.send(b"POST /generate HTTP/1.1\r\n" + b"X-Long: 1\r\n" * 10_000)
        status, answer = await connection.answer()
        assert (status, "at most 65536 bytes" in answer["detail"]) == (431, True)
        assert await connection.is_closed()


async def test_what_is_not_http_is_refused(serve_hub, start_engine):
    engine = await start_engine()
    async with serve_hub(engine.url) as served:
        connection = await connected(served)
        await connection.send(b"POST /generate HTTP/1.1\r\nno colon\r\n\r\n")
        assert (await connection.answer())[0] == 400
        assert await connection.is_closed()


async def test_a_kept_connection_that_the_engine_closed_costs_a_call_nothing(serve_hub, start_engine):
    engine = await start_engine()
    async with serve_hub(engine.url, probe_interval_s=60.0) as served:
        await served.wait_until(lambda: bool(served.hub.registry.routable), description="an engine is ready")
        await served.generate([1], 1)
        await start_engine.kill(engine)
        await start_engine(engine, port=urlsplit(engine.url).port)
        assert (await served.generate([1], 1))[0] == 200
        async with served.http.get(served.url + "/metrics") as response:
            assert "headrace_hub_attempt_failures_total{" not in await response.text()


async def test_connections_that_were_idle_too_long_are_not_used(monkeypatch, start_engine):
    engine = await start_engine()
    connections = EngineConnections(engine.url)
    body = msgspec.json.encode({"input_ids": [1], "rid": "r", "sampling_params": {"max_new_tokens": 1}})
    await connections.generate(body)
    (first,) = connections._idle
    first.idle_since -= KEEPALIVE_S + 1
    await connections.generate(body)
    assert (first.is_open, connections.num_idle) == (False, 1)
    assert first not in connections._idle
    connections.close()


async def test_connections_that_an_engine_keeps_open_are_closed_when_they_are_old(start_engine):
    engine = await start_engine()
    connections = EngineConnections(engine.url)
    body = msgspec.json.encode({"input_ids": [1], "rid": "r", "sampling_params": {"max_new_tokens": 1}})
    await asyncio.gather(*(connections.generate(body) for _ in range(3)))
    old, *young = connections._idle
    old.idle_since -= KEEPALIVE_S + 1
    connections.close_old()
    assert list(connections._idle) == young
    assert not old.is_open
    connections.close()


async def test_a_connection_that_ended_leaves_nothing_for_the_garbage_collector(serve_hub, start_engine):
    """An idle hub makes no garbage, so nothing would collect that of a burst."""
    engine = await start_engine()
    connections = EngineConnections(engine.url)
    body = msgspec.json.encode({"input_ids": [1], "rid": "r", "sampling_params": {"max_new_tokens": 1}})
    await connections.generate(body)
    [to_engine] = connections._idle
    ended = [weakref.ref(to_engine)]
    del to_engine
    gc.collect()
    gc.disable()
    try:
        async with serve_hub(engine.url) as served:
            caller = await connected(served)
            await caller.send(call())
            await caller.answer()
            ended += [weakref.ref(each) for each in gc.get_objects() if type(each) is CallerConnection]
            assert len(ended) == 2
            connections.close()
            caller.close()
            await served.wait_until(lambda: not any(ended_one() for ended_one in ended), description="both are freed")
    finally:
        gc.enable()


async def test_a_call_cut_from_a_hanging_engine_does_not_ask_it_again(serve_hub, start_engine, plan):
    hanging, other = [await start_engine() for _ in range(2)]
    async with serve_hub(hanging.url, probe_interval_s=60.0) as served:
        await served.wait_until(lambda: bool(served.hub.registry.routable), description="an engine is ready")
        await served.generate([1], 1)
        hanging.plans.append(plan(is_held=True))
        call = asyncio.create_task(served.generate([1], 1))
        await served.wait_until(lambda: len(hanging.requests) == 2, description="it has the call on a used connection")
        await served.post("/engines", {"url": other.url})
        await served.hub.registry.lose(served.hub.registry.find(hanging.url), "it hangs")
        assert (await call)[1]["output_ids"] == [2]
    assert (len(hanging.requests), len(other.requests)) == (2, 1)


async def test_a_hub_without_file_descriptors_waits_and_blames_no_engine(start_engine, monkeypatch, caplog):
    engine = await start_engine()
    connections = EngineConnections(engine.url)
    loop = asyncio.get_running_loop()
    create_connection, attempts = loop.create_connection, itertools.count()

    async def short_of_files(*arguments, **options):
        if next(attempts) < 2:
            raise OSError(errno.EMFILE, "Too many open files")
        return await create_connection(*arguments, **options)

    monkeypatch.setattr(loop, "create_connection", short_of_files)
    body = msgspec.json.encode({"input_ids": [1], "rid": "r", "sampling_params": {"max_new_tokens": 1}})
    status, _ = await connections.generate(body)
    connections.close()
    assert status == 200
    assert next(attempts) == 3
    assert caplog.messages == ["the hub has no file descriptor left for a connection to an engine: calls wait; raise ulimit -n"]


async def test_connections_to_engines_leave_file_descriptors_for_callers(start_engine, monkeypatch):
    engine = await start_engine()
    connections = EngineConnections(engine.url)
    num_others = EngineConnection.num_open
    monkeypatch.setattr(engine_connection, "max_connections", lambda: num_others + 1)
    body = msgspec.json.encode({"input_ids": [1], "rid": "r", "sampling_params": {"max_new_tokens": 1}})
    answers = await asyncio.gather(*(connections.generate(body) for _ in range(3)))
    assert [status for status, _ in answers] == [200, 200, 200]
    assert connections.num_idle == 1
    connections.close()
