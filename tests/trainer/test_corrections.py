"""Weights of off-policy corrections by hand, and against a loop over tokens."""

import math

import pytest
import torch

from shared.loss_settings import CorrectionSection
from tests.trainer.micro_batches import micro_batch
from trainer.corrections import ACTIONS, LEVELS, correct

MASK = [[False, True, True, False, True]]
RATIOS = [[9.0, 4.0, 0.5, 9.0, 0.25]]
"""Product 0.5, of the first turn 2, of the second 0.25."""
ROWS = micro_batch(MASK, turns=[[0, 0, 0, 0, 1]], versions=[[0, 5, 4, 0, 3]])


def corrected(ratios=RATIOS, rows=ROWS, **settings):
    return correct(torch.tensor(ratios).log(), rows, CorrectionSection(**settings), version=5)


def sampled(tensor_BT, rows=ROWS):
    return tensor_BT[rows.loss_mask_BT].tolist()


@pytest.mark.parametrize(
    ("level", "weights"),
    [("token", [2.0, 0.5, 0.25]), ("turn", [2.0, 2.0, 0.25]), ("sequence", [0.5] * 3), ("geometric", [0.5 ** (1 / 3)] * 3)],
)
def test_truncated_weights_by_hand(level, weights):
    found = corrected(action="truncate", level=level, high=2.0)
    assert sampled(found.weights_BT) == pytest.approx(weights, rel=1e-5)
    assert sampled(found.is_truncated_BT) == [level == "token", False, False]
    assert not found.is_dropped_BT[ROWS.loss_mask_BT].any()


@pytest.mark.parametrize(
    ("level", "kept"),
    [
        ("token", [False, True, False]),
        ("turn", [False, False, False]),
        ("sequence", [True, True, True]),
        ("geometric", [True, True, True]),
    ],
)
def test_masked_weights_by_hand(level, kept):
    found = corrected(action="mask", level=level, low=0.4, high=1.5)
    assert sampled(found.weights_BT) == [float(each) for each in kept]
    assert sampled(found.is_dropped_BT) == [not each for each in kept]


def test_masked_importance_weights_by_hand():
    found = corrected(action="masked_is", low=0.3, high=4.5)
    assert sampled(found.weights_BT) == pytest.approx([4.0, 0.5, 0.0], rel=1e-5)
    assert sampled(found.is_dropped_BT) == [False, False, True]


# Of log 4, log 1/2 and log 1/4: mean -log r = log(2) / 3, mean ½ log² r = 1.5 log²(2), mean r - 1 - log r = (1.75 + log 2) / 3.
@pytest.mark.parametrize(
    ("estimator", "mean"), [("k1", math.log(2) / 3), ("k2", 1.5 * math.log(2) ** 2), ("k3", (1.75 + math.log(2)) / 3)]
)
def test_sequences_are_rejected_by_their_mean_estimate(estimator, mean):
    above, below = (corrected(reject_by=estimator, reject_above=mean + offset) for offset in (-1e-4, 1e-4))
    assert sampled(above.weights_BT) == [0.0] * 3
    assert sampled(below.weights_BT) == [1.0] * 3


def test_k1_rejects_by_its_absolute_value():
    assert sampled(corrected([[1.0, 2.0, 2.0, 1.0, 2.0]], reject_by="k1", reject_above=0.6).weights_BT) == [0.0] * 3


def test_tokens_over_an_age_are_masked():
    assert sampled(corrected(max_age=1).weights_BT) == [1.0, 1.0, 0.0]


def test_parts_multiply():
    found = corrected(action="truncate", level="token", high=2.0, max_age=1, reject_by="k3", reject_above=10.0)
    assert sampled(found.weights_BT) == pytest.approx([2.0, 0.5, 0.0])
    assert sampled(found.is_dropped_BT) == [False, False, True]


def test_without_settings_every_weight_is_one():
    found = corrected()
    assert sampled(found.weights_BT) == [1.0] * 3
    assert not (found.is_dropped_BT | found.is_truncated_BT)[ROWS.loss_mask_BT].any()


@pytest.mark.parametrize("action", ACTIONS)
@pytest.mark.parametrize("level", LEVELS)
def test_agrees_with_a_loop_over_tokens(level, action):
    generator = torch.Generator().manual_seed(5)
    mask = torch.rand(6, 12, generator=generator) < 0.6
    mask[0] = False
    turns = torch.arange(12).expand(6, 12) // 4
    log_ratios = 0.3 * torch.randn(6, 12, generator=generator)
    settings = CorrectionSection(action=action, level=level, low=0.8, high=1.2)
    actual = correct(log_ratios, micro_batch(mask, turns=turns), settings, version=0).weights_BT
    for row in range(6):
        for token in range(12):
            if not mask[row, token]:
                continue
            members = {
                "token": [token],
                "turn": [t for t in range(12) if mask[row, t] and t // 4 == token // 4],
            }.get(level, [t for t in range(12) if mask[row, t]])
            total = sum(log_ratios[row, t].item() for t in members)
            ratio = math.exp(total / len(members) if level == "geometric" else total)
            is_within = 0.8 <= ratio <= 1.2
            expected = {"none": 1.0, "truncate": min(ratio, 1.2), "mask": float(is_within), "masked_is": ratio * is_within}[action]
            assert actual[row, token].item() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("level", LEVELS)
def test_rows_weigh_the_same_in_any_micro_batch(level):
    generator = torch.Generator().manual_seed(6)
    mask = torch.rand(4, 8, generator=generator) < 0.6
    log_ratios = torch.randn(4, 8, generator=generator)
    settings = CorrectionSection(action="truncate", level=level, reject_by="k2", reject_above=0.4)
    whole = correct(log_ratios, micro_batch(mask), settings, version=0).weights_BT
    parts = [
        correct(log_ratios[row : row + 1], micro_batch(mask[row : row + 1]), settings, version=0).weights_BT for row in range(4)
    ]
    assert torch.equal(whole, torch.cat(parts))


def test_extreme_ratios_stay_finite():
    rows = micro_batch([[True] * 4])
    for level in LEVELS:
        settings = CorrectionSection(action="masked_is", level=level, low=0.0, high=1e9)
        assert torch.isfinite(correct(torch.tensor([[1e4, -1e4, 50.0, 90.0]]), rows, settings, version=0).weights_BT).all()
