"""Packed rows give the log-probabilities and gradients of each row alone, whatever the model's attention."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM, Qwen2Config, Qwen2ForCausalLM

from tests.trainer.records import VOCABULARY
from trainer.model import Policy
from trainer.packing import pack, unpack

SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}


def sliding_model(seed):
    torch.manual_seed(seed)
    return MistralForCausalLM(MistralConfig(**SIZES, sliding_window=5))


def qwen2_model(seed):
    torch.manual_seed(seed)
    layers = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}
    return Qwen2ForCausalLM(Qwen2Config(**SIZES, **layers, tie_word_embeddings=True))


def llama_model(seed):
    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(**{**SIZES, "num_key_value_heads": 4}))


@pytest.fixture
def rows():
    generator = torch.Generator().manual_seed(3)
    token_ids = torch.randint(VOCABULARY, (4, 40), generator=generator)
    mask = torch.rand(4, 40, generator=generator) < 0.4
    mask[:, :2] = False
    for row, length in enumerate((40, 13, 27, 2)):
        mask[row, length:] = False
        token_ids[row, length:] = 0
    mask[3, 1] = True
    return token_ids, mask, torch.tensor([1.0, 0.7, 1.3, 1.0])


def alone(model, token_ids, mask, temperatures):
    """Every row by itself, unpadded, through the model's stock attention and a full softmax."""
    model.set_attn_implementation("sdpa")
    values = torch.zeros(mask.shape)
    for row in range(len(mask)):
        last = int(mask[row].nonzero().max())
        logits = model(input_ids=token_ids[row : row + 1, : last + 1]).logits[0] / temperatures[row]
        logprobs = torch.log_softmax(logits, dim=-1)
        for t in mask[row].nonzero()[:, 0].tolist():
            values[row, t] = logprobs[t - 1, token_ids[row, t]]
    return values


def gradients(model, values):
    model.zero_grad()
    weights = torch.linspace(-1, 1, values.numel()).view_as(values)
    (values * weights).sum().backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("attention", ["sdpa", "unpacked"])
@pytest.mark.parametrize("family", ["qwen3", "llama", "sliding", "some layers sliding"])
def test_packed_is_each_row_alone_in_value_and_gradient(model_factory, rows, family, attention):
    factories = {"qwen3": model_factory, "llama": llama_model, "sliding": sliding_model, "some layers sliding": qwen2_model}
    model = factories[family](0)
    expected = alone(model, *rows)
    expected_gradients = gradients(model, expected)
    actual = Policy(model, attention=attention)(*rows)
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-6)
    for name, gradient in gradients(model, actual).items():
        scale = max(1.0, expected_gradients[name].abs().max().item())
        torch.testing.assert_close(
            gradient, expected_gradients[name], rtol=0, atol=1e-6 * scale, msg=lambda text, n=name: f"{n}: {text}"
        )


def test_gradient_checkpointing_keeps_rows_apart_when_it_computes_again(model_factory, rows):
    model = model_factory(0)
    policy = Policy(model)
    expected = gradients(model, policy(*rows))
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    policy.train()
    for name, gradient in gradients(model, policy(*rows)).items():
        torch.testing.assert_close(gradient, expected[name], rtol=0, atol=1e-6)


def test_no_token_of_one_row_changes_another(model_factory, rows):
    token_ids, mask, temperatures = rows
    policy = Policy(model_factory(0)).eval()
    with torch.no_grad():
        before = policy(token_ids, mask, temperatures)
        token_ids[0] = (token_ids[0] + 1) % VOCABULARY
        after = policy(token_ids, mask, temperatures)
    assert torch.equal(before[1:], after[1:])
    assert not torch.equal(before[0], after[0])


def test_only_tokens_before_the_last_sampled_one_are_packed():
    token_ids = torch.tensor([[5, 6, 7, 8], [1, 2, 3, 0], [9, 9, 0, 0]])
    mask = torch.tensor([[0, 1, 0, 0], [0, 1, 1, 0], [0, 0, 0, 0]], dtype=torch.bool)
    packed = pack(token_ids, mask)
    assert packed.token_ids_1N.tolist() == [[5, 1, 2]]
    assert packed.position_ids_1N.tolist() == [[0, 0, 1]]
    assert packed.predicts_N.tolist() == [True, True, True]
    assert packed.lengths == (1, 2)
    assert unpack(torch.tensor([0.1, 0.2, 0.3]), mask).tolist() == [
        [0, pytest.approx(0.1), 0, 0],
        [0, pytest.approx(0.2), pytest.approx(0.3), 0],
        [0, 0, 0, 0],
    ]


def test_flash_attention_is_told_where_rows_begin():
    mask = torch.tensor([[0, 1, 0, 0], [0, 1, 1, 0]], dtype=torch.bool)
    arguments = pack(torch.ones(2, 4, dtype=torch.int64), mask).flash_arguments()
    assert arguments["cu_seq_lens_q"].tolist() == [0, 1, 3]
    assert arguments["cu_seq_lens_q"].dtype == torch.int32
    assert (arguments["max_length_q"], arguments["max_length_k"]) == (2, 2)


def test_a_micro_batch_without_sampled_tokens_backpropagates_zero(model_factory):
    model = model_factory(0)
    values = Policy(model)(torch.zeros(1, 2, dtype=torch.int64), torch.zeros(1, 2, dtype=torch.bool), torch.ones(1))
    values.sum().backward()
    assert values.tolist() == [[0, 0]]
    assert all((parameter.grad == 0).all() for parameter in model.parameters())
