from dataclasses import replace
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from examples.calculator import Calculator
from examples.tiny_policy.demonstrations import CAREFUL, call_text, with_other_digit
from services.env_agents.environment import Task
from services.env_agents.rendering import load_renderer
from shared.configuration import load


def played(demonstrator, question, slips=CAREFUL, seed=0):
    [episode] = demonstrator.episodes([question], slips, Random(seed))
    return episode


def chosen_text(tokenizer, episode):
    """What the demonstrator said, turns joined."""
    return tokenizer.decode([token for token, chosen in zip(episode.token_ids, episode.loss_mask, strict=True) if chosen])


def test_careful_demonstration_calls_the_tool_and_answers_with_its_result(demonstrator, tokenizer, question):
    episode = played(demonstrator, question)
    assert tokenizer.decode(episode.token_ids).endswith(
        "<|im_start|>user\n12 + 34 =<|im_end|>\n<|im_start|>assistant\n"
        '<tool_call>\n{"name": "calculate", "arguments": {"expression": "12 + 34"}}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\n<tool_response>\n46\n</tool_response><|im_end|>\n<|im_start|>assistant\n46<|im_end|>"
    )


def test_loss_mask_marks_the_assistants_tokens_and_no_others(demonstrator, tokenizer, question):
    episode = played(demonstrator, question)
    assert len(episode.loss_mask) == len(episode.token_ids)
    assert chosen_text(tokenizer, episode) == f"{call_text('12 + 34')}<|im_end|>46<|im_end|>"


async def test_tokens_are_those_that_the_agents_render(demonstrator, question, tiny_model, repository):
    """With the demo's own run file, so that neither can drift from the other."""
    section = load(repository / "examples" / "demo.yaml", overrides=[f"run.model_path={tiny_model}"]).env_agents
    renderer = load_renderer(tiny_model, section.renderer, section.renderer_options)
    calculator = Calculator()
    messages = await calculator.reset(Task("0", 0, {"question": question.question, "answer": question.answer}))
    tools = calculator.tool_specs()
    prompt = renderer.prompt(messages, tools)
    episode = await demonstrator.play(question, CAREFUL, Random(0))
    assert episode.token_ids[: len(prompt)] == prompt
    call = episode.token_ids[len(prompt) : episode.loss_mask.index(0, len(prompt))]
    action = renderer.parse(prompt, call, tools)
    step = await calculator.step(action)
    added = renderer.extend(prompt, call, step.messages, tools)
    assert episode.token_ids[len(prompt) + len(call) :][: len(added)] == added
    answer = episode.token_ids[len(prompt) + len(call) + len(added) :]
    final = await calculator.step(renderer.parse(prompt + call + added, answer, tools))
    assert (final.done, final.reward) == (True, 1.0)


@pytest.mark.parametrize("seed", range(5))
def test_guess_is_a_wrong_answer_without_a_call(demonstrator, tokenizer, question, seed):
    text = chosen_text(tokenizer, played(demonstrator, question, replace(CAREFUL, guesses=1), seed))
    assert text.removesuffix("<|im_end|>").isdigit()
    assert text != "46<|im_end|>"


def test_swapped_operator_is_evaluated_as_written(demonstrator, tokenizer, question):
    text = chosen_text(tokenizer, played(demonstrator, question, replace(CAREFUL, swaps_operator=1)))
    assert text == f"{call_text('12 - 34')}<|im_end|>-22<|im_end|>"


@pytest.mark.parametrize("seed", range(5))
def test_misread_digit_leads_to_another_call(demonstrator, tokenizer, question, seed):
    text = chosen_text(tokenizer, played(demonstrator, question, replace(CAREFUL, misreads_digit=1), seed))
    assert call_text("12 + 34") not in text


@pytest.mark.parametrize("seed", range(5))
def test_miscopied_result_follows_the_right_call(demonstrator, tokenizer, question, seed):
    text = chosen_text(tokenizer, played(demonstrator, question, replace(CAREFUL, miscopies_result=1), seed))
    assert text.startswith(call_text("12 + 34"))
    assert not text.endswith("46<|im_end|>")


@given(number=st.integers(-1999, 1999), seed=st.integers(0, 100))
def test_other_digit_changes_the_number_and_not_its_length(number, seed):
    changed = with_other_digit(str(number), Random(seed))
    assert int(changed) != number
    assert len(changed) == len(str(number))
    assert str(int(changed)) == changed
