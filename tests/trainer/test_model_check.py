"""Models that cannot be packed, or whose logits are not their output layer's, are refused before training."""

import pytest
import torch
from transformers import GraniteConfig, GraniteForCausalLM, MambaConfig, MambaForCausalLM

from shared.errors import ConfigurationError
from tests.trainer.records import VOCABULARY
from tests.trainer.test_packing import SIZES, llama_model, qwen2_model, sliding_model
from trainer.model import Policy
from trainer.model_check import check_model

CPU = torch.device("cpu")


def mamba_model():
    torch.manual_seed(0)
    config = MambaConfig(vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2, state_size=4)
    return MambaForCausalLM(config)


@pytest.mark.parametrize("factory", [llama_model, qwen2_model, sliding_model])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_models_pass(factory, dtype):
    policy = Policy(factory(0).to(dtype))
    check_model(policy, CPU)
    assert policy.training


def test_a_state_space_model_is_refused_when_packed_and_passes_unpacked():
    with pytest.raises(ConfigurationError, match=r"trainer\.attention=sdpa cannot be used with this model"):
        check_model(Policy(mamba_model()), CPU)
    check_model(Policy(mamba_model(), attention="unpacked"), CPU)


def test_a_model_that_scales_its_logits_is_refused():
    torch.manual_seed(0)
    model = GraniteForCausalLM(GraniteConfig(**SIZES, logits_scaling=8.0))
    with pytest.raises(ConfigurationError, match="its logits are scaled or capped after it"):
        check_model(Policy(model), CPU)


def test_a_layer_that_no_short_sequence_would_betray_is_refused_by_its_name(model_factory):
    model = model_factory(0)
    model.config.layer_types = ["full_attention", "chunked_attention"]
    with pytest.raises(ConfigurationError, match="it has layers of chunked_attention"):
        check_model(Policy(model), CPU)


def test_a_layer_that_lets_tokens_of_the_row_before_through_is_found(model_factory):
    model = model_factory(0)
    mix = model.model.layers[0].mlp.register_forward_hook(lambda _, __, output: output + output.roll(1, dims=1))
    with pytest.raises(ConfigurationError, match="its hidden states change when sequences are packed"):
        check_model(Policy(model), CPU)
    mix.remove()
    check_model(Policy(model), CPU)
