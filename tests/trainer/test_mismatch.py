"""Whether trainer and engine compute the same policy, and what the differences say about the cause."""

import math

import pytest
import torch

from shared.errors import TrainingError
from tests.trainer.micro_batches import micro_batch
from trainer.mismatch import Comparison, MismatchCheck, diagnosis

CPU = torch.device("cpu")


class Scorer:
    """Log-probabilities of fixed logits at the rows' temperatures."""

    def __init__(self, num_rows=4, num_tokens=50):
        generator = torch.Generator().manual_seed(0)
        self.logits = 3 * torch.randn(num_rows, num_tokens, 30, generator=generator)
        self.tokens = torch.distributions.Categorical(logits=self.logits).sample()
        self.num_calls = 0

    def at(self, temperatures_B):
        logprobs = torch.log_softmax(self.logits / temperatures_B[:, None, None], dim=-1)
        return logprobs.gather(2, self.tokens[..., None])[..., 0]

    def __call__(self, rows):
        self.num_calls += 1
        return self.at(rows.temperatures_B)


@pytest.fixture
def scorer(one_rank):
    return Scorer()


def rows(scorer, behaviour, *, on_policy=True, temperature=1.0):
    num_rows, num_tokens = behaviour.shape
    turns = (torch.arange(num_tokens) * 2 // num_tokens).expand(num_rows, num_tokens)
    return micro_batch(
        torch.ones(num_rows, num_tokens),
        behaviour=behaviour,
        turns=turns,
        on_policy=torch.full((num_rows, 1), on_policy),
        temperatures=torch.full((num_rows,), temperature),
    )


def judged(scorer, behaviour, *, max_mean=0.05, **settings):
    """What training is refused with."""
    with pytest.raises(TrainingError) as caught:
        MismatchCheck(scorer, max_mean=max_mean, device=CPU).judge([rows(scorer, behaviour, **settings)])
    return str(caught.value)


def test_agreement_passes_once_and_for_all(scorer):
    check = MismatchCheck(scorer, max_mean=0.05, device=CPU)
    exact = scorer.at(torch.ones(4))
    check.judge([rows(scorer, exact)])
    check.judge([rows(scorer, exact + 5)])
    assert scorer.num_calls == 1


def test_stale_episodes_are_not_judged_and_leave_the_check_open(scorer):
    check = MismatchCheck(scorer, max_mean=0.05, device=CPU)
    behaviour = scorer.at(torch.ones(4)) + 5
    check.judge([rows(scorer, behaviour, on_policy=False)])
    assert scorer.num_calls == 0
    with pytest.raises(TrainingError):
        check.judge([rows(scorer, behaviour)])


def test_refusal_says_rule_and_values(scorer):
    sentence = judged(scorer, scorer.at(torch.ones(4)) - 0.5, max_mean=0.25)
    assert "within a mean of trainer.max_logprob_mismatch=0.25, and differ by 0.5 on average and 0.5 at most over 200" in sentence


@pytest.mark.parametrize(("recorded", "sampled"), [(1.0, 0.7), (0.7, 1.0), (1.0, 1.5)])
def test_another_temperature_is_found(scorer, recorded, sampled):
    sentence = judged(scorer, scorer.at(torch.full((4,), sampled)), temperature=recorded)
    assert f"at {sampled / recorded:.1f}" in sentence
    assert f"times the recorded {recorded:g}" in sentence
    assert "so the engine samples at another temperature than the records say" in sentence


def test_rounding_is_told_from_another_model(scorer):
    exact = scorer.at(torch.ones(4))
    noise = torch.randn(exact.shape, generator=torch.Generator().manual_seed(1))
    assert "likely cause: rounding; give engines.dtype and trainer.dtype" in judged(scorer, exact + 0.1 * noise)
    assert "the engine was started from another model than run.model_path" in judged(scorer, exact[:, torch.randperm(50)])


def test_differences_in_later_turns_point_at_the_cache(scorer):
    exact = scorer.at(torch.ones(4))
    exact[:, 25:] -= 2.0 * torch.rand(4, 25, generator=torch.Generator().manual_seed(2))
    exact[:, :25] += 0.01
    sentence = judged(scorer, exact)
    assert "first turns differ by 0.01 and later ones by" in sentence
    assert "a prefix cache that outlived a weight update" in sentence


def test_few_far_tokens_point_at_an_event(scorer):
    exact = scorer.at(torch.ones(4))
    exact[:, [3, 40]] -= 3.0
    assert "only 4.0% of the tokens differ by more than 1; likely causes: a prefix cache" in judged(scorer, exact)


def test_a_policy_that_yields_nan_is_refused(scorer):
    exact = scorer.at(torch.ones(4))
    exact[0, 0] = math.nan
    assert "differ by nan on average" in judged(scorer, exact)
    found = Comparison(4, math.nan, math.nan, math.nan, 0.0, math.nan, math.nan, 1.0)
    assert "not numbers" in diagnosis(found, (0.5, found))
