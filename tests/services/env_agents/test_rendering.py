import pytest
import renderers

from services.env_agents.environment import Action, RequestedCall
from services.env_agents.rendering import ChatRenderer, PrefixError, load_renderer
from services.env_agents.tokenizer import load_tokenizer, published_name
from shared.errors import ConfigurationError

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "calculate",
            "description": "Evaluates.",
            "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]},
        },
    }
]
USER = {"role": "user", "content": "1 + 2?"}
TOOL_RESULT = {"role": "tool", "name": "calculate", "content": "3"}


@pytest.fixture
def encode(tokenizer):
    return lambda text: tokenizer.encode(text, add_special_tokens=False)


@pytest.fixture
def prompt_ids(renderer):
    return renderer.prompt([USER], TOOLS)


def test_prompt_ends_where_the_policy_begins(renderer, prompt_ids):
    text = renderer.text(prompt_ids)
    assert text.endswith("<|im_start|>user\n1 + 2?<|im_end|>\n<|im_start|>assistant\n")
    assert '{"type": "function", "function": {"name": "calculate"' in text


@pytest.mark.parametrize("messages", [[TOOL_RESULT], [USER], [TOOL_RESULT, TOOL_RESULT], [TOOL_RESULT, USER]])
@pytest.mark.parametrize(
    "turn",
    [
        '<tool_call>\n{"name": "calculate", "arguments": {"expression": "1 + 2"}}\n</tool_call><|im_end|>',
        "<tool_call>nonsense<|im_end|>",
        "<think>hm</think>3<|im_end|>",
        "3<|endoftext|>",
        "cut off",
        "\n\n ",
    ],
)
def test_sampled_ids_are_kept_exactly_when_the_conversation_goes_on(renderer, encode, prompt_ids, turn, messages):
    added = renderer.extend(prompt_ids, encode(turn), messages, TOOLS)
    text = renderer.text(added)
    assert text.endswith("<|im_end|>\n<|im_start|>assistant\n")
    assert turn not in text


def test_ids_that_no_encoder_would_choose_survive(renderer, tokenizer, prompt_ids):
    apart = [token_id for character in "<tool_call>" for token_id in tokenizer.encode(character, add_special_tokens=False)]
    assert tokenizer.encode("<tool_call>", add_special_tokens=False) != apart
    added = renderer.extend(prompt_ids, [*apart, tokenizer.eos_token_id], [USER], TOOLS)
    assert renderer.parse(prompt_ids, apart, TOOLS).tool_calls == ()
    assert added[0] == tokenizer.encode("\n", add_special_tokens=False)[0]


def test_thought_that_stops_without_end_cannot_be_continued(renderer, encode, prompt_ids):
    with pytest.raises(PrefixError, match="without changing its tokens"):
        renderer.extend(prompt_ids, encode("<think>hm<|im_end|>"), [USER], TOOLS)


def test_format_that_changes_earlier_tokens_is_caught(renderer, encode, prompt_ids):
    class Forgetful:
        def get_stop_token_ids(self):
            return []

        def bridge_to_next_turn(self, prompt_ids, sampled_ids, messages, tools):
            return renderers.RenderedTokens(token_ids=prompt_ids[1:] + sampled_ids, message_indices=[])

    with pytest.raises(PrefixError, match="changed tokens of earlier turns"):
        ChatRenderer(None, Forgetful()).extend(prompt_ids, encode("3"), [USER], TOOLS)


@pytest.mark.parametrize(
    ("turn", "action"),
    [
        ("3<|im_end|>", Action("3")),
        ("<think>hm</think>3<|im_end|>", Action("3")),
        (
            '<tool_call>{"name": "calculate", "arguments": {"expression": "1"}}</tool_call><|im_end|>',
            Action("", (RequestedCall("calculate", {"expression": "1"}),)),
        ),
        (
            'x<tool_call>{"name": "calculate", "arguments": "{\\"expression\\": \\"1\\"}"}</tool_call>',
            Action("x", (RequestedCall("calculate", {"expression": "1"}),)),
        ),
        ("<tool_call>{]</tool_call>", Action("", (RequestedCall("", {}, "the tool call is not JSON"),))),
        ('<tool_call>{"name": "calcu', Action("", (RequestedCall("", {}, "the tool call does not end"),))),
        ("<tool_call>{}</tool_call>", Action("", (RequestedCall("", {}, "the tool call has no name"),))),
        ("<tool_call>[]</tool_call>", Action("", (RequestedCall("", {}, "the tool call has no name"),))),
        ('<tool_call>{"name": 3}</tool_call>', Action("", (RequestedCall("", {}, "the tool call's name is not text"),))),
        (
            '<tool_call>{"name": "calculate", "arguments": [1]}</tool_call>',
            Action("", (RequestedCall("calculate", {}, "arguments must be a JSON object"),)),
        ),
        ('<tool_call>{"name": "calculate", "arguments": null}</tool_call>',
         Action("", (RequestedCall("calculate", {}, "arguments must be a JSON object"),))),
    ],
)  # fmt: skip
def test_turns_parse_to_actions_with_the_problems_of_their_calls(renderer, encode, prompt_ids, turn, action):
    assert renderer.parse(prompt_ids, encode(turn), TOOLS) == action


