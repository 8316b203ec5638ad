import json

import pytest

from benchmarks.asynchrony import virtual_time
from benchmarks.asynchrony.real_stack import RealRun, final_reward, read, speedup
from benchmarks.asynchrony.report import FIGURES, json_line
from benchmarks.asynchrony.waiting_calculator import WaitingCalculator
from services.env_agents.environment import RequestedCall, Task


def test_a_run_is_timed_from_its_third_update_to_its_last(tmp_path):
    lines = [{"time": 100 + 10 * index, "wait_prev_gen_s": 2.0, "reward_mean": index / 10} for index in range(8)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
    run = read(tmp_path, ratio=1, on_stale="wait", seed=3)
    assert (run.seconds, run.num_updates, run.wait_s) == (50, 5, 10)
    assert run.reward == pytest.approx(0.65)


def test_speedup_is_over_all_seeds():
    runs = [
        RealRun(ratio, on_stale, seed, seconds, 5, 0, 0)
        for ratio, on_stale, seed, seconds in (
            *((0, "wait", 0, 30), (1, "wait", 0, 10), (1, "drop", 0, 5)),
            *((0, "wait", 1, 30), (1, "wait", 1, 20), (1, "drop", 1, 5)),
        )
    ]
    assert (speedup(runs, "wait"), speedup(runs, "drop")) == (2, 6)


def test_final_reward_is_the_mean_over_the_seeds():
    rewards = ((0, "wait", 0, 0.8), (1, "wait", 0, 0.5), (1, "drop", 0, 0.1), (0, "wait", 1, 0.6), (1, "wait", 1, 0.7))
    runs = [RealRun(ratio, on_stale, seed, 1, 5, 0, reward) for ratio, on_stale, seed, reward in rewards]
    assert final_reward(runs, ratio=0, on_stale="drop") == pytest.approx(0.7)
    assert final_reward(runs, ratio=1, on_stale="wait") == pytest.approx(0.6)
    assert final_reward(runs, ratio=1, on_stale="drop") == pytest.approx(0.1)


def test_the_json_line_has_every_figure_and_null_for_what_was_not_measured():
    figures = json.loads(json_line([], [], 1.5))
    assert tuple(figures) == FIGURES
    assert [name for name, value in figures.items() if value is not None] == ["real_stack_speedup"]


def test_a_waiting_calculator_waits_and_calculates():
    async def main():
        calculator = WaitingCalculator(median_s=100.0, sigma=0.0, seed=0)
        await calculator.reset(Task(task_id="0", seed=0, data={"question": "2 * 3?", "answer": "6"}))
        step = await calculator.call_tools([RequestedCall("calculate", {"expression": "2 * 3"})])
        waited_s = virtual_time.virtual_loop().time()
        return step.messages[0]["content"], await calculator.score("6"), waited_s, virtual_time.virtual_loop().time()

    assert virtual_time.run(main()) == ("6", 1.0, pytest.approx(100), pytest.approx(200))
