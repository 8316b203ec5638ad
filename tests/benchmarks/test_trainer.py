"""What `make bench-trainer` measures: its batch, and how rounds become ratios."""

import statistics

import pytest

from benchmarks.trainer import workload
from benchmarks.trainer.__main__ import Result, report


@pytest.mark.parametrize("num_episodes", [16, 128])
def test_lengths_have_a_long_tail(num_episodes):
    lengths = workload.lengths(num_episodes)
    assert statistics.median(lengths) == pytest.approx(200, rel=0.05)
    assert (min(lengths) > workload.PROMPT_TOKENS, max(lengths)) == (True, 2000)
    assert statistics.mean(lengths) > 1.4 * statistics.median(lengths)


def result(seconds, peak, **shares):
    answers = [{"seconds": each, "peak": peak - index, **shares} for index, each in enumerate(seconds)]
    return Result(tokens=1000, answers=answers)


def test_ratios_are_of_medians_and_of_the_highest_peaks():
    shares = {"padding_share": 0.0, "rank_imbalance": 0.01, "overhead_share": 0.02}
    results = {"ours": result([1.0, 2.0, 9.0], 300, **shares), "theirs": result([8.0, 6.0], 1000), "another": result([1.0], 1)}
    assert report(results, {"block_s": 0.5, "durable_s": 9.0, "resume_s": 12.34}) == {
        "tokens_per_s_vs_trl": 3.5,
        "peak_memory_vs_trl": 0.3,
        "padding_share": 0.0,
        "rank_imbalance": 0.01,
        "overhead_share": 0.02,
        "checkpoint_block_s": 0.5,
        "resume_s": 12.3,
    }
