"""Which attention is used, and that it refuses what it cannot compute."""

import pytest
import torch
from torch import nn

from shared.errors import ConfigurationError
from trainer.attention import attention_kind, sdpa_by_row


@pytest.mark.parametrize(
    ("wanted", "dtype", "is_cuda", "has_flash", "kind"),
    [
        ("auto", "bfloat16", True, True, "flash"),
        ("auto", "bfloat16", True, False, "sdpa"),
        ("auto", "float32", True, True, "sdpa"),
        ("auto", "bfloat16", False, False, "sdpa"),
        ("sdpa", "bfloat16", True, True, "sdpa"),
        ("unpacked", "bfloat16", True, True, "unpacked"),
        ("flash", "bfloat16", True, True, "flash"),
    ],
)
def test_auto_is_flash_where_it_can_be_used(wanted, dtype, is_cuda, has_flash, kind):
    assert attention_kind(wanted, dtype=dtype, is_cuda=is_cuda, has_flash=has_flash) == kind


def test_flash_without_a_gpu_is_refused_in_words():
    with pytest.raises(ConfigurationError, match="got dtype float32, no GPU, flash-attn not installed; use auto"):
        attention_kind("flash", dtype="float32", is_cuda=False, has_flash=False)


def explicit(query, key, value, lengths, window):
    """Softmax attention over all pairs, in float64, with every pair of two rows or out of the window forbidden."""
    groups = query.shape[1] // key.shape[1]
    query, key, value = query.double(), key.double().repeat_interleave(groups, 1), value.double().repeat_interleave(groups, 1)
    row = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    age = torch.arange(len(row))[:, None] - torch.arange(len(row))
    allowed = (row[:, None] == row) & (age >= 0) & (age < window)
    scores = (query @ key.transpose(-1, -2) * 0.3).masked_fill(~allowed, -torch.inf)
    return (scores.softmax(-1) @ value).transpose(1, 2).float()


@pytest.mark.parametrize("window", [None, 3])
def test_rows_of_a_pack_by_hand(window):
    torch.manual_seed(0)
    query, key, value = torch.randn(1, 4, 11, 8), torch.randn(1, 2, 11, 8), torch.randn(1, 2, 11, 8)
    lengths = (5, 1, 3, 2)
    actual, _ = sdpa_by_row(nn.Identity(), query, key, value, None, row_lengths=lengths, scaling=0.3, sliding_window=window)
    torch.testing.assert_close(actual, explicit(query, key, value, lengths, window or 99), rtol=0, atol=1e-6)


@pytest.mark.parametrize("beyond", [{"softcap": 50.0}, {"s_aux": torch.zeros(4)}, {"is_causal": False}])
def test_what_the_kernel_cannot_do_is_refused(beyond):
    tensors = [torch.zeros(1, 2, 3, 8)] * 3
    with pytest.raises(ConfigurationError, match="use flash or unpacked"):
        sdpa_by_row(nn.Identity(), *tensors, None, row_lengths=(3,), **beyond)
