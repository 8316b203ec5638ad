"""The whole objective of a batch: TRL's numbers where TRL has the formula, and the same however the batch is cut."""

import dataclasses
import itertools
import warnings
from collections import defaultdict
from types import SimpleNamespace

import msgspec
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from shared.configuration import TrainerSection
from tests.trainer.micro_batches import micro_batch
from trainer.aggregation import BatchSize
from trainer.corrections import LEVELS
from trainer.kl import KlController
from trainer.losses import POLICY_LOSSES
from trainer.measures import MeasureSums
from trainer.objective import Objective, loss_inputs
from trainer.preparation import Prepared

B, T, L = 4, 10, 16


def section(**settings):
    return msgspec.convert({"num_updates": 1, **settings}, TrainerSection)


class Batch:
    """Random log-probabilities of four sequences with gaps."""

    def __init__(self, seed=11, share_sampled=0.6):
        generator = torch.Generator().manual_seed(seed)

        def noise(scale):
            return scale * torch.randn(B, T, generator=generator)

        self.mask = torch.rand(B, T, generator=generator) < share_sampled
        self.mask[:, 0] = False
        self.logprobs = -2 * torch.rand(B, T, generator=generator)
        self.behaviour, self.proximal, self.reference = (self.logprobs + noise(scale) for scale in (0.4, 0.2, 0.3))
        self.advantages = torch.tensor([1.0, -0.5, 2.0, -1.5])
        self.rewards = torch.tensor([[1.0], [0.0], [1.0], [0.0]])

    def prepared(self, rows, *, mean_weight=1.0):
        return Prepared(
            (),
            micro_batch(
                self.mask[rows],
                behaviour=self.behaviour[rows],
                turns=(torch.arange(T) // 4).expand(B, T)[rows],
                advantages=self.advantages[:, None].expand(B, T)[rows],
                rewards=self.rewards[rows],
            ),
            proximal_logprobs_BT=self.proximal[rows],
            reference_logprobs_BT=self.reference[rows],
            reward_penalties_BT=None,
            mean_weight=mean_weight,
        )

    def evaluate(self, trainer, *, cuts=((0, B),)):
        """Loss, gradient by log-probability and measures, in one micro-batch or several."""
        objective = Objective(trainer, KlController(trainer.kl))
        size = BatchSize(num_sequences=B, num_sampled_tokens=int(self.mask.sum()))
        sums = MeasureSums(torch.device("cpu"))
        logprobs = self.logprobs.clone().requires_grad_()
        total = torch.zeros(())
        for start, end in cuts:
            rows = slice(start, end)
            total = total + objective.loss(logprobs[rows], self.prepared(rows), version=3, batch=size, sums=sums).sum()
        total.backward()
        return total.item(), logprobs.grad, sums.reduce()


@pytest.fixture
def batch(one_rank):
    return Batch()


@pytest.fixture(scope="module")
def trl():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip("trl", reason="needs trl, which the extra `bench` installs")


def trl_evaluate(trl, batch, *, loss_type, level="token", delta=None, beta=0.0, clip=(0.2, 0.3), correction=None):
    """TRL's own GRPO loss on given log-probabilities instead of a model's."""
    logprobs = batch.logprobs.clone().requires_grad_()
    trainer = SimpleNamespace(
        aux_loss_enabled=False,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        importance_sampling_level=level,
        beta=beta,
        loss_type=loss_type,
        epsilon_low=clip[0],
        epsilon_high=clip[1],
        args=SimpleNamespace(delta=delta, use_bias_correction_kl=False, steps_per_generation=1),
        use_vllm=correction is not None,
        vllm_importance_sampling_correction=True,
        model=SimpleNamespace(training=True),
        current_gradient_accumulation_steps=1,
        max_completion_length=L,
        accelerator=SimpleNamespace(num_processes=1, gather=lambda tensor: tensor, reduce=lambda tensor, reduction: tensor),
        _entropy_bonus_enabled=False,
        _metrics={"train": defaultdict(list)},
        _get_per_token_logps_and_entropies=lambda *_, **__: (logprobs, torch.zeros(B, T), None),
    )
    empty = torch.zeros(B, 1, dtype=torch.long)
    inputs = {
        "prompt_ids": empty,
        "prompt_mask": empty,
        "completion_ids": torch.zeros(B, T, dtype=torch.long),
        "completion_mask": batch.mask.long(),
        "advantages": batch.advantages,
        "old_per_token_logps": batch.behaviour if correction is None else batch.proximal,
        "ref_per_token_logps": batch.reference,
        "importance_sampling_ratio": correction,
        "num_items_in_batch": batch.mask.sum(),
    }
    loss = trl.GRPOTrainer._compute_loss(trainer, None, inputs)
    loss.backward()
    return loss.item(), logprobs.grad


CLIP = {"clip_low": 0.2, "clip_high": 0.3}


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ({"pg_variant": "ppo"}, {"loss_type": "dapo"}),
        ({"pg_variant": "ppo", "loss_agg_mode": "seq-mean-token-mean"}, {"loss_type": "grpo"}),
        ({"pg_variant": "ppo", "loss_agg_mode": "seq-mean-token-sum"}, {"loss_type": "luspo"}),
        ({"pg_variant": "ppo", "loss_agg_mode": "seq-mean-token-sum-norm", "loss_norm_tokens": L}, {"loss_type": "dr_grpo"}),
        ({"pg_variant": "ppo", "policy_loss": {**CLIP, "dual_clip": 1.5}}, {"loss_type": "dapo", "delta": 1.5}),
        ({"pg_variant": "gspo", "loss_agg_mode": "seq-mean-token-mean"}, {"loss_type": "grpo", "level": "sequence"}),
        ({"pg_variant": "cispo", "policy_loss": {"clip_low": 1.0, "clip_high": 0.3}}, {"loss_type": "cispo", "clip": (0.0, 1.3)}),
        ({"pg_variant": "ppo", "kl": {"coefficient": 0.1, "estimator": "k3"}}, {"loss_type": "dapo", "beta": 0.1}),
    ],
    ids=lambda settings: " ".join(map(str, settings.values())),
)
def test_loss_and_gradient_are_trls(batch, trl, ours, theirs):
    loss, gradient, _ = batch.evaluate(section(**{"policy_loss": CLIP, **ours}))
    expected_loss, expected_gradient = trl_evaluate(trl, batch, **theirs)
    assert loss == pytest.approx(expected_loss, rel=1e-5)
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-5, atol=1e-7)


