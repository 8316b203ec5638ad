"""Random models of a given size, in directories that engines load."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Size:
    """A dense Qwen3 in float32."""

    megabytes: int
    hidden: int
    intermediate: int
    layers: int

    @property
    def timeout_s(self) -> float:
        """The hub's, of each step; the trainer's is shorter."""
        return max(6.0, self.megabytes / 50)

    @property
    def push_timeout_s(self) -> float:
        return self.timeout_s * 2 / 3

    @property
    def bucket_mib(self) -> int:
        """Several buckets, so that a fault can come between two."""
        return max(4, self.megabytes // 8)


SIZES = {size.megabytes: size for size in (Size(25, 512, 1536, 2), Size(250, 1024, 4096, 4), Size(1000, 2048, 8192, 4))}
VOCABULARY = 1024


def make_model(size: Size, directory: Path) -> Path:
    """Writes the model and a tokenizer, and answers where."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from examples.tiny_policy.demonstrations import tokenizer_for
    from examples.tiny_policy.tasks import Side, questions

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=size.hidden,
        intermediate_size=size.intermediate,
        num_hidden_layers=size.layers,
        num_attention_heads=size.hidden // 64,
        num_key_value_heads=size.hidden // 128,
        head_dim=64,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
    )
    path = directory / f"model-{size.megabytes}"
    tokenizer_for(questions(Side.TRAIN, seed=0)).save_pretrained(path)
    Qwen3ForCausalLM(config).save_pretrained(path)
    return path
