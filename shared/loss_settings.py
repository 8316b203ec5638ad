"""Settings of what the trainer optimises beside the policy loss itself; trainer.* in the run file."""

import re
from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta

from shared.environment_spec import PositiveFloat, PositiveInt

NonNegativeFloat = Annotated[float, Meta(ge=0)]
IMPORT_PATH: Final = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")
"""package.module:function"""


class KlSection(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The penalty β · KL(π_θ ‖ π_ref) that holds the policy near a frozen reference."""

    coefficient: NonNegativeFloat = 0.0
    """β, or with `controller: adaptive` the β to begin with. 0: there is no reference policy."""
    place: Literal["loss", "reward"] = "loss"
    """loss: a term of each token's loss. reward: taken off each token's reward, for estimators that look at tokens."""
    estimator: Literal["k1", "k2", "k3"] = "k3"
    """Of a token's KL, with r = π_ref / π_θ: k1 = -log r, k2 = log² r / 2, k3 = r - 1 - log r."""
    controller: Literal["fixed", "adaptive"] = "fixed"
    """adaptive: β grows while the KL is over `target` and shrinks while it is under it."""
    target: PositiveFloat = 0.01
    """KL in nats a token that the adaptive controller steers to."""
    horizon: PositiveInt = 10_000
    """Episodes over which the adaptive controller may change β by its factor e^±0.2."""
    reference_path: str | None = None
    """The reference policy's model directory; None: run.model_path, what the run started from."""
    offload_reference: bool = False
    """Keep the reference policy in the CPU's memory and bring it to the device only to score a batch."""

    @property
    def is_used(self) -> bool:
        return self.coefficient > 0

    @property
    def is_in_reward(self) -> bool:
        return self.is_used and self.place == "reward"


class PolicyLossSection(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Bounds of the policy losses; which one uses which is in docs/algorithms.md. r is π_θ / μ, μ the behaviour policy."""

    clip_low: NonNegativeFloat = 0.2
    """ε_low: r is clipped below 1 - ε_low, by ppo, decoupled_ppo, cispo and, for whole sequences, gspo."""
    clip_high: NonNegativeFloat = 0.2
    """ε_high: r is clipped above 1 + ε_high, by the same."""
    dual_clip: Annotated[float, Meta(gt=1)] | None = None
    """c: with a negative advantage, ppo and gspo bound r by it, usually 3. None: no bound."""
    tis_cap: PositiveFloat = 2.0
    """C: tis bounds r by it, and decoupled_ppo π_prox / μ."""
    kimi_tau: NonNegativeFloat = 0.1
    """τ: weight of kimi15's ½ (log r)²."""
    clamp_low: NonNegativeFloat = 0.5
    """clamped_is clamps r from below."""
    clamp_high: PositiveFloat = 2.0
    """clamped_is clamps r from above."""
    proximal: Literal["recomputed", "interpolated"] = "recomputed"
    """π_prox of decoupled_ppo. recomputed: by a forward pass when the update begins, if it has more than one epoch. interpolated:
    between μ and π_θ by their versions."""

    def __post_init__(self) -> None:
        if self.clip_low > 1:
            raise ValueError(f"clip_low must be <= 1, got {self.clip_low:g}; a ratio is never below 0")
        if self.clamp_low > self.clamp_high:
            raise ValueError(f"clamp_low must be <= clamp_high={self.clamp_high:g}, got {self.clamp_low:g}")


class CorrectionSection(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Weights of tokens for being off-policy, beside what the policy loss does itself. The parts multiply.

    Their ratio is π_prox / μ: of the policy that the update begins with, so that weights stay the same over its epochs. A token
    of weight 0 still counts where the loss is averaged.
    """

    action: Literal["none", "truncate", "mask", "masked_is"] = "none"
    """truncate: weight min(ratio, high). mask: 1 where low <= ratio <= high, else 0. masked_is: the ratio there, else 0."""
    level: Literal["token", "turn", "sequence", "geometric"] = "token"
    """Whose ratio: the token's, the product over its turn or over its sequence, or the geometric mean over its sequence."""
    low: NonNegativeFloat = 0.5
    high: PositiveFloat = 2.0
    reject_by: Literal["k1", "k2", "k3"] | None = None
    """Also give weight 0 to sequences whose mean of this estimate of KL(μ ‖ π_prox) is above `reject_above`; of k1, which has a
    sign, the absolute value of the mean."""
    reject_above: PositiveFloat = 0.1
    """Nats a token."""
    max_age: Annotated[int, Meta(ge=0)] | None = None
    """Also give weight 0 to tokens that a policy more than so many updates old sampled."""
    batch_normalise: bool = False
    """Divide the weights by their mean over all tokens of the batch."""

    def __post_init__(self) -> None:
        if self.low > self.high:
            raise ValueError(f"low must be <= high={self.high:g}, got {self.low:g}")

    @property
    def has_weights(self) -> bool:
        """Whether the parts can give any token another weight than 1."""
        return self.needs_ratio or self.max_age is not None

    @property
    def needs_ratio(self) -> bool:
        return self.action != "none" or self.reject_by is not None


POLICY_LOSS_NAMES: Final = ("ppo", "tis", "vanilla", "cispo", "topr", "kimi15", "decoupled_ppo", "gspo", "clamped_is")
WEIGHS_BY_ITSELF: Final = frozenset({"ppo", "tis", "cispo", "topr", "decoupled_ppo", "gspo", "clamped_is"})
"""Variants with π_θ / μ, or a part of it, in their own formula."""


def check_variant(pg_variant: str) -> None:
    """Raises: ValueError unless it is a known name or looks like package.module:function."""
    if pg_variant not in POLICY_LOSS_NAMES and not IMPORT_PATH.fullmatch(pg_variant):
        names = ", ".join(repr(name) for name in POLICY_LOSS_NAMES)
        raise ValueError(f"pg_variant must be one of {names}, or package.module:function, got {pg_variant!r}")


def check_single_correction(pg_variant: str, correction: CorrectionSection) -> None:
    """Raises: ValueError if a token would be weighted by its ratio twice."""
    if correction.action in ("truncate", "masked_is") and pg_variant in WEIGHS_BY_ITSELF:
        raise ValueError(
            f"correction.action must be 'mask' or 'none' with pg_variant {pg_variant!r}, which weighs by the ratio to the "
            f"behaviour policy itself, got {correction.action!r}; it would weigh tokens twice; give 'vanilla' or 'kimi15'"
        )
