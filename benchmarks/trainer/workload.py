"""The model, and the batch of long-tailed lengths that every contestant trains on."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist

import numpy as np

MEDIAN_TOKENS, MAX_TOKENS, PROMPT_TOKENS = 200, 2000, 32
GROUP_SIZE = 8


@dataclass(frozen=True)
class ModelSize:
    """Of a Qwen3 with tied embeddings."""

    vocabulary: int
    hidden: int
    layers: int

    def save(self, path: Path) -> None:
        """Random weights, and a tokenizer whose tokens are numbers."""
        import torch
        from tokenizers import Tokenizer
        from tokenizers.models import WordLevel
        from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

        torch.manual_seed(0)
        config = Qwen3Config(
            vocab_size=self.vocabulary,
            hidden_size=self.hidden,
            intermediate_size=3 * self.hidden,
            num_hidden_layers=self.layers,
            num_attention_heads=self.hidden // 32,
            num_key_value_heads=max(1, self.hidden // 64),
            head_dim=32,
            max_position_embeddings=2 * MAX_TOKENS,
            tie_word_embeddings=True,
        )
        Qwen3ForCausalLM(config).save_pretrained(path)
        words = Tokenizer(WordLevel({str(token): token for token in range(self.vocabulary)}, unk_token="0"))
        PreTrainedTokenizerFast(tokenizer_object=words, eos_token="1", pad_token="2", unk_token="0").save_pretrained(path)


STEP_MODEL = ModelSize(vocabulary=8192, hidden=128, layers=2)
"""One and a half million weights: an update of either contestant fits into seconds on a CPU."""
CHECKPOINT_MODEL = ModelSize(vocabulary=32768, hidden=768, layers=5)
"""60 million weights, 242 MB in float32."""


def lengths(num_episodes: int) -> list[int]:
    """Tokens of each episode: the quantiles of a log-normal distribution with the wanted median, the longest at the maximum."""
    normal = NormalDist()
    quantiles = [normal.inv_cdf((index + 0.5) / num_episodes) for index in range(num_episodes)]
    sigma = math.log(MAX_TOKENS / MEDIAN_TOKENS) / quantiles[-1]
    in_order = [max(PROMPT_TOKENS + 1, round(MEDIAN_TOKENS * math.exp(sigma * quantile))) for quantile in quantiles]
    return [in_order[index] for index in np.random.default_rng(0).permutation(num_episodes)]


def tokens_of(num_episodes: int, vocabulary: int) -> list[list[int]]:
    """Token ids of each episode, its prompt first."""
    generator = np.random.default_rng(1)
    return [generator.integers(3, vocabulary, length).tolist() for length in lengths(num_episodes)]


def rewards(num_episodes: int) -> Sequence[float]:
    return [float(index % 3 == 0) for index in range(num_episodes)]
