"""The sampler against the trainer's own log-probabilities, and what is read off a curve."""

import asyncio
import json

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from benchmarks.learning.__main__ import arms
from benchmarks.learning.experiment import Arm, Curve
from benchmarks.learning.report import by_arm, json_line
from benchmarks.learning.sampler import TorchSampler
from shared.environment_spec import SamplingParameters
from tests.trainer.learning import section
from trainer.model import load_policy

STOP_ID = 7
PROMPTS = ([5, 9, 3], [4] * 11, [8, 2, 6, 1, 9, 3])


def sample(sampler, prompts, *, is_greedy=False, max_new_tokens=12, temperature=0.8):
    async def call(prompt):
        sampling = SamplingParameters(temperature=temperature)
        options = {"max_new_tokens": max_new_tokens, "is_greedy": is_greedy, "session_id": "", "deadline": 0.0}
        return await sampler.generate(prompt, sampling=sampling, **options)

    async def all_calls():
        for _ in prompts:
            sampler.open_episode()
        generations = await asyncio.gather(*map(call, prompts))
        for _ in prompts:
            sampler.close_episode()
        return generations

    return asyncio.run(all_calls())


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=32,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        tie_word_embeddings=True,
        initializer_range=0.3,
    )
    path = tmp_path_factory.mktemp("model")
    Qwen3ForCausalLM(config).save_pretrained(path)
    return path


@pytest.fixture
def sampler(model_path):
    return TorchSampler(model_path, [STOP_ID], seed=0)


def test_logprobs_are_those_that_the_trainer_computes(sampler, model_path):
    policy = load_policy(model_path, section())
    for prompt, generation in zip(PROMPTS, sample(sampler, PROMPTS), strict=True):
        token_ids = torch.tensor([prompt + generation.token_ids])
        mask = torch.tensor([[False] * len(prompt) + [True] * len(generation.token_ids)])
        with torch.no_grad():
            expected = policy(token_ids, mask, torch.tensor([0.8]))[mask]
        assert generation.logprobs == pytest.approx(expected.tolist(), abs=1e-5)
        assert [(span.start, span.end) for span in generation.version_spans] == [(0, len(generation.token_ids))]


def test_a_row_does_not_depend_on_what_it_is_batched_with(sampler):
    together = sample(sampler, PROMPTS, is_greedy=True)
    alone = [sample(sampler, [prompt], is_greedy=True)[0] for prompt in PROMPTS]
    assert [generation.token_ids for generation in together] == [generation.token_ids for generation in alone]


def test_a_turn_ends_with_the_stop_token_or_is_cut(sampler):
    generations = sample(sampler, [[5, 9, 3]] * 64, max_new_tokens=20, temperature=2.0)
    stopped = [generation for generation in generations if not generation.is_cut]
    assert stopped
    assert all(generation.token_ids.index(STOP_ID) == len(generation.token_ids) - 1 for generation in stopped)
    cut = [generation for generation in generations if generation.is_cut]
    assert all(len(generation.token_ids) == 20 and STOP_ID not in generation.token_ids for generation in cut)


def test_new_weights_sample_with_their_version(sampler, model_path):
    weights = {name: torch.zeros_like(weight) for name, weight in load_policy(model_path, section()).named_weights()}
    sampler.load(weights, version=3)
    (generation,) = sample(sampler, [[5, 9, 3]], temperature=1.0)
    assert generation.version_spans[0].version == 3
    assert len(set(generation.logprobs)) == 1, "all tokens are equally likely"


def test_a_curve_is_summed_up():
    curve = Curve(Arm("ppo", 1), seed=0, updates=(0, 5, 10, 20), success=(0.2, 0.4, 0.6, 0.8))
    assert curve.final == pytest.approx(0.6)
    assert curve.area == pytest.approx((5 * 0.3 + 5 * 0.5 + 10 * 0.7) / 20)


def test_the_json_line_takes_the_worst_corrected_arm_up_to_two_updates_of_lag():
    def curve(variant, lag, final):
        return Curve(Arm(variant, lag), seed=0, updates=(0, 5), success=(final, final))

    curves = [
        *(curve("ppo", 0, 0.9), curve("ppo", 1, 0.8), curve("tis", 2, 0.7), curve("tis", 4, 0.1)),
        *(curve("vanilla", 2, 0.0), curve("vanilla", 4, 0.05)),
    ]
    assert json.loads(json_line(curves)) == {"synchronous": 0.9, "worst_corrected_alpha_2": 0.7, "vanilla_alpha_4": 0.05}


def test_every_arm_has_a_name_of_its_own():
    assert len(by_arm(Curve(arm, 0, (0, 1), (0.0, 0.0)) for arm in arms(""))) == len(arms("")) == 19
    assert [arm.name for arm in arms("tis, α = 4")] == ["synchronous", "tis, α = 4"]
