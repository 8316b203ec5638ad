"""Settings of what the trainer optimises beside the policy loss itself; trainer.* in the run file."""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from shared.environment_spec import PositiveFloat, PositiveInt

NonNegativeFloat = Annotated[float, Meta(ge=0)]


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
