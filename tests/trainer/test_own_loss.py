"""A user's own policy loss: loaded, checked, and refused in words."""

import pytest
import torch

from shared.errors import ConfigurationError, TrainingError
from shared.loss_settings import PolicyLossSection
from tests.trainer.test_losses import loss_inputs
from trainer.losses import ppo
from trainer.own_loss import load_policy_loss

MODULE = "tests.trainer.own_losses"


def load(name):
    return load_policy_loss(f"{MODULE}:{name}", import_allowlist=("tests.trainer",))


def evaluate(name):
    return load(name)(loss_inputs([[-1.0, -2.0]], [[-1.0, -2.0]], [[1.0, -1.0]]), PolicyLossSection())


def test_our_own_names_need_no_allowlist():
    assert load_policy_loss("ppo", import_allowlist=()) is ppo


def test_a_users_function_is_used():
    torch.testing.assert_close(evaluate("half_vanilla").per_token_BT, torch.tensor([[0.5, -1.0]]))


@pytest.mark.parametrize(
    ("path", "allowlist", "sentence"),
    [
        (
            f"{MODULE}:half_vanilla",
            ("examples",),
            "must be inside trainer.import_allowlist (examples), got 'tests.trainer.own_losses",
        ),
        (f"{MODULE}:missing", ("tests",), "and 'tests.trainer.own_losses:missing' cannot: AttributeError"),
        ("tests.trainer.nowhere:loss", ("tests",), "and 'tests.trainer.nowhere:loss' cannot: ModuleNotFoundError"),
        (f"{MODULE}:takes_nothing", ("tests",), "must name a function of (inputs, settings), and 'tests.trainer.own_losses:takes"),
        (f"{MODULE}:NOT_A_FUNCTION", ("tests",), "must name a function of (inputs, settings), and 'tests.trainer.own_losses:NOT"),
    ],
)
def test_what_cannot_be_used_is_refused(path, allowlist, sentence):
    with pytest.raises(ConfigurationError) as caught:
        load_policy_loss(path, import_allowlist=allowlist)
    assert sentence in str(caught.value)


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("returns_a_tensor", "got a Tensor"),
        ("returns_a_mean", "got per_token_BT of shape []"),
        ("returns_float_flags", "got torch.float32 and torch.float32"),
    ],
)
def test_a_result_that_is_no_policy_loss_stops_training(name, found):
    with pytest.raises(TrainingError) as caught:
        evaluate(name)
    assert f"{MODULE}:{name} must return a PolicyLoss of [B, T] = [1, 2] floats and bools" in str(caught.value)
    assert found in str(caught.value)
