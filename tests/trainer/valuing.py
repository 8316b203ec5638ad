"""Updates with a critic on episodes whose reward can be read from their first token; also the script that two ranks run."""

import json
import sys
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
from deepspeed.utils import safe_get_full_grad

from shared.configuration import TrainerSection
from shared.trajectory import Trajectory, Turn
from tests.trainer.learning import end_rank, section
from tests.trainer.records import VOCABULARY, trajectory
from trainer import ranks
from trainer.batching import BatchPlan, PlannedSequence, SequenceCost, mini_batches, plan_update
from trainer.critic import Critic, build_critic, load_value_model
from trainer.learner import Learned, Learner
from trainer.model import build_engine, load_policy, start_ranks


def gae(*, critic: Mapping[str, Any] | None = None, **settings: Any) -> TrainerSection:
    return section(adv_estimator="gae", critic=dict(critic or {}), **settings)


def episodes(*, seed: int = 0, count: int = 9) -> dict[str, Trajectory]:
    """Two turns with an observation between them; the first earns 0.25, the second what the first token says, by entry id."""
    generator = np.random.default_rng(seed)
    rows = {}
    for index in range(count):
        prompt, first, observation, second = (
            2,
            1 + int(generator.integers(6)),
            int(generator.integers(4)),
            1 + int(generator.integers(6)),
        )
        mask = [0] * prompt + [1] * first + [0] * observation + [1] * second
        tokens = generator.integers(0, VOCABULARY, len(mask))
        start = prompt + first + observation
        turns = [
            Turn(prompt, prompt + first, 0.25, (), "a"),
            Turn(start, len(mask), float(tokens[0] % 4) / 2 - 1, (), "b"),
        ]
        rows[f"e{index}"] = trajectory(
            mask,
            group_id=f"g{seed}",
            sample_index=index,
            group_size=count,
            token_ids=tokens,
            logprobs=np.where(np.array(mask) == 1, -4.6, 0),
            reward=sum(turn.reward for turn in turns),
            turns=turns,
        )
    return rows


def plan(
    rows: Mapping[str, Trajectory],
    *,
    num_ranks: int = 1,
    max_tokens: int = 10_000,
    version: int = 0,
    mini_batch_size: int | None = None,
) -> BatchPlan:
    sequences = [
        PlannedSequence(
            entry, row.num_tokens, row.num_sampled_tokens, row.reward, 0.0, turn_rewards=tuple(turn.reward for turn in row.turns)
        )
        for entry, row in rows.items()
    ]
    return plan_update(
        mini_batches([sequences], size=mini_batch_size, unit="episode"),
        version=version,
        oldest_version=0,
        num_ranks=num_ranks,
        max_tokens=max_tokens,
        cost=SequenceCost(),
    )


def make_critic(model_path: Path, trainer: TrainerSection, *, has_opinion: bool = False) -> Critic:
    """Args: has_opinion: its head starts with weights, so that the body has a gradient at the first step."""
    model = load_value_model(model_path, trainer, vocabulary_size=VOCABULARY)
    if has_opinion:
        torch.nn.init.normal_(model.head.weight, std=0.1, generator=torch.Generator().manual_seed(5))
    return build_critic(model, trainer)


def make_learner(model_path: Path, trainer: TrainerSection, *, has_opinion: bool = False) -> tuple[Learner, Critic]:
    critic = make_critic(model_path, trainer, has_opinion=has_opinion) if trainer.critic else None
    engine = build_engine(load_policy(model_path, trainer), trainer)
    return Learner(engine, trainer, seed=0, reference=None, critic=critic), critic


def learn(model_path: Path, trainer: TrainerSection, *, max_tokens: int = 10_000) -> tuple[Learned, dict[str, torch.Tensor]]:
    """One update, and the gradients of critic and policy that its last step applied, by engine and parameter name."""
    learner, _ = make_learner(model_path, trainer, has_opinion=True)
    gradients: dict[str, torch.Tensor] = {}
    for name, engine in learner.engines.items():
        _catch_gradients(engine, name, gradients)
    rows = episodes()
    whole = plan(rows, num_ranks=ranks.count(), max_tokens=max_tokens, mini_batch_size=trainer.ppo_mini_batch_size)
    return learner.learn(whole, rows), gradients


def _catch_gradients(engine: Any, name: str, gradients: dict[str, torch.Tensor]) -> None:
    step = engine.step

    def catch_and_step() -> None:
        for parameter_name, parameter in engine.module.named_parameters():
            gradients[f"{name}.{parameter_name}"] = safe_get_full_grad(parameter).clone()
        step()

    engine.step = catch_and_step


def main(arguments: list[str]) -> None:
    """Args: model path, JSON list of trainer settings, token limit, where rank 0 puts a result for each of the settings."""
    model_path, settings, max_tokens, output = arguments
    torch.set_num_threads(1)
    start_ranks(timeout=timedelta(seconds=100))
    results = []
    for each in json.loads(settings):
        learned, gradients = learn(Path(model_path), section(**each), max_tokens=int(max_tokens))
        results.append({"loss": learned.measures.loss, "values": learned.values, "gradients": gradients})
    if ranks.rank() == 0:
        torch.save(results, output)
    end_rank()


if __name__ == "__main__":
    main([argument for argument in sys.argv[1:] if not argument.startswith("--local_rank")])
