"""The tiny policy's architecture: Qwen3, 2 layers of width 128, 0.48 million parameters."""

from typing import Final

import torch
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

VOCABULARY_MULTIPLE: Final = 64


def new_policy(tokenizer: PreTrainedTokenizerFast, *, seed: int) -> Qwen3ForCausalLM:
    """Random weights, the same for the same seed, in float32."""
    torch.manual_seed(seed)
    policy = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=-(-len(tokenizer) // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE,
            hidden_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=32,
            intermediate_size=384,
            tie_word_embeddings=True,
            max_position_embeddings=2048,
            # Episodes are some 50 tokens long. With the usual base of 10,000 most rotary frequencies are too slow to tell
            # neighbours apart, and copying digits from the question generalises late or never.
            rope_parameters={"rope_type": "default", "rope_theta": 100.0},
            # With the usual 0.02, tied embeddings of tokens that occur in the same places, such as " + " and " - ", collapse
            # into one vector before the policy learns to tell them apart.
            initializer_range=0.05,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )
    return policy.float()
