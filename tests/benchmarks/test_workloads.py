import numpy as np
import pytest

from benchmarks.asynchrony.workloads import Constant, LogNormal, Normal, Workload, bound_s


def test_a_plan_depends_on_seed_task_and_occurrence_only():
    workload = Workload(LogNormal(100, 1.0), turns=Normal(5, 2), step_s=Normal(1, 1), seed=3)
    assert workload.plan(7, 2) == workload.plan(7, 2)
    assert workload.plan(7, 2) != workload.plan(7, 3)
    assert workload.plan(7, 2) != Workload(LogNormal(100, 1.0), turns=Normal(5, 2), step_s=Normal(1, 1), seed=4).plan(7, 2)


def test_a_plan_has_a_latency_for_every_turn():
    plan = Workload(Constant(10), turns=Constant(3), step_s=Constant(2.0), reward_s=Constant(1.0)).plan(0, 0)
    assert plan.turn_tokens == (10, 10, 10)
    assert plan.step_s == (2.0, 2.0, 2.0)
    assert plan.reward_s == 1.0
    assert plan.num_tokens == 30


def test_slow_tasks_are_slow_every_time():
    workload = Workload(Constant(1000), task_factor=LogNormal(1, 1.0))
    plans = [{workload.plan(task, occurrence).num_tokens for occurrence in range(4)} for task in range(8)]
    assert all(len(lengths) == 1 for lengths in plans)
    assert len(set.union(*plans)) == 8


def test_all_episodes_of_a_task_are_filtered_or_none():
    workload = Workload(Constant(1), filtered_share=0.5)
    shares = [{workload.plan(task, occurrence).is_filtered for occurrence in range(4)} for task in range(400)]
    assert all(len(share) == 1 for share in shares)
    assert sum(True in share for share in shares) / 400 == pytest.approx(0.5, abs=0.1)


def test_draws_have_their_distribution():
    rng = np.random.default_rng(0)
    assert min(Normal(10, 10).draw(rng, 10_000)) == 0
    lengths = LogNormal(400, 1.0, 8000).draw(rng, 10_000)
    assert max(lengths) == 8000
    assert np.median(lengths) == pytest.approx(400, rel=0.1)


def test_bound_is_the_papers():
    """(64 / 8) (2 + 0.5) + 30 / 3"""
    assert bound_s(samples=64, gpus=8, mu_gen_s=2, mu_train_s=0.5, longest_s=30, ratio=2) == pytest.approx(30)


def test_few_reward_workers_add_their_queue_to_the_bound():
    """30 + (64 / 4) 1.5"""
    bound = bound_s(samples=64, gpus=8, mu_gen_s=2, mu_train_s=0.5, longest_s=30, ratio=2, mu_reward_s=1.5, reward_workers=4)
    assert bound == pytest.approx(54)
