"""The models around the real scheduler, against times that can be worked out by hand."""

import asyncio
from dataclasses import replace

import pytest

from benchmarks.asynchrony import virtual_time
from benchmarks.asynchrony.engines import LockStep, Slots
from benchmarks.asynchrony.stack import simulate
from benchmarks.asynchrony.system import System
from benchmarks.asynchrony.workloads import Constant, LogNormal, Workload

SYSTEM = System(groups=2, group_size=2, ratio=0, gpus=2, slots=2, token_s=0.01)


def measure(redis_url, system, workload, num_updates=2):
    return virtual_time.run(simulate(system, workload, redis_url, num_updates=num_updates))


def test_equal_episodes_take_what_they_take(redis_url):
    """4 episodes of 1000 tokens on 4 places: 10 s an update, and the wait for a place before all but the first."""
    outcome = measure(redis_url, SYSTEM, Workload(Constant(1000)), num_updates=3)
    assert outcome.published_s == pytest.approx([10, 20, 30], abs=0.6)
    assert outcome.max_lag == 0
    assert outcome.wasted_share == 0


def test_places_bound_what_is_sampled_at_once(redis_url):
    outcome = measure(redis_url, replace(SYSTEM, gpus=1), Workload(Constant(1000)), num_updates=1)
    assert outcome.published_s == pytest.approx([20], abs=0.1)


def test_training_follows_sampling_at_ratio_0_and_hides_behind_it_at_1(redis_url):
    system = replace(SYSTEM, train_s=2.0)
    assert measure(redis_url, system, Workload(Constant(1000)), 4).update_s(2) == pytest.approx(18, abs=0.6)
    assert measure(redis_url, replace(system, ratio=1), Workload(Constant(1000)), 6).update_s(3) == pytest.approx(10, abs=0.6)


def test_lock_step_waits_for_the_slowest_of_each_turn(redis_url):
    workload = Workload(Constant(1), turns=Constant(5), step_s=LogNormal(1.0, 1.0), seed=1)
    free = measure(redis_url, SYSTEM, workload, 1)
    in_step = measure(redis_url, replace(SYSTEM, is_lock_step=True), workload, 1)
    steps = [plan.step_s for plan in free.plans.values()]
    assert free.published_s == pytest.approx([max(map(sum, steps))], abs=0.2)
    assert in_step.published_s == pytest.approx([sum(map(max, zip(*steps, strict=True)))], abs=0.2)


def test_a_gang_returns_with_its_longest_and_holds_its_places(redis_url):
    """One GPU with 2 places: the groups go one after the other."""
    workload = Workload(LogNormal(1000, 1.0), seed=1)
    outcome = measure(redis_url, replace(SYSTEM, gpus=1, is_gang=True), workload, 1)
    by_task = [[plan.num_tokens * 0.01 for (key, _), plan in outcome.plans.items() if key == task] for task in (0, 1)]
    assert outcome.published_s == pytest.approx([sum(map(max, by_task))], abs=0.2)


def test_filtered_groups_are_replaced(redis_url):
    outcome = measure(redis_url, SYSTEM, Workload(Constant(100), filtered_share=0.5), 4)
    assert outcome.trained_samples == [4, 4, 4, 4]
    assert outcome.discarded["filtered:zero_variance"] > 0
    assert 0 < outcome.wasted_share < 1


def test_a_run_is_the_same_every_time(redis_url):
    system, workload = replace(SYSTEM, ratio=1, train_s=1.0), Workload(LogNormal(1000, 1.0), seed=5)
    first, second = (measure(redis_url, system, workload, 8) for _ in range(2))
    assert first.published_s == second.published_s
    assert first.trained == second.trained
    assert first.tokens_wasted == second.tokens_wasted


def test_dropping_loses_slow_tasks(redis_url):
    workload = Workload(Constant(300), task_factor=LogNormal(1, 1.0), seed=2)
    outcome = measure(redis_url, replace(SYSTEM, ratio=1, on_stale="drop"), workload, 12)
    assert outcome.discarded["stale"] > 0
    assert outcome.task_bias() < 1
    assert outcome.wasted_share > 0


def test_lock_step_opens_when_the_last_inside_arrives_or_leaves():
    async def main():
        step, clock, opened = LockStep(), asyncio.get_running_loop(), []

        async def arrive(after_s):
            step.enter()
            await asyncio.sleep(after_s)
            await step.arrive()
            opened.append(clock.time())

        async def leave(after_s):
            step.enter()
            await asyncio.sleep(after_s)
            step.leave()

        await asyncio.gather(arrive(1), arrive(3), leave(5))
        return opened

    assert virtual_time.run(main()) == pytest.approx([5, 5])


def test_places_go_on_in_order_when_a_waiter_is_cancelled():
    async def main():
        places, taken = Slots("gpu", 1), []

        async def take(name):
            async with places.held():
                taken.append(name)
                await asyncio.sleep(1)

        tasks = [asyncio.create_task(take(name)) for name in "abc"]
        await asyncio.sleep(0.5)
        tasks[1].cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        return taken, places.num_free

    assert virtual_time.run(main()) == (["a", "c"], 1)
