"""Records that can be read and not be trained on: another tokenizer's, longer than the model's context, with NaN for a number."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from shared.errors import ConfigurationError
from shared.trajectory import Trajectory


@dataclass(frozen=True)
class RecordLimits:
    """What the model being trained can take. None is no limit."""

    num_embeddings: int | None = None
    max_positions: int | None = None

    @classmethod
    def of(cls, model_configuration: Any, *, num_embeddings: int) -> "RecordLimits":
        """Args: model_configuration: of transformers. num_embeddings: rows of the input embedding, which may be padded."""
        return cls(num_embeddings, getattr(model_configuration, "max_position_embeddings", None))


NO_LIMITS = RecordLimits()


def why_untrainable(trajectory: Trajectory, limits: RecordLimits) -> str | None:
    """What is wrong with a record, as a sentence; None if nothing is."""
    if limits.max_positions is not None and trajectory.num_tokens > limits.max_positions:
        return (
            f"an episode must have at most the {limits.max_positions} tokens of the model's max_position_embeddings, got "
            f"{trajectory.num_tokens}; lower the environment's limits of tokens or turns"
        )
    for token in _outermost(trajectory):
        if limits.num_embeddings is not None and not 0 <= token < limits.num_embeddings:
            return (
                f"a token id must be in [0, {limits.num_embeddings}), the rows of the model's embedding, got {token}; the agents' "
                "tokenizer is another model's: give agents and trainer the same run.model_path"
            )
    if not np.isfinite(trajectory.logprobs).all():
        return "log-probabilities must be finite, and the engine gave some that are not"
    for reward in (trajectory.reward, *(turn.reward for turn in trajectory.turns)):
        if not np.isfinite(reward):
            return f"a reward must be a finite number, got {reward}; correct the environment's or the reward's code"
    if not (np.isfinite(trajectory.temperature) and trajectory.temperature > 0):
        return f"tokens must be sampled at a temperature > 0 to be trained on, got {trajectory.temperature}"
    return None


def _outermost(trajectory: Trajectory) -> tuple[int, ...]:
    """The smallest and the largest token id."""
    tokens = trajectory.token_ids
    return (int(tokens.min()), int(tokens.max())) if len(tokens) else ()


def require_matching_tokenizer(model_path: Path, limits: RecordLimits) -> None:
    """Raises: ConfigurationError if the tokenizer beside the model has ids that the model has no embedding for."""
    path = model_path / "tokenizer.json"
    if limits.num_embeddings is None or not path.is_file():
        return
    from tokenizers import Tokenizer

    ids = Tokenizer.from_file(str(path)).get_vocab(with_added_tokens=True).values()
    if max(ids, default=0) >= limits.num_embeddings:
        raise ConfigurationError(
            f"run.model_path must hold a model and its own tokenizer, and {str(model_path)!r} has an embedding of "
            f"{limits.num_embeddings} rows and a tokenizer with ids up to {max(ids)}; put the model's tokenizer there"
        )
