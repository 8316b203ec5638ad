import asyncio

import pytest

from services.inference_hub.gate import Gate, Hold


async def test_an_open_gate_lets_calls_through_at_once():
    await Gate().passed()


async def test_calls_wait_until_the_last_reason_ends():
    gate = Gate()
    gate.hold(Hold.WEIGHT_UPDATE)
    gate.hold(Hold.NO_ENGINE)
    async with asyncio.TaskGroup() as tasks:
        call = tasks.create_task(gate.passed())
        await asyncio.sleep(0)
        assert gate.num_waiting == 1
        gate.release(Hold.WEIGHT_UPDATE)
        await asyncio.sleep(0)
        assert not call.done()
        gate.release(Hold.NO_ENGINE)
    assert gate.num_waiting == 0
    assert gate.is_open


async def test_a_gate_that_closes_again_at_once_lets_nobody_through():
    gate = Gate()
    gate.hold(Hold.WEIGHT_UPDATE)
    async with asyncio.TaskGroup() as tasks:
        call = tasks.create_task(gate.passed())
        await asyncio.sleep(0)
        gate.release(Hold.WEIGHT_UPDATE)
        gate.hold(Hold.WEIGHT_UPDATE)
        for _ in range(3):
            await asyncio.sleep(0)
        assert not call.done()
        gate.release(Hold.WEIGHT_UPDATE)


async def test_a_call_that_gives_up_waits_no_longer():
    gate = Gate()
    gate.hold(Hold.NO_ENGINE)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0):
            await gate.passed()
    assert gate.num_waiting == 0
