import random
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.inference_hub.routing import LOAD_FACTOR, PowerOfTwo, RoundRobin, choose
from services.inference_hub.sessions import Sessions


@dataclass(frozen=True)
class Load:
    id: str
    outstanding_tokens: int


loads = st.lists(st.integers(0, 10_000), min_size=1, max_size=6).map(
    lambda tokens: [Load(f"e{index}", count) for index, count in enumerate(tokens)]
)


def test_a_call_without_a_session_goes_to_the_engine_with_the_least_to_do():
    engines = [Load("a", 300), Load("b", 100), Load("c", 200)]
    assert choose(engines, preferred_id=None, cost_tokens=50).id == "b"


def test_a_session_stays_with_its_engine():
    engines = [Load("a", 300), Load("b", 290)]
    assert choose(engines, preferred_id="a", cost_tokens=50).id == "a"


def test_a_session_leaves_an_overloaded_engine():
    engines = [Load("a", 1_000), Load("b", 0)]
    assert choose(engines, preferred_id="a", cost_tokens=50).id == "b"


def test_a_session_whose_engine_is_gone_goes_to_the_least_loaded():
    assert choose([Load("b", 10), Load("c", 5)], preferred_id="a", cost_tokens=50).id == "c"


def test_a_session_stays_on_an_idle_machine_however_long_its_prompt():
    assert choose([Load("a", 0), Load("b", 0)], preferred_id="b", cost_tokens=100_000).id == "b"


@given(loads, st.integers(1, 5_000))
def test_no_session_overloads_its_engine(engines: list[Load], cost_tokens: int):
    mean = sum(engine.outstanding_tokens for engine in engines) / len(engines)
    chosen = choose(engines, preferred_id="e0", cost_tokens=cost_tokens)
    least = min(engine.outstanding_tokens for engine in engines)
    assert chosen.outstanding_tokens <= max(LOAD_FACTOR * mean + cost_tokens, least)


def test_the_least_recently_used_session_is_forgotten():
    sessions = Sessions(capacity=2)
    sessions.remember("a", "e0")
    sessions.remember("b", "e1")
    sessions.remember("a", "e0")
    sessions.remember("c", "e1")
    assert [sessions.engine_id(session) for session in "abc"] == ["e0", None, "e1"]
    assert len(sessions) == 2


def test_engines_take_turns():
    engines = [Load("b", 5), Load("a", 0), Load("c", 9)]
    turns = RoundRobin()
    assert [turns(engines, preferred_id=None, cost_tokens=1).id for _ in range(4)] == ["a", "b", "c", "a"]
    assert turns(engines[2:], preferred_id=None, cost_tokens=1).id == "c"


def test_of_two_engines_by_chance_the_less_loaded_is_taken():
    engines = [Load(str(index), index) for index in range(10)]
    strategy = PowerOfTwo(random.Random(0))
    chosen = [strategy(engines, preferred_id=None, cost_tokens=1).outstanding_tokens for _ in range(1_000)]
    assert 9 not in chosen
    assert sum(chosen) / len(chosen) == pytest.approx(3 - 1 / 3, abs=0.3)  # The mean of the least of two draws without repetition.
    assert strategy(engines[3:4], preferred_id=None, cost_tokens=1).id == "3"
