"""KL estimators and controllers, by hand and against exact values."""

import msgspec
import pytest
import torch

from shared.loss_settings import KlSection
from trainer.kl import KL_ESTIMATORS, KlController, clamped_log_ratio, k1, k2, k3


def test_estimators_by_hand():
    log_ratio = torch.tensor([0.0, 0.5, -1.0])
    torch.testing.assert_close(k1(log_ratio), torch.tensor([0.0, -0.5, 1.0]))
    torch.testing.assert_close(k2(log_ratio), torch.tensor([0.0, 0.125, 0.5]))
    torch.testing.assert_close(k3(log_ratio), torch.tensor([0.0, 0.148721, 0.367879]), rtol=1e-5, atol=1e-6)


@pytest.fixture
def distributions():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 50, generator=generator, dtype=torch.float64)
    return torch.log_softmax(logits[0], dim=0), torch.log_softmax(logits[0] + 0.1 * logits[1], dim=0)


@pytest.mark.parametrize("name", ["k1", "k3"])
def test_unbiased_estimators_have_torchs_kl_as_their_mean(distributions, name):
    policy, reference = distributions
    expected = torch.nn.functional.kl_div(reference, policy, log_target=True, reduction="sum")
    mean = (policy.exp() * KL_ESTIMATORS[name](reference - policy)).sum()
    torch.testing.assert_close(mean, expected)


def test_k2_as_a_loss_has_the_gradient_of_the_kl(distributions):
    policy, reference = distributions
    exact, estimated = policy.clone().requires_grad_(), policy.clone().requires_grad_()
    exact_logprobs, logprobs = torch.log_softmax(exact, dim=0), torch.log_softmax(estimated, dim=0)
    (exact_logprobs.exp() * (exact_logprobs - reference)).sum().backward()
    (logprobs.detach().exp() * k2(reference - logprobs)).sum().backward()
    torch.testing.assert_close(estimated.grad, exact.grad)


def test_extreme_ratios_stay_finite():
    log_ratio = clamped_log_ratio(torch.tensor([-1e4, 0.0]), torch.tensor([0.0, -1e4]))
    assert log_ratio.tolist() == [-20.0, 20.0]
    assert all(torch.isfinite(estimator(log_ratio)).all() for estimator in KL_ESTIMATORS.values())


def adaptive(**settings):
    return KlController(KlSection(**{"coefficient": 0.1, "controller": "adaptive", "target": 0.02, "horizon": 1000, **settings}))


@pytest.mark.parametrize(("kl", "factor"), [(0.2, 1 + 0.2 * 0.05), (0.0, 1 - 0.2 * 0.05), (0.022, 1 + 0.1 * 0.05), (0.02, 1.0)])
def test_adaptive_coefficient_by_hand(kl, factor):
    controller = adaptive()
    controller.observe(kl, num_sequences=50)
    assert controller.coefficient == pytest.approx(0.1 * factor)


def test_a_fixed_coefficient_stays():
    controller = KlController(KlSection(coefficient=0.1))
    controller.observe(5.0, num_sequences=1000)
    assert controller.coefficient == 0.1


def test_a_resumed_controller_goes_on_where_it_was():
    controller, resumed = adaptive(), adaptive()
    controller.observe(1.0, num_sequences=100)
    resumed.restore(msgspec.json.decode(msgspec.json.encode(controller.state())))
    for each in (controller, resumed):
        each.observe(0.01, num_sequences=100)
    assert resumed.coefficient == controller.coefficient != 0.1


def test_a_fixed_coefficient_is_the_run_files_also_after_a_resumption():
    controller = KlController(KlSection(coefficient=0.3))
    controller.restore({"coefficient": 0.1})
    assert controller.coefficient == 0.3
