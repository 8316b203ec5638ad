"""The tiny policy's tokenizer: byte-level BPE over its own prompts, digits one by one, Qwen3's special tokens.

The merges are learned from rendered episodes, and they may cross spaces and punctuation: the constant text around a question,
some 700 bytes, shrinks to about 20 tokens, and a tool call to its digits and a handful of tokens around them.
"""

import re
from collections.abc import Iterable, Sequence
from typing import Final

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

CONTROL_TOKENS: Final = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
"""Dropped when decoding for people."""
MARKUP_TOKENS: Final = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
"""Single tokens that stay visible when decoding, as in Qwen3."""

CHAT_TEMPLATE: Final = """\
{%- set system = messages[0].content if messages[0].role == 'system' else '' %}
{%- if tools %}
{{- '<|im_start|>system\\n' + (system + '\\n\\n' if system else '') }}
{{- '# Tools\\n\\nYou may call one or more functions to assist with the user query.\\n\\n' }}
{{- 'You are provided with function signatures within <tools></tools> XML tags:\\n<tools>' }}
{%- for tool in tools %}{{ '\\n' + tool | tojson }}{% endfor %}
{{- '\\n</tools>\\n\\nFor each function call, return a json object with function name and arguments ' }}
{{- 'within <tool_call></tool_call> XML tags:\\n<tool_call>\\n' }}
{{- '{"name": <function-name>, "arguments": <args-json-object>}\\n</tool_call><|im_end|>\\n' }}
{%- elif system %}
{{- '<|im_start|>system\\n' + system + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages if message.role != 'system' %}
{%- if message.role == 'tool' %}
{{- '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response><|im_end|>\\n' }}
{%- else %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
"""Qwen3's format for what the tiny policy meets: one tool result a turn, tool calls as text, no reasoning blocks."""


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer without merges: one token a byte, beside the special ones. Renders the corpus that merges are learned from."""
    return _finished(_bytes_only())


def train_tokenizer(rendered_episodes: Iterable[str], *, vocabulary_size: int) -> PreTrainedTokenizerFast:
    """The tokenizer whose merges compress `rendered_episodes` best; `vocabulary_size` counts the special tokens too."""
    specials = (*CONTROL_TOKENS, *MARKUP_TOKENS)
    between_specials = re.compile("|".join(map(re.escape, specials)))
    pieces = [piece for text in rendered_episodes for piece in between_specials.split(text) if piece]
    tokenizer = _bytes_only()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary_size - len(specials),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(pieces, trainer)
    return _finished(tokenizer)


def _bytes_only() -> Tokenizer:
    alphabet: Sequence[str] = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={symbol: index for index, symbol in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _finished(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in CONTROL_TOKENS])
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in MARKUP_TOKENS])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )
