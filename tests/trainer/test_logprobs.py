"""Log-probabilities of sampled tokens against a full float64 softmax."""

import pytest
import torch

from trainer import logprobs
from trainer.logprobs import sampled_token_logprobs


@pytest.fixture(params=[False, True], ids=["without bias", "with bias"])
def inputs(request):
    torch.manual_seed(1)
    hidden = torch.randn(9, 16, requires_grad=True)
    head = torch.nn.Linear(16, 50, bias=request.param)
    return hidden, head, torch.randint(0, 50, (9,)), torch.tensor([1.0, 0.5, 1.7] * 3)


def explicit(hidden, head, tokens, temperatures):
    logits = (hidden.double() @ head.weight.double().T + (0 if head.bias is None else head.bias.double())) / temperatures[:, None]
    return torch.log_softmax(logits, dim=1)[torch.arange(len(tokens)), tokens]


def with_gradients(values, hidden, head):
    hidden.grad = head.weight.grad = None
    if head.bias is not None:
        head.bias.grad = None
    (values * torch.linspace(-1, 2, len(values))).sum().backward()
    return [values.detach().float(), hidden.grad, head.weight.grad, *([] if head.bias is None else [head.bias.grad])]


@pytest.mark.parametrize("max_logits", [2**24, 2 * 50, 1])
def test_values_and_gradients_are_a_full_softmaxs_however_it_is_chunked(inputs, monkeypatch, max_logits):
    hidden, head, tokens, temperatures = inputs
    expected = with_gradients(explicit(hidden, head, tokens, temperatures), hidden, head)
    monkeypatch.setattr(logprobs, "MAX_CHUNK_LOGITS", max_logits)
    actual = with_gradients(sampled_token_logprobs(hidden, head, tokens, temperatures), hidden, head)
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_a_frozen_output_layer_passes_gradients_through(inputs):
    hidden, head, tokens, temperatures = inputs
    head.requires_grad_(False)
    sampled_token_logprobs(hidden, head, tokens, temperatures).sum().backward()
    assert head.weight.grad is None
    assert hidden.grad.abs().sum() > 0


def test_a_float32_head_rounds_less_than_a_bfloat16_one(inputs):
    hidden, head, tokens, temperatures = inputs
    head = head.bfloat16()
    short = hidden.detach().bfloat16()
    expected = explicit(short, head, tokens, temperatures).float()
    errors = [
        (sampled_token_logprobs(short, head, tokens, temperatures, is_float32=is_float32) - expected).abs().max()
        for is_float32 in (True, False)
    ]
    assert errors[0] < 1e-5 < errors[1] < 0.05


def test_bfloat16_gradients_stay_close(inputs):
    hidden, head, tokens, temperatures = inputs
    expected = with_gradients(explicit(hidden, head, tokens, temperatures), hidden, head)
    short, head = hidden.detach().bfloat16().requires_grad_(), head.bfloat16()
    actual = with_gradients(sampled_token_logprobs(short, head, tokens, temperatures), short, head)
    for one, other in zip(actual[1:], expected[1:], strict=True):
        assert torch.nn.functional.cosine_similarity(one.float().flatten(), other.flatten(), dim=0) > 0.999


def test_nothing_sampled_backpropagates_zero(inputs):
    hidden, head, tokens, temperatures = inputs
    values = sampled_token_logprobs(hidden[:0], head, tokens[:0], temperatures[:0])
    values.sum().backward()
    assert values.shape == (0,)
    assert (head.weight.grad == 0).all()


def test_chunks_bound_the_logits_alive_at_once():
    assert [(part.start, part.stop) for part in logprobs._chunks(5, 2**23)] == [(0, 2), (2, 4), (4, 6)]
