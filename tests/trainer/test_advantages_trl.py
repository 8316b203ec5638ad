"""The same numbers from TRL, where it has the formula: a step of its own trainers on a tiny model, with rewards that are given."""

import numpy as np
import pytest
import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer
from trl.rewards import get_soft_overlong_punishment

from shared.advantage_settings import AdvantageSection
from trainer.advantages import ADVANTAGE_ESTIMATORS
from trainer.group_advantages import EpisodeRewards, overlong_penalty

GROUPS = ((1.0, 0.0, 0.25, 1.0), (3.0, 3.5, 2.0, -1.0))


def tokenizer():
    vocabulary = {f"t{index}": index for index in range(98)} | {"<pad>": 98, "<eos>": 99}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="t0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")


def trl_advantages(trainer_class, config_class, model, directory, **settings):
    """The advantages of one step over the two groups, in any order."""
    seen = []

    class Watching(trainer_class):
        def compute_loss(self, model, inputs, *arguments, **options):
            seen.append(inputs["advantages"].clone())
            return super().compute_loss(model, inputs, *arguments, **options)

    config = config_class(
        output_dir=str(directory),
        per_device_train_batch_size=8,
        num_generations=4,
        max_completion_length=3,
        max_steps=1,
        use_cpu=True,
        bf16=False,
        report_to="none",
        disable_tqdm=True,
        logging_strategy="no",
        save_strategy="no",
        beta=0.0,
        dataloader_pin_memory=False,
        **settings,
    )
    prompts = Dataset.from_dict({"prompt": ["t1 t2", "t3 t4"]})
    rewards = [reward for group in GROUPS for reward in group]
    Watching(model, lambda completions, **_: rewards, args=config, train_dataset=prompts, processing_class=tokenizer()).train()
    return np.sort(torch.cat(seen).double().numpy())


def ours(name, **settings):
    groups = [[EpisodeRewards((reward,), ("",)) for reward in group] for group in GROUPS]
    scores = ADVANTAGE_ESTIMATORS[name].plan(groups, AdvantageSection(**settings))
    return np.sort(np.concatenate([turns for group in scores for turns in group]))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("name", "settings", "scale_rewards"),
    [("grpo", {}, "group"), ("grpo", {"scale_by_std": False}, "none"), ("lite_ppo", {}, "batch")],
)
def test_group_advantages_are_those_of_trls_grpo(model_factory, tmp_path, name, settings, scale_rewards):
    found = trl_advantages(GRPOTrainer, GRPOConfig, model_factory(0), tmp_path, scale_rewards=scale_rewards)
    # TRL's eps is 1e-4 where ours is 1e-6.
    np.testing.assert_allclose(ours(name, **settings), found, rtol=5e-4, atol=1e-6)


@pytest.mark.filterwarnings("ignore")
def test_leave_one_out_advantages_are_those_of_trls_rloo(model_factory, tmp_path):
    found = trl_advantages(RLOOTrainer, RLOOConfig, model_factory(0), tmp_path)
    np.testing.assert_allclose(ours("rloo"), found, rtol=1e-5, atol=1e-6)


def test_overlong_penalty_is_trls():
    lengths = [1, 79, 80, 81, 90, 99, 100, 101, 150]
    found = get_soft_overlong_punishment(100, 20)([[0] * length for length in lengths])
    penalties = [overlong_penalty(length, max_tokens=100, buffer_tokens=20, penalty=1.0) for length in lengths]
    np.testing.assert_allclose(penalties, found, rtol=1e-5)
