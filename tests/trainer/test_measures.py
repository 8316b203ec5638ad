"""What an update measures, by hand."""

import math

import pytest
import torch

from shared.errors import TrainingError
from trainer.measures import Measures, MeasureSums
from trainer.mismatch import MismatchCheck


def measured(log_ratios, *, on_policy=True, clipped=None):
    sums = MeasureSums(torch.device("cpu"))
    for index, value in enumerate(log_ratios):
        sums.add(
            loss=torch.tensor(0.5),
            log_ratio_BT=torch.tensor([[99.0, value]]),
            is_clipped_BT=torch.tensor([[True, bool(clipped and clipped[index])]]),
            loss_mask_BT=torch.tensor([[False, True]]),
            is_on_policy_B1=torch.tensor([[on_policy]]),
        )
    return sums.reduce()


def test_measures_by_hand(one_rank):
    # Ratios 1 and 3 of two tokens, the second clipped; the masked token counts nowhere.
    measures = measured([0.0, math.log(3)], clipped=[False, True])
    assert measures.loss == pytest.approx(1.0)
    assert measures.clip_fraction == pytest.approx(0.5)
    assert measures.mean_ratio == pytest.approx(2.0, rel=1e-5)
    assert measures.effective_sample_size == pytest.approx(16 / (2 * 10), rel=1e-5)
    assert measures.kl_behaviour == pytest.approx((0 + 2 - math.log(3)) / 2, rel=1e-5)
    assert measures.logprob_mismatch_max == pytest.approx(math.log(3), rel=1e-5)
    assert measures.logprob_mismatch_mean == pytest.approx(math.log(3) / 2, rel=1e-5)


def test_on_policy_data_has_a_full_effective_sample_size(one_rank):
    measures = measured([0.0, 0.0, 0.0])
    assert (measures.effective_sample_size, measures.kl_behaviour, measures.mean_ratio) == (1.0, 0.0, 1.0)


def test_stale_episodes_say_nothing_about_the_engine(one_rank):
    measures = measured([0.3], on_policy=False)
    assert measures.logprob_mismatch_max is None
    assert measures.logprob_mismatch_mean is None


def measures_with(mismatch):
    return Measures(0.0, 0.0, 1.0, 1.0, 0.0, mismatch, mismatch)


def test_first_comparable_batch_decides():
    check = MismatchCheck(max_mean_mismatch=0.1)
    check.judge(measures_with(None))
    with pytest.raises(TrainingError, match=r"differ by 0.2 on average"):
        check.judge(measures_with(0.2))


def test_later_batches_are_not_judged():
    check = MismatchCheck(max_mean_mismatch=0.1)
    check.judge(measures_with(0.05))
    check.judge(measures_with(0.2))


def test_a_policy_that_yields_nan_is_refused():
    with pytest.raises(TrainingError, match="nan on average"):
        MismatchCheck(max_mean_mismatch=0.1).judge(measures_with(math.nan))
