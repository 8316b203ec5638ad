"""Settings of advantages and of the critic, and which of them fit each other; trainer.* in the run file."""

from collections.abc import Mapping
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta

from shared.environment_spec import NonNegativeInt, PositiveFloat, PositiveInt
from shared.loss_settings import IMPORT_PATH

NonNegativeFloat = Annotated[float, Meta(ge=0)]
Share = Annotated[float, Meta(ge=0, le=1)]


class OverlongSection(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """DAPO's soft punishment of length: what is taken off the reward grows from 0 to `penalty` over the last `buffer_tokens`."""

    max_tokens: PositiveInt
    """Sampled tokens of an episode from which on it pays the whole penalty."""
    buffer_tokens: PositiveInt
    penalty: PositiveFloat = 1.0

    def __post_init__(self) -> None:
        if self.buffer_tokens > self.max_tokens:
            raise ValueError(f"buffer_tokens must be <= max_tokens={self.max_tokens}, got {self.buffer_tokens}")


class AdvantageSection(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How rewards become advantages. One that the estimator does not use must be left alone."""

    scale_by_std: bool = True
    """grpo, gigpo: divide by the group's standard deviation. False is Dr. GRPO."""
    discount: Share = 1.0
    """γ, by sampled token (reinforce_plus_plus, reinforce_plus_plus_baseline, gae) or by turn (gigpo, step_reinforce)."""
    gae_lambda: Share = 0.95
    """λ of gae: 1 trusts rewards alone, 0 the critic alone."""
    episode_weight: NonNegativeFloat = 1.0
    """w_e of gigpo."""
    step_weight: NonNegativeFloat = 1.0
    """w_s of gigpo."""
    whiten: bool = False
    """Mean 0 and standard deviation 1 over the sampled tokens of the whole batch. reinforce_plus_plus does so anyway."""
    clip: PositiveFloat | None = None
    """Advantages are cut off at ± this, last of all."""
    overlong: OverlongSection | None = None


class CriticSection(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The value model of gae. Its dtype, Adam's betas and weight decay are the trainer's."""

    model_path: str | None = None
    """A Hugging Face model directory with the policy's tokenizer; None: run.model_path. The value head starts at 0."""
    learning_rate: PositiveFloat = 1e-5
    max_grad_norm: PositiveFloat = 1.0
    value_clip: PositiveFloat = 0.5
    """How far one update may move a value before its loss stops falling."""
    warmup_updates: NonNegativeInt = 0
    """So many updates train the critic alone, before the policy's first step."""
    deepspeed: dict[str, Any] | str = {}
    """The critic engine's own DeepSpeed settings, inline or the path of its JSON; passed through."""


GROUP_ESTIMATORS: Final = ("grpo", "rloo", "lite_ppo", "gigpo", "reinforce_plus_plus_baseline")
"""Compare siblings, so that a group of one has no advantage."""
TOKEN_LEVEL_ESTIMATORS: Final = ("gae", "reinforce_plus_plus", "reinforce_plus_plus_baseline")
"""Estimate the advantages of single tokens, on the ranks, from token rewards."""
CRITIC_ESTIMATORS: Final = ("gae",)
ESTIMATORS: Final = tuple(dict.fromkeys((*GROUP_ESTIMATORS, *TOKEN_LEVEL_ESTIMATORS, "step_reinforce")))

_USERS: Final[Mapping[str, tuple[str, ...]]] = {
    "scale_by_std": ("grpo", "gigpo"),
    "discount": ("reinforce_plus_plus", "reinforce_plus_plus_baseline", "gae", "gigpo", "step_reinforce"),
    "gae_lambda": ("gae",),
    "episode_weight": ("gigpo",),
    "step_weight": ("gigpo",),
}
"""Setting of AdvantageSection → the estimators that use it; those not named here serve all."""


def check(estimator: str, advantage: AdvantageSection, critic: CriticSection | None, *, has_reward_kl: bool) -> None:
    """Raises: ValueError if the settings contradict the estimator. One given by import path says what it needs when loaded.

    Args: has_reward_kl: a KL penalty is taken off the rewards of tokens.
    """
    if IMPORT_PATH.fullmatch(estimator):
        return
    if estimator not in ESTIMATORS:
        raise ValueError(
            f"trainer.adv_estimator must be one of {', '.join(ESTIMATORS)}, or package.module:name of one's own, got {estimator!r}"
        )
    if has_reward_kl and estimator not in TOKEN_LEVEL_ESTIMATORS:
        raise ValueError(
            f"trainer.kl.place must be 'loss' with trainer.adv_estimator {estimator!r}, got 'reward': only "
            f"estimators of tokens ({', '.join(TOKEN_LEVEL_ESTIMATORS)}) have a reward for each token to take it off"
        )
    if estimator in CRITIC_ESTIMATORS and critic is None:
        raise ValueError(
            f"trainer.critic must be given with adv_estimator {estimator!r}, got none; add `critic: {{}}` for defaults"
        )
    if estimator not in CRITIC_ESTIMATORS and critic is not None:
        raise ValueError(
            f"trainer.critic must not be given with adv_estimator {estimator!r}, which has no values, got one; remove it, or "
            f"set adv_estimator to {' or '.join(CRITIC_ESTIMATORS)}"
        )
    defaults = AdvantageSection()
    for name, users in _USERS.items():
        value, default = getattr(advantage, name), getattr(defaults, name)
        if value != default and estimator not in users:
            raise ValueError(
                f"trainer.advantage.{name} must be left at {default} with adv_estimator {estimator!r}, which does not use it, got "
                f"{value}; remove it, or set adv_estimator to {' or '.join(users)}"
            )
