from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from services.inference_hub.routing import LOAD_FACTOR, Sessions, choose


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
