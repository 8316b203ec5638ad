import asyncio
import socket
import threading
import time

import pytest

from benchmarks.asynchrony.virtual_time import RealIOStuckError, StandstillError, VirtualTimeLoop, run, virtual_loop


def test_sleeps_advance_the_clock_and_take_no_time():
    async def main():
        await asyncio.sleep(3600)
        await asyncio.sleep(0.5)
        return asyncio.get_running_loop().time()

    began = time.monotonic()
    assert run(main()) == pytest.approx(3600.5)
    assert time.monotonic() - began < 1


def test_timers_fire_in_order_at_their_time():
    fired = []

    async def sleeper(seconds):
        await asyncio.sleep(seconds)
        fired.append((seconds, asyncio.get_running_loop().time()))

    async def main():
        await asyncio.gather(*(sleeper(seconds) for seconds in (5, 1, 4, 2, 3)))

    run(main())
    assert [seconds for seconds, _ in fired] == [1, 2, 3, 4, 5]
    assert [at for _, at in fired] == pytest.approx([1, 2, 3, 4, 5])


def test_the_clock_stands_still_while_callbacks_are_ready():
    async def main():
        for _ in range(1000):
            await asyncio.sleep(0)
        return asyncio.get_running_loop().time()

    assert run(main()) == 0


def test_timeouts_are_virtual():
    async def main():
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1000):
                await asyncio.sleep(2000)
        return asyncio.get_running_loop().time()

    assert run(main()) == pytest.approx(1000)


def test_real_io_is_awaited_before_time_jumps():
    """The answer takes 50 real ms and arrives at virtual time 0, before a timer that is set for much later and one for soon."""
    ours, theirs = socket.socketpair()
    events = []

    def answer():
        theirs.recv(10)
        time.sleep(0.05)
        theirs.send(b"pong")

    async def ask():
        reader, writer = await asyncio.open_connection(sock=ours)
        with virtual_loop().real_io():
            writer.write(b"ping")
            events.append((await reader.readexactly(4), asyncio.get_running_loop().time()))
        writer.close()
        await writer.wait_closed()

    async def sleep():
        await asyncio.sleep(0.001)
        events.append(("slept", asyncio.get_running_loop().time()))

    async def main():
        await asyncio.gather(sleep(), ask())

    thread = threading.Thread(target=answer)
    thread.start()
    run(main())
    thread.join()
    theirs.close()
    assert events == [(b"pong", 0), ("slept", pytest.approx(0.001))]


def test_a_thread_is_awaited_before_time_jumps():
    async def main():
        events = []

        async def work():
            await asyncio.to_thread(time.sleep, 0.05)
            events.append("worked")

        async def sleep():
            await asyncio.sleep(0.001)
            events.append("slept")

        await asyncio.gather(sleep(), work())
        return events

    assert run(main()) == ["worked", "slept"]


def test_io_that_does_not_end_is_an_error(monkeypatch):
    monkeypatch.setattr(VirtualTimeLoop, "REAL_TIMEOUT_S", 0.1)

    async def main():
        with virtual_loop().real_io():
            await asyncio.sleep(1)

    with pytest.raises(RealIOStuckError, match="1 real operations"):
        run(main())


def test_a_deadlock_is_an_error():
    async def main():
        await asyncio.get_running_loop().create_future()

    with pytest.raises(StandstillError):
        run(main())


def test_only_a_virtual_loop_is_one():
    async def main():
        with pytest.raises(TypeError, match="VirtualTimeLoop"):
            virtual_loop()

    asyncio.run(main())
