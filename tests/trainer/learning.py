"""One update of a small fixed batch with its gradient caught before the step; also the script that two ranks run."""

import json
import os
import sys
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from deepspeed.utils import safe_get_full_grad

from shared.configuration import TrainerSection
from shared.trajectory import Trajectory
from tests.trainer.records import trajectory
from trainer import ranks
from trainer.batching import BatchPlan, PlannedSequence, SequenceCost, mini_batches, plan_update
from trainer.checkpoints import POLICY, Checkpoints, LedgerState
from trainer.deepspeed_settings import uses_zero_3
from trainer.learner import Learned, Learner
from trainer.model import build_engine, load_policy, start_ranks
from trainer.reference import load_reference

ADVANTAGES = (1.0, -0.7, 0.4, -1.3, 0.9, 0.0, -0.2)


def batch() -> dict[str, Trajectory]:
    """Seven episodes of different lengths and temperatures, by entry id."""
    generator = np.random.default_rng(7)
    rows = {}
    for index in range(len(ADVANTAGES)):
        mask = [0, 0, *generator.integers(0, 2, 3 + 4 * index).tolist(), 1]
        logprobs = np.where(np.array(mask) == 1, -4.6 + generator.normal(0, 0.3, len(mask)), 0)
        rows[f"e{index}"] = trajectory(
            mask,
            group_id="g",
            sample_index=index,
            group_size=len(ADVANTAGES),
            temperature=1 + 0.25 * (index % 3),
            logprobs=logprobs,
        )
    return rows


def plan(
    rows: Mapping[str, Trajectory], *, num_ranks: int, max_tokens: int, version: int = 0, mini_batch_size: int | None = None
) -> BatchPlan:
    sequences = [
        PlannedSequence(entry, row.num_tokens, row.num_sampled_tokens, row.reward, advantage)
        for (entry, row), advantage in zip(rows.items(), ADVANTAGES, strict=True)
    ]
    return plan_update(
        mini_batches([sequences], size=mini_batch_size, unit="episode"),
        version=version,
        oldest_version=version - 1,
        num_ranks=num_ranks,
        max_tokens=max_tokens,
        cost=SequenceCost(),
    )


def section(**settings: Any) -> TrainerSection:
    return msgspec.convert({"num_updates": 1, "dtype": "float32", "max_logprob_mismatch": 100.0, **settings}, TrainerSection)


def learn(model_path: Path, trainer: TrainerSection, *, max_tokens: int) -> tuple[Learned, dict[str, torch.Tensor], Learner]:
    """The update, and the gradient by parameter name that its last step applied."""
    engine = build_engine(load_policy(model_path, trainer, is_sharded=uses_zero_3(trainer)), trainer)
    reference = load_reference(trainer, model_path=model_path, device=engine.device)
    learner = Learner(engine, trainer, seed=0, reference=reference)
    gradients: dict[str, torch.Tensor] = {}
    step = learner.engine.step

    def catch_gradients_and_step() -> None:
        for name, parameter in learner.policy.causal_lm.named_parameters():
            if parameter.requires_grad:
                gradients[name] = safe_get_full_grad(parameter).clone()
        step()

    learner.engine.step = catch_gradients_and_step
    rows = batch()
    learned = learner.learn(
        plan(rows, num_ranks=ranks.count(), max_tokens=max_tokens, mini_batch_size=trainer.ppo_mini_batch_size), rows
    )
    return learned, gradients, learner


def main(arguments: list[str]) -> None:
    """Args: model path, JSON list of trainer settings, token limit, where rank 0 puts a result for each of the
    settings, and beside it a run directory for each with a checkpoint."""
    model_path, settings, max_tokens, output = arguments
    torch.set_num_threads(1)
    start_ranks(timeout=timedelta(seconds=100))
    results = []
    for index, each in enumerate(json.loads(settings)):
        learned, gradients, learner = learn(Path(model_path), section(**each), max_tokens=int(max_tokens))
        results.append(
            {
                "loss": learned.measures.loss,
                "grad_norm": learned.grad_norm,
                "gradients": gradients,
                "weights": {name: weight.clone() for name, weight in learner.policy.named_weights()},
            }
        )
        run_directory = Path(output).parent / str(index)
        fingerprint = learner.policy.fingerprint()
        checkpoints = Checkpoints(run_directory, keep=1, fingerprint=fingerprint, model_path=Path(model_path))
        checkpoints.save({POLICY: learner.engine}, 1, [], ledger=LedgerState(0, {}), components={})
        saved = checkpoints.wait()
        assert saved is not None
        assert saved.problem is None
    if ranks.rank() == 0:
        torch.save(results, output)
    end_rank()


def end_rank() -> None:
    """Ends this process when all are done, without the interpreter's own end, in which gloo's threads now and then abort it."""
    ranks.barrier()
    torch.distributed.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main([argument for argument in sys.argv[1:] if not argument.startswith("--local_rank")])
