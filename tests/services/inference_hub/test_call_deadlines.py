import asyncio

import pytest

from services.inference_hub.call_deadlines import CallDeadlines


async def forever() -> None:
    await asyncio.Event().wait()


async def test_only_calls_older_than_the_deadline_are_cancelled():
    deadlines = CallDeadlines(10.0)
    old, young = (asyncio.create_task(forever()) for _ in range(2))
    deadlines.begin(old, 0.0)
    deadlines.begin(young, 5.0)
    deadlines.cancel_overdue(9.9)
    assert not old.cancelling()
    deadlines.cancel_overdue(10.0)
    assert old.cancelling()
    assert not young.cancelling()
    assert not deadlines.end(young)
    assert deadlines.end(old)
    young.cancel()
    await asyncio.gather(old, young, return_exceptions=True)


async def test_a_caller_that_leaves_as_the_deadline_passes_has_left():
    deadlines = CallDeadlines(1.0)
    task = asyncio.create_task(forever())
    deadlines.begin(task, 0.0)
    task.cancel()
    deadlines.cancel_overdue(2.0)
    assert not deadlines.end(task)
    with pytest.raises(asyncio.CancelledError):
        await task
