"""LoRA: only adapters learn, and what engines and exports get is the trained model."""

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from shared.configuration import LoraSection
from shared.errors import ConfigurationError
from tests.trainer.conftest import DEPRECATED_BY_TORCH
from tests.trainer.learning import ADVANTAGES, batch, learn, section
from trainer import lora
from trainer.batching import PlannedSequence
from trainer.micro_batch import collate
from trainer.model import Policy, load_policy

PLANNED = [PlannedSequence("e", num_tokens=0, num_sampled_tokens=0, reward=0.0, advantage=0.0)] * len(ADVANTAGES)
STAGES = [1, 2, pytest.param(3, marks=DEPRECATED_BY_TORCH)]


def trained(model_path, *, stage=1, **settings):
    adapter = {"rank": 4, "alpha": 16.0, **settings}
    trainer = section(lora=adapter, learning_rate=1e-2, ppo_epochs=3, deepspeed={"zero_optimization": {"stage": stage}})
    return learn(model_path, trainer, max_tokens=70)[2]


def logprobs(policy):
    rows = collate(list(batch().values()), PLANNED, version=0, oldest_version=0, device=torch.device("cpu"))
    with torch.no_grad():
        return policy(rows.token_ids_BT, rows.loss_mask_BT, rows.temperatures_B)


@pytest.mark.parametrize("stage", STAGES)
def test_pushed_weights_have_the_log_probabilities_of_the_trained_model(one_rank, model_path, stage):
    learner = trained(model_path, stage=stage)
    pushed = dict(learner.policy.named_weights())
    plain = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    before = logprobs(Policy(plain))
    assert pushed.keys() == dict(plain.named_parameters()).keys()
    plain.load_state_dict(pushed, strict=False)
    after = logprobs(Policy(plain))
    learner.engine.eval()
    torch.testing.assert_close(after, logprobs(learner.engine), rtol=0, atol=1e-5)
    assert (after - before).abs().max() > 0.01, "the adapters learned something"


def test_only_adapters_learn(one_rank, model_path):
    learner = trained(model_path)
    plain = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    for name, parameter in learner.policy.causal_lm.named_parameters():
        assert parameter.requires_grad == lora.is_adapter(name)
        if not lora.is_adapter(name):
            assert torch.equal(parameter, plain.get_parameter(lora.merged_name(name)))
    optimized = sum(group["params"][0].numel() for group in learner.engine.optimizer.optimizer.param_groups)
    assert optimized == sum(p.numel() for n, p in learner.policy.causal_lm.named_parameters() if lora.is_adapter(n))


def test_named_target_modules_alone_get_an_adapter(one_rank, model_path):
    policy = load_policy(model_path, section(lora={"rank": 2, "target_modules": ["q_proj", "v_proj"]}))
    adapted = {name.split(".")[-4] for name, _ in policy.causal_lm.named_parameters() if lora.is_adapter(name)}
    assert adapted == {"q_proj", "v_proj"}


def test_an_adapter_by_hand(model_factory):
    model = model_factory(0)
    lora.add_adapter(model, LoraSection(rank=2, alpha=6.0, target_modules=("q_proj",)))
    adapted = model.model.layers[0].self_attn.q_proj
    nn.init.normal_(adapted.lora_B[lora.ADAPTER].weight)
    expected = adapted.base_layer.weight + 3.0 * adapted.lora_B[lora.ADAPTER].weight @ adapted.lora_A[lora.ADAPTER].weight
    torch.testing.assert_close(dict(Policy(model).named_weights())["model.layers.0.self_attn.q_proj.weight"], expected.detach())


def test_fingerprints_of_different_ranks_differ(one_rank, model_path):
    fingerprints = [load_policy(model_path, section(lora=each)).fingerprint() for each in (None, {"rank": 2}, {"rank": 4})]
    assert len(set(fingerprints)) == 3


@pytest.mark.parametrize(
    ("targets", "sentence"),
    [
        (["nowhere"], r"must end the names of layers of the model, got nowhere"),
        (["embed_tokens"], "must not have the input or output"),
    ],
)
def test_targets_that_cannot_be_trained_are_refused(one_rank, model_path, targets, sentence):
    with pytest.raises(ConfigurationError, match=sentence):
        load_policy(model_path, section(lora={"target_modules": targets}))
