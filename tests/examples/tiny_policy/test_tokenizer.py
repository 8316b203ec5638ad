import pytest
from hypothesis import given
from hypothesis import strategies as st
from renderers import create_renderer

from examples.calculator import Calculator
from examples.tiny_policy.demonstrations import RENDERER
from examples.tiny_policy.tokenizer import CONTROL_TOKENS, MARKUP_TOKENS

MESSAGES = [
    {"role": "system", "content": "Use the tool, then answer with the number."},
    {"role": "user", "content": "12 + 34 ="},
]


@given(text=st.text(st.characters(codec="utf-8")))
def test_any_text_comes_back_as_it_was(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text


def test_every_digit_is_a_token_of_its_own(tokenizer):
    tokens = [tokenizer.decode([token_id]) for token_id in tokenizer.encode("123 + 456", add_special_tokens=False)]
    assert tokens == ["1", "2", "3", " + ", "4", "5", "6"]


@pytest.mark.parametrize("text", CONTROL_TOKENS + MARKUP_TOKENS)
def test_special_tokens_are_single(tokenizer, text):
    assert len(tokenizer.encode(text, add_special_tokens=False)) == 1


def test_markup_stays_visible_where_control_tokens_are_dropped(tokenizer):
    token_ids = tokenizer.encode("<tool_call>\n1\n</tool_call><|im_end|>", add_special_tokens=False)
    assert tokenizer.decode(token_ids, skip_special_tokens=True) == "<tool_call>\n1\n</tool_call>"


def test_merges_shrink_the_constant_text_of_a_prompt(tokenizer):
    renderer = create_renderer(tokenizer, RENDERER)
    prompt = renderer.render_ids(MESSAGES, tools=Calculator().tool_specs(), add_generation_prompt=True)
    assert len(tokenizer.decode(prompt)) > 700
    assert len(prompt) < 40


@pytest.mark.parametrize("tools", [None, Calculator().tool_specs()], ids=["no tools", "tools"])
def test_chat_template_writes_what_the_renderer_renders(tokenizer, tools):
    renderer = create_renderer(tokenizer, RENDERER)
    rendered = tokenizer.decode(renderer.render_ids(MESSAGES, tools=tools, add_generation_prompt=True))
    assert tokenizer.apply_chat_template(MESSAGES, tools=tools, add_generation_prompt=True, tokenize=False) == rendered


def test_chat_template_writes_a_whole_episode(tokenizer):
    call = '<tool_call>\n{"name": "calculate", "arguments": {"expression": "12 + 34"}}\n</tool_call>'
    turns = [{"role": "assistant", "content": call}, {"role": "tool", "content": "46"}]
    text = tokenizer.apply_chat_template([MESSAGES[1], *turns], add_generation_prompt=True, tokenize=False)
    assert text == (
        f"<|im_start|>user\n12 + 34 =<|im_end|>\n<|im_start|>assistant\n{call}<|im_end|>\n"
        "<|im_start|>user\n<tool_response>\n46\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )
