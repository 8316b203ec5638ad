import asyncio

import pytest

from services.env_agents.slots import EpisodeSlots


async def settle() -> None:
    """Lets every task that can run do so."""
    for _ in range(10):
        await asyncio.sleep(0)


class Crowd:
    """Tasks that hold a place until they are let go."""

    def __init__(self, slots: EpisodeSlots, size: int) -> None:
        self.inside = 0
        self.leave = asyncio.Semaphore(0)
        self.tasks = [asyncio.create_task(self._stay(slots)) for _ in range(size)]

    async def _stay(self, slots):
        async with slots:
            self.inside += 1
            try:
                await self.leave.acquire()
            finally:
                self.inside -= 1

    async def close(self):
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)


@pytest.fixture
def slots() -> EpisodeSlots:
    return EpisodeSlots(2)


async def test_no_more_than_the_bound_are_inside(slots):
    crowd = Crowd(slots, 5)
    await settle()
    assert (crowd.inside, slots.num_claimed) == (2, 5)
    crowd.leave.release()
    await settle()
    assert (crowd.inside, slots.num_claimed) == (2, 4)
    await crowd.close()
    assert slots.num_claimed == 0


async def test_cancelled_waiter_passes_its_turn_on(slots):
    crowd = Crowd(slots, 4)
    await settle()
    crowd.leave.release()
    await asyncio.sleep(0)
    crowd.tasks[2].cancel()
    await settle()
    assert crowd.inside == 2
    await crowd.close()


async def test_higher_bound_lets_waiters_in_at_once(slots):
    crowd = Crowd(slots, 5)
    await settle()
    slots.resize(4)
    await settle()
    assert crowd.inside == 4
    await crowd.close()


async def test_lower_bound_disturbs_nobody_inside(slots):
    crowd = Crowd(slots, 3)
    await settle()
    slots.resize(1)
    crowd.leave.release()
    await settle()
    assert crowd.inside == 1
    await crowd.close()


async def test_group_larger_than_the_bound_may_start_alone(slots):
    assert slots.can_claim(5)
    async with slots:
        assert slots.can_claim(1)
        assert not slots.can_claim(2)
