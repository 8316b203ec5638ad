"""Weights of tokens by hand, and that they do not depend on how a batch is cut."""

import pytest
import torch

from trainer.aggregation import AGGREGATIONS, BatchSize, seq_mean_token_mean, token_mean

MASK = torch.tensor([[0, 1, 1, 1], [0, 0, 1, 0], [0, 0, 0, 0]], dtype=torch.bool)


def test_token_mean_by_hand():
    weights = token_mean(MASK, BatchSize(num_sequences=2, num_sampled_tokens=4))
    torch.testing.assert_close(weights, torch.tensor([[0, 0.25, 0.25, 0.25], [0, 0, 0.25, 0], [0, 0, 0, 0]]))


def test_seq_mean_token_mean_by_hand():
    weights = seq_mean_token_mean(MASK, BatchSize(num_sequences=2, num_sampled_tokens=4))
    torch.testing.assert_close(weights, torch.tensor([[0, 1 / 6, 1 / 6, 1 / 6], [0, 0, 0.5, 0], [0, 0, 0, 0]]))


@pytest.mark.parametrize("mode", AGGREGATIONS)
def test_weights_of_a_whole_batch_sum_to_one(mode):
    weights = AGGREGATIONS[mode](MASK, BatchSize(num_sequences=2, num_sampled_tokens=4))
    assert weights.sum().item() == pytest.approx(1.0)


@pytest.mark.parametrize("mode", AGGREGATIONS)
def test_rows_weigh_the_same_in_any_micro_batch(mode):
    size = BatchSize(num_sequences=2, num_sampled_tokens=4)
    whole = AGGREGATIONS[mode](MASK, size)
    parts = torch.cat([AGGREGATIONS[mode](MASK[row : row + 1], size) for row in range(3)])
    assert torch.equal(whole, parts)
