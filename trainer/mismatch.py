"""Do trainer and engine compute the same policy? Asked of the first batch that can tell, before the first step.

Only episodes sampled entirely by the version being trained can tell: for them π_θ and μ are the same weights, so any difference
comes from how the two compute. In float32 it is below 1e-4, in bfloat16 around 1e-2.
"""

from shared.errors import TrainingError
from trainer.measures import Measures


class MismatchCheck:
    """UNCHECKED → passed, at the first batch with on-policy episodes; later batches are measured and not judged."""

    def __init__(self, *, max_mean_mismatch: float) -> None:
        self._max_mean_mismatch = max_mean_mismatch
        self._is_passed = False

    def judge(self, measures: Measures) -> None:
        """Raises: TrainingError if trainer and engine disagree about the tokens that the engine has just sampled."""
        mean = measures.logprob_mismatch_mean
        if self._is_passed or mean is None:
            return
        if not mean <= self._max_mean_mismatch:
            raise TrainingError(
                f"trainer and engine must agree on the log-probabilities of sampled tokens within a mean of "
                f"trainer.max_logprob_mismatch={self._max_mean_mismatch:g}, and differ by {mean:.3g} on average and "
                f"{measures.logprob_mismatch_max:.3g} at most on the first batch; likely causes: the engine samples at another "
                "temperature than the record says, its dtype is not the trainer's, it was started from another model or chat "
                "template, a prefix cache outlived a weight update, or the model scales its logits after the output layer"
            )
        self._is_passed = True
