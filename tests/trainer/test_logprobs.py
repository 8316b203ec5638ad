"""Log-probabilities of sampled tokens against a full float64 softmax."""

import pytest
import torch

from trainer import logprobs
from trainer.logprobs import sampled_token_logprobs


@pytest.fixture
def inputs():
    torch.manual_seed(1)
    hidden = torch.randn(3, 7, 16, requires_grad=True)
    head = torch.nn.Linear(16, 50, bias=False)
    tokens = torch.randint(0, 50, (3, 7))
    mask = torch.rand(3, 7) < 0.6
    mask[:, 0] = False
    return hidden, head, tokens, mask, torch.tensor([1.0, 0.5, 1.7])


def test_token_t_is_predicted_at_t_minus_one_at_its_temperature(inputs):
    hidden, head, tokens, mask, temperatures = inputs
    actual = sampled_token_logprobs(hidden, head, tokens, mask, temperatures)
    for row in range(3):
        for t in range(7):
            expected = 0.0
            if mask[row, t]:
                logits = head(hidden[row, t - 1]).double() / temperatures[row].double()
                expected = torch.log_softmax(logits, dim=0)[tokens[row, t]].item()
            assert actual[row, t].item() == pytest.approx(expected, rel=1e-5)


def test_chunks_change_neither_value_nor_gradient(inputs, monkeypatch):
    hidden, head, tokens, mask, temperatures = inputs
    results = []
    for max_logits in (2**24, 3 * 50, 1):
        monkeypatch.setattr(logprobs, "MAX_CHUNK_LOGITS", max_logits)
        hidden.grad = head.weight.grad = None
        values = sampled_token_logprobs(hidden, head, tokens, mask, temperatures)
        values.sum().backward()
        results.append((values.detach(), hidden.grad, head.weight.grad))
    for result in results[1:]:
        for actual, expected in zip(result, results[0], strict=True):
            torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)


def test_nothing_sampled_gives_zeros_that_backpropagate(inputs):
    hidden, head, tokens, mask, temperatures = inputs
    values = sampled_token_logprobs(hidden, head, tokens, torch.zeros_like(mask), temperatures)
    values.sum().backward()
    assert (values == 0).all()
    assert (head.weight.grad == 0).all()
