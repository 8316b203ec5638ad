"""KL divergence by token: estimators, and the controllers of its coefficient β.

    KL(p ‖ q) of tokens sampled from p, estimated from log r = log q - log p of each, http://joschu.net/blog/kl-approx.html

The penalty's is KL(π_θ ‖ π_ref), so log r = log π_ref - log π_θ; the drift from the behaviour policy is KL(μ ‖ π_θ), so
log r = log π_θ - log μ.
"""

from collections.abc import Callable, Mapping
from typing import Any, Final

from torch import Tensor

from shared.loss_settings import KlSection

MAX_ABS_LOG_RATIO: Final = 20.0
MAX_ERROR: Final = 0.2

KlEstimator = Callable[[Tensor], Tensor]
"""log r, any shape → an estimate of the same shape."""


def clamped_log_ratio(logprobs: Tensor, base_logprobs: Tensor) -> Tensor:
    """log (π / π_base), clamped to ±20 so that its exponential and the square of that are finite in float32."""
    return (logprobs - base_logprobs).clamp(-MAX_ABS_LOG_RATIO, MAX_ABS_LOG_RATIO)


def k1(log_ratio: Tensor) -> Tensor:
    """-log r: unbiased, of either sign. As a term of the loss its expected gradient is 0."""
    return -log_ratio


def k2(log_ratio: Tensor) -> Tensor:
    """½ log² r: biased, never negative. As a term of the loss its gradient is that of the KL."""
    return 0.5 * log_ratio.square()


def k3(log_ratio: Tensor) -> Tensor:
    """r - 1 - log r: unbiased, never negative."""
    return log_ratio.exp() - 1 - log_ratio


KL_ESTIMATORS: Mapping[str, KlEstimator] = {"k1": k1, "k2": k2, "k3": k3}


class KlController:
    """β between two updates: fixed, or steered to a target, arXiv:1909.08593.

        error = clip(KL / target - 1, -0.2, 0.2)
        β ← β · (1 + error · n / horizon)

    Every rank has one and gives it the same global KL, so that all have the same β.
    """

    def __init__(self, settings: KlSection) -> None:
        self._settings = settings
        self._coefficient = settings.coefficient

    @property
    def coefficient(self) -> float:
        """β."""
        return self._coefficient

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps."""
        return {"coefficient": self._coefficient}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continues an adaptive β; a fixed one is what the run file says."""
        if self._settings.controller == "adaptive":
            self._coefficient = state["coefficient"]

    def observe(self, kl: float, *, num_sequences: int) -> None:
        """Args: kl: nats a token, of all ranks, before the update's first step. num_sequences: n, of the batch."""
        if self._settings.controller == "adaptive":
            error = min(MAX_ERROR, max(-MAX_ERROR, kl / self._settings.target - 1))
            self._coefficient *= 1 + error * num_sequences / self._settings.horizon
