import itertools
import uuid

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from services.env_agents.episode_log import EpisodeIdentity, EpisodeLog
from services.env_agents.generation import Generation
from shared import trajectory as trajectories
from shared.trajectory import Outcome, ToolCall
from shared.versions import VersionSpan

TOKENS = st.lists(st.integers(0, 2**31 - 1), max_size=12)


@st.composite
def generations(draw) -> Generation:
    """Any turn: any number of tokens, sampled by one or more versions that never go down."""
    lengths = draw(st.lists(st.integers(1, 5), max_size=4))
    versions = sorted(draw(st.lists(st.integers(0, 100), min_size=len(lengths), max_size=len(lengths))))
    ends = np.cumsum(lengths).tolist()
    spans = [VersionSpan(end - length, end, version) for end, length, version in zip(ends, lengths, versions, strict=True)]
    count = sum(lengths)
    ids = draw(st.lists(st.integers(0, 2**31 - 1), min_size=count, max_size=count))
    logprobs = draw(st.lists(st.floats(-50, 0, width=32), min_size=count, max_size=count))
    return Generation(ids, logprobs, spans, is_cut=False)


def new_log() -> EpisodeLog:
    identity = EpisodeIdentity(
        run_id="r",
        trajectory_id=str(uuid.UUID(int=0)),
        group_id="g",
        group_size=1,
        sample_index=0,
        attempt=0,
        environment="e",
        task_id="0",
    )
    return EpisodeLog(identity, temperature=1.0)


@given(st.lists(st.tuples(TOKENS, generations(), st.floats(-10, 10)), max_size=6), TOKENS)
def test_tokens_mask_logprobs_versions_and_turns_stay_aligned(rounds, tail):
    log = new_log()
    expected: list[tuple[int, int, np.float32, int]] = []
    turns = []
    for context, generation, reward in rounds:
        log.add_context(context)
        expected += [(token_id, 0, np.float32(0), -1) for token_id in context]
        start = len(expected)
        log.add_turn(generation, state_fingerprint="s")
        versions = [span.version for span in generation.version_spans for _ in range(span.start, span.end)]
        expected += [
            (token_id, 1, np.float32(logprob), version)
            for token_id, logprob, version in zip(generation.token_ids, generation.logprobs, versions, strict=True)
        ]
        log.answer_turn(reward=reward, reward_parts={"part": reward}, tool_calls=())
        turns.append((start, len(expected), reward))
    log.add_context(tail)
    expected += [(token_id, 0, np.float32(0), -1) for token_id in tail]

    record = trajectories.decode(trajectories.encode(log.trajectory(Outcome.COMPLETED, "")))

    columns = [record.token_ids, record.loss_mask, record.logprobs, record.token_versions]
    assert list(zip(*(column.tolist() for column in columns), strict=True)) == [
        (token_id, mask, float(logprob), version) for token_id, mask, logprob, version in expected
    ]
    assert [(turn.start, turn.end, turn.reward) for turn in record.turns] == turns
    assert record.reward == sum(reward for _, _, reward in rounds)


@given(st.lists(generations(), max_size=5))
def test_neighbouring_spans_of_one_version_are_one_span(turns):
    log = new_log()
    for generation in turns:
        log.add_turn(generation, state_fingerprint="")
    spans = log.trajectory(Outcome.COMPLETED, "").version_spans
    assert all(left.version != right.version for left, right in itertools.pairwise(spans))


def test_turn_that_was_never_answered_is_kept_without_reward():
    log = new_log()
    log.add_context([1, 2])
    log.add_turn(Generation([3], [-1.0], [VersionSpan(0, 1, 4)], is_cut=False), state_fingerprint="s")
    record = log.trajectory(Outcome.ENVIRONMENT_ERROR, "it broke")
    assert (record.turns[0].start, record.turns[0].end, record.turns[0].reward) == (2, 3, 0.0)
    assert record.oldest_version == 4


def test_reward_parts_add_up_over_turns():
    log = new_log()
    for reward in (1.0, 2.0):
        log.add_turn(Generation([3], [-1.0], [VersionSpan(0, 1, 0)], is_cut=False), state_fingerprint="s")
        log.answer_turn(reward=reward, reward_parts={"speed": reward}, tool_calls=(ToolCall("t", "{}", 0.1, False),))
    record = log.trajectory(Outcome.COMPLETED, "")
    assert record.reward_parts == {"speed": 3.0}
    assert record.turns[1].tool_calls[0].name == "t"
