"""What an update measures, by hand."""

import math

import pytest
import torch

from tests.trainer.micro_batches import micro_batch
from trainer.corrections import Correction
from trainer.losses import PolicyLoss
from trainer.measures import MeasureSums


def measured(log_ratios, *, on_policy=True, clipped=False, weights=None, kl=0.0):
    """Micro-batches of one sampled token, with a masked one before it that must count nowhere."""
    sums = MeasureSums(torch.device("cpu"))
    for index, value in enumerate(log_ratios):
        weight = 1.0 if weights is None else weights[index]
        sums.add(
            loss=torch.tensor(0.5),
            rows=micro_batch([[False, True]], on_policy=[[on_policy]]),
            log_ratio_BT=torch.tensor([[99.0, value]]),
            policy_loss=PolicyLoss(torch.zeros(1, 2), torch.tensor([[True, clipped and index == 1]])),
            correction=Correction(
                torch.tensor([[9.0, weight]]), torch.tensor([[True, weight == 2]]), torch.tensor([[True, weight == 0]])
            ),
            kl_BT=torch.tensor([[99.0, kl]]),
        )
    return sums.reduce()


def test_measures_by_hand(one_rank):
    # Ratios 1 and 3 of two tokens, the second clipped; the masked token counts nowhere.
    measures = measured([0.0, math.log(3)], clipped=True)
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


def test_corrections_and_the_reference_are_measured_by_hand(one_rank):
    measures = measured([0.0] * 4, weights=[2.0, 0.0, 0.0, 1.0], kl=0.25)
    assert (measures.truncated_fraction, measures.dropped_fraction, measures.mean_weight) == (0.25, 0.5, 0.75)
    assert measures.kl_reference == 0.25