def test_renderer_keeps_thinking_unless_told_otherwise(tokenizer, tmp_path, encode):
    tokenizer.save_pretrained(tmp_path)
    kept = load_renderer(tmp_path, "qwen3", {})
    prompt_ids = kept.prompt([USER], [])
    assert kept.extend(prompt_ids, encode("3<|im_end|>"), [USER], [])
    dropped = load_renderer(tmp_path, "qwen3", {"thinking_retention": "tool_cycle"})
    with pytest.raises(PrefixError):
        dropped.extend(prompt_ids, encode("3<|im_end|>"), [USER], [])


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("qwen", {}, "env_agents.renderer 'qwen' cannot be used"),
        ("auto", {}, "name the model's renderer instead of auto"),
        ("qwen3", {"enable_thought": True}, "env_agents.renderer_options must suit the renderer 'qwen3': enable_thought"),
    ],
)
def test_unusable_renderer_is_a_sentence(tokenizer, tmp_path, name, options, message):
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(ConfigurationError, match=message):
        load_renderer(tmp_path, name, options)


def test_model_without_tokenizer_is_a_sentence(tmp_path):
    with pytest.raises(ConfigurationError, match=r"run\.model_path must hold a tokenizer"):
        load_renderer(tmp_path, "qwen3", {})


def test_tokenizer_without_transformers_agrees_with_transformers(tokenizer, tmp_path):
    tokenizer.save_pretrained(tmp_path)
    loaded = load_tokenizer(tmp_path)
    assert isinstance(loaded, renderers.base.Tokenizer)
    assert not isinstance(loaded, type(tokenizer))
    text = "<|im_start|>user\n1 + 2? é<|im_end|>\n<tool_call>"
    ids = loaded.encode(text, add_special_tokens=False)
    assert ids == tokenizer.encode(text, add_special_tokens=False)
    for skips in (False, True):
        assert loaded.decode(ids, skip_special_tokens=skips) == tokenizer.decode(ids, skip_special_tokens=skips)
    assert loaded.decode(ids[0]) == tokenizer.decode([ids[0]])
    assert loaded.convert_tokens_to_ids(["<tool_call>", "absent"]) == tokenizer.convert_tokens_to_ids(["<tool_call>", "absent"])
    assert (loaded.eos_token_id, loaded.unk_token_id) == (tokenizer.eos_token_id, tokenizer.unk_token_id)


def test_default_format_renders_the_models_own_template(tokenizer, tmp_path):
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("{% for message in messages %}{{ message.content }}{% endfor %}")
    loaded = load_renderer(tmp_path, "default", {})
    assert loaded.text(loaded.prompt([USER], [])) == USER["content"]


@pytest.mark.parametrize(
    ("directory", "name"),
    [
        ("Qwen3-8B", "Qwen/Qwen3-8B"),
        ("models--Qwen--Qwen3-8B/snapshots/9f1c", "Qwen/Qwen3-8B"),
        ("mine", None),
    ],
)
def test_auto_knows_a_model_by_the_name_of_its_directory(tmp_path, directory, name):
    assert published_name(tmp_path / directory) == (name or str(tmp_path / directory))


def test_auto_takes_the_format_of_a_known_model(tokenizer, tmp_path, renderer):
    tokenizer.save_pretrained(tmp_path / "Qwen3-8B")
    assert load_renderer(tmp_path / "Qwen3-8B", "auto", {}).prompt([USER], TOOLS) == renderer.prompt([USER], TOOLS)
