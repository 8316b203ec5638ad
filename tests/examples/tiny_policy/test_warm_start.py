from itertools import islice

import pytest
import torch

from examples.tiny_policy import warm_start
from examples.tiny_policy.demonstrations import Demonstration
from examples.tiny_policy.model import new_policy
from examples.tiny_policy.warm_start import learn_careless, learn_clean, measure


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def policy(tokenizer):
    return new_policy(tokenizer, seed=0)


class Fits:
    """An observer that remembers."""

    def __init__(self):
        self.seen = []

    def __call__(self, stage, step, fit):
        self.seen.append((stage, step, fit))


def slow_fit(policy, demonstrations):
    """Loss, greedy and sampled success, one episode and one token at a time."""
    losses, greedy, sampled = [], [], []
    for demonstration in demonstrations:
        token_ids = torch.tensor([demonstration.token_ids])
        with torch.no_grad():
            logprobs_TV = policy(token_ids).logits[0].double().log_softmax(-1)
        chosen = [position for position, mask in enumerate(demonstration.loss_mask) if mask]
        logprobs = [float(logprobs_TV[position - 1, demonstration.token_ids[position]]) for position in chosen]
        losses += [-logprob for logprob in logprobs]
        greedy.append(all(int(logprobs_TV[position - 1].argmax()) == demonstration.token_ids[position] for position in chosen))
        sampled.append(float(torch.tensor(logprobs).sum().exp()))
    return sum(losses) / len(losses), sum(greedy) / len(greedy), sum(sampled) / len(sampled)


def test_measured_fit_is_that_of_single_episodes(policy, careful, monkeypatch):
    monkeypatch.setattr(warm_start, "CARELESS_STEPS", 20)
    learn_careless(policy, careful, Fits())
    demonstrations = list(islice(careful, 8))
    fit = measure(policy, demonstrations)
    loss, greedy, sampled = slow_fit(policy, demonstrations)
    assert fit.loss == pytest.approx(loss, rel=1e-4)
    assert fit.greedy == greedy
    assert fit.sampled == pytest.approx(sampled, rel=1e-3)


def test_only_assistant_tokens_are_learned(policy):
    """The last token follows nothing that is learned, so it may be any."""
    one = Demonstration([5, 6, 7, 8], [0, 1, 1, 0])
    other = Demonstration([5, 6, 7, 9], [0, 1, 1, 0])
    assert measure(policy, [one]) == measure(policy, [other])
    assert measure(policy, [one]) != measure(policy, [Demonstration([5, 6, 9, 8], [0, 1, 1, 0])])


def test_same_seed_makes_the_same_policy(tokenizer, demonstrator, careful, monkeypatch):
    monkeypatch.setattr(warm_start, "CLEAN_MAX_STEPS", 3)
    demonstrations = list(islice(careful, 3 * warm_start.BATCH_SIZE))
    policies = [new_policy(tokenizer, seed=seed) for seed in (0, 0, 1)]
    for policy in policies:
        learn_clean(policy, iter(demonstrations), Fits())
    first, again, other = (policy.model.embed_tokens.weight for policy in policies)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_clean_stage_learns(policy, careful, monkeypatch):
    monkeypatch.setattr(warm_start, "CLEAN_MAX_STEPS", 40)
    monkeypatch.setattr(warm_start, "CLEAN_DECAY_STEPS", 10)
    fits = Fits()
    learn_clean(policy, careful, fits)
    assert len(fits.seen) == 40
    assert fits.seen[-1][2].loss < fits.seen[0][2].loss / 3


def test_clean_stage_ends_its_decay_after_mastery(policy, careful, monkeypatch):
    monkeypatch.setattr(warm_start, "MASTERY", 0.0)
    monkeypatch.setattr(warm_start, "CLEAN_DECAY_STEPS", 4)
    fits = Fits()
    learn_clean(policy, careful, fits)
    assert [(stage, step) for stage, step, _ in fits.seen] == [("careful", step) for step in range(5)]
