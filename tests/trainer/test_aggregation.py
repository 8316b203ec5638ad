"""Weights of tokens by hand, and that they do not depend on how a batch is cut."""

import pytest
import torch

from trainer.aggregation import AGGREGATIONS, BatchSize

MASK = torch.tensor([[0, 1, 1, 1], [0, 0, 1, 0], [0, 0, 0, 0]], dtype=torch.bool)
SIZE = BatchSize(num_sequences=2, num_sampled_tokens=4)


@pytest.mark.parametrize(
    ("mode", "first", "second"),
    [
        ("token-mean", 1 / 4, 1 / 4),
        ("seq-mean-token-mean", 1 / 6, 1 / 2),
        ("seq-mean-token-sum", 1 / 2, 1 / 2),
        ("seq-mean-token-sum-norm", 1 / 20, 1 / 20),
    ],
)
def test_weights_by_hand(mode, first, second):
    weights = AGGREGATIONS[mode](MASK, SIZE, norm_tokens=10)
    torch.testing.assert_close(weights, torch.tensor([[0, first, first, first], [0, 0, second, 0], [0, 0, 0, 0]]))


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean"])
def test_weights_of_a_mean_sum_to_one(mode):
    assert AGGREGATIONS[mode](MASK, SIZE, norm_tokens=None).sum().item() == pytest.approx(1.0)


@pytest.mark.parametrize("mode", AGGREGATIONS)
def test_rows_weigh_the_same_in_any_micro_batch(mode):
    whole = AGGREGATIONS[mode](MASK, SIZE, norm_tokens=10)
    parts = torch.cat([AGGREGATIONS[mode](MASK[row : row + 1], SIZE, norm_tokens=10) for row in range(3)])
    assert torch.equal(whole, parts)
