import dataclasses

import pytest
from prometheus_client import CollectorRegistry, Counter, generate_latest

from services.standalone.accounting import AgentCounts, StreamEntry, account, agent_counts
from services.standalone.run_files import Lineage
from shared.ledger import Books

GROUP_SIZE = 2


def books(*, episodes_finished: int, episodes_discarded: int) -> Books:
    counts = {field.name: 0 for field in dataclasses.fields(Books)}
    known = {"discarded": {}, "episodes_finished": episodes_finished, "episodes_discarded": episodes_discarded}
    return Books(**counts | known)


def entries(*groups: str) -> list[StreamEntry]:
    return [StreamEntry(group, f"{group}:{index}") for group in groups for index in range(GROUP_SIZE)]


def line(version: int, *groups: str) -> Lineage:
    return Lineage(version, groups, tuple(f"{group}:{index}" for group in groups for index in range(GROUP_SIZE)), 1)


def lost(*, finished, stream, lines, recorded=None, without_reward=0, discarded=0) -> int:
    agents = AgentCounts(finished if recorded is None else recorded, without_reward)
    found = books(episodes_finished=finished, episodes_discarded=discarded)
    return account(found, stream, lines, agents, group_size=GROUP_SIZE).lost


def test_trained_and_waiting_episodes_are_not_lost():
    assert lost(finished=8, stream=entries("c", "d"), lines=[line(1, "a"), line(2, "b")]) == 0


def test_trained_group_that_waits_for_its_checkpoint_counts_once():
    assert lost(finished=4, stream=entries("b"), lines=[line(1, "a"), line(2, "b")]) == 0


def test_discarded_groups_are_accounted_for():
    assert lost(finished=6, stream=entries("c"), lines=[line(1, "a")], discarded=2) == 0


def test_episode_without_a_reward_is_not_in_the_lineage_and_not_lost():
    partial = Lineage(1, ("a",), ("a:0",), 1)
    assert lost(finished=2, stream=[], lines=[partial], without_reward=1) == 0


def test_episode_with_a_reward_that_the_trainer_dropped_is_lost():
    partial = Lineage(1, ("a",), ("a:0",), 1)
    assert lost(finished=2, stream=[], lines=[partial]) == 1


def test_entry_that_vanished_from_the_stream_is_lost():
    assert lost(finished=4, stream=entries("b")[:1], lines=[line(1, "a")]) == 1


def test_episode_that_only_the_agents_know_of_is_lost():
    assert lost(finished=2, recorded=3, stream=entries("a"), lines=[]) == 1


def test_agents_counts_are_read_from_their_metrics():
    registry = CollectorRegistry()
    episodes = Counter("headrace_agents_episodes", "-", ("environment", "outcome", "receipt"), registry=registry)
    episodes.labels("a", "completed", "recorded").inc(3)
    episodes.labels("b", "timeout", "recorded").inc(2)
    episodes.labels("b", "completed", "duplicate").inc(1)
    assert agent_counts(generate_latest(registry).decode()) == AgentCounts(recorded=5, without_reward=2)


@pytest.mark.parametrize("text", ["", "# HELP other x\n# TYPE other counter\nother_total 3\n"])
def test_agents_that_finished_nothing_count_nothing(text):
    assert agent_counts(text) == AgentCounts(0, 0)