def test_decoupled_ppo_is_trls_truncated_correction_of_a_recomputed_policy(batch, trl):
    correction = (batch.proximal - batch.behaviour).exp().clamp(max=1.2)
    trainer = section(pg_variant="decoupled_ppo", policy_loss={**CLIP, "tis_cap": 1.2})
    loss, gradient, _ = batch.evaluate(trainer)
    expected_loss, expected_gradient = trl_evaluate(trl, batch, loss_type="dapo", correction=correction)
    assert loss == pytest.approx(expected_loss, rel=1e-5)
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-5, atol=1e-7)


SETTINGS = [
    *({"pg_variant": variant} for variant in POLICY_LOSSES),
    {"pg_variant": "vanilla", "correction": {"action": "truncate", "level": "turn"}},
    {"pg_variant": "ppo", "correction": {"action": "mask", "level": "geometric", "low": 0.9, "high": 1.1}},
    {"pg_variant": "topr", "correction": {"reject_by": "k3", "reject_above": 0.1}},
    {"pg_variant": "kimi15", "kl": {"coefficient": 0.1, "estimator": "k2"}},
]


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"])
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_the_objective_is_the_same_however_the_batch_is_cut(batch, settings, mode):
    norm = {"loss_norm_tokens": L} if mode == "seq-mean-token-sum-norm" else {}
    trainer = section(loss_agg_mode=mode, **norm, **settings)
    loss, gradient, measures = batch.evaluate(trainer)
    cut_loss, cut_gradient, cut_measures = batch.evaluate(trainer, cuts=((0, 1), (1, 3), (3, 4)))
    assert cut_loss == pytest.approx(loss, rel=1e-5)
    torch.testing.assert_close(cut_gradient, gradient, rtol=0, atol=1e-6)
    assert (gradient[~batch.mask] == 0).all()
    assert gradient.abs().max() > 0
    assert cut_measures.clip_fraction == measures.clip_fraction
    assert cut_measures.effective_sample_size == pytest.approx(measures.effective_sample_size)


@given(
    seed=st.integers(0, 10_000),
    share_sampled=st.floats(0.1, 1.0),
    boundaries=st.sets(st.integers(1, B - 1)),
    level=st.sampled_from(list(LEVELS)),
    mode=st.sampled_from(["token-mean", "seq-mean-token-mean", "seq-mean-token-sum"]),
)
def test_no_cut_of_any_batch_changes_its_gradient(one_rank, seed, share_sampled, boundaries, level, mode):
    batch = Batch(seed, share_sampled)
    assume(batch.mask.any())
    trainer = section(pg_variant="gspo", loss_agg_mode=mode, correction={"action": "mask", "level": level, "reject_by": "k2"})
    edges = [0, *sorted(boundaries), B]
    _, gradient, _ = batch.evaluate(trainer)
    _, cut_gradient, _ = batch.evaluate(trainer, cuts=list(itertools.pairwise(edges)))
    torch.testing.assert_close(cut_gradient, gradient, rtol=0, atol=1e-6)


def test_dropped_tokens_have_no_gradient_and_stay_in_the_mean(batch):
    whole, gradient, _ = batch.evaluate(section(pg_variant="vanilla"))
    _, masked, measures = batch.evaluate(section(pg_variant="vanilla", correction={"action": "mask", "low": 0.9, "high": 1.1}))
    ratio = (batch.proximal - batch.behaviour).exp()
    is_kept = (ratio >= 0.9) & (ratio <= 1.1)
    assert whole != 0
    torch.testing.assert_close(masked, torch.where(is_kept, gradient, 0.0))
    assert measures.dropped_fraction == pytest.approx((~is_kept & batch.mask).sum().item() / batch.mask.sum().item())


def test_a_penalty_in_the_reward_is_not_in_the_loss_and_is_still_measured(batch):
    without, gradient, _ = batch.evaluate(section())
    loss, with_penalty, measures = batch.evaluate(section(kl={"coefficient": 0.5, "place": "reward"}))
    assert loss == without
    assert torch.equal(gradient, with_penalty)
    assert measures.kl_reference > 0


def test_before_the_only_step_the_proximal_policy_is_the_one_in_the_loss_without_gradient(batch):
    logprobs = batch.logprobs.clone().requires_grad_()
    inputs = loss_inputs(logprobs, dataclasses.replace(batch.prepared(slice(0, B)), proximal_logprobs_BT=None), version=3)
    assert torch.equal(inputs.proximal_logprobs_BT, logprobs)
    assert not inputs.proximal_logprobs_BT.requires_grad


def test_the_kl_penalty_also_holds_for_dropped_tokens(batch):
    nothing = {"action": "mask", "low": 1e-6, "high": 1e-6}
    _, gradient, _ = batch.evaluate(section(pg_variant="vanilla", correction=nothing, kl={"coefficient": 0.1, "estimator": "k2"}))
    expected = 0.1 * (batch.logprobs - batch.reference) / batch.mask.sum()
    torch.testing.assert_close(gradient, torch.where(batch.mask, expected, 0.0))
