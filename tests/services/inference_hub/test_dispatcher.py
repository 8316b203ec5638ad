"""Late binding without engines: who gets a place, in which order, and that nobody is lost."""

from dataclasses import dataclass, field
from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.inference_hub.dispatcher import Arrival, Dispatcher
from services.inference_hub.limits import CallLimit, EngineLoad
from services.inference_hub.routing import choose
from services.inference_hub.sessions import SILENT_S, Sessions
from services.inference_hub.waiting import Waiter


@dataclass(eq=False)
class Engine:
    id: str
    places: int
    cache_tokens: int = 0
    outstanding_tokens: int = 0
    outstanding_prompt_tokens: int = 0
    num_outstanding_calls: int = 0
    limit: CallLimit = field(default_factory=CallLimit)

    def __post_init__(self) -> None:
        self.limit.reported(EngineLoad(max_running_requests=self.places))

    def begin_call(self, *, prompt_tokens: int, cost_tokens: int) -> None:
        self.num_outstanding_calls += 1
        self.outstanding_prompt_tokens += prompt_tokens
        self.outstanding_tokens += cost_tokens

    def end_call(self, *, prompt_tokens: int, cost_tokens: int) -> None:
        self.num_outstanding_calls -= 1
        self.outstanding_prompt_tokens -= prompt_tokens
        self.outstanding_tokens -= cost_tokens


class Desk:
    """A dispatcher whose calls are names, and which notes what was bound where."""

    def __init__(self, *engines: Engine) -> None:
        self.engines = list(engines)
        self.now = 0.0
        self.sessions = Sessions()
        self.dispatcher: Dispatcher[Engine] = Dispatcher(lambda: self.engines, choose, self.sessions, clock=lambda: self.now)
        self.bound: list[tuple[str, str]] = []
        self.running: dict[str, tuple[Engine, Arrival]] = {}
        self.waiters: dict[str, Waiter[Engine]] = {}
        self._numbers = count(1)

    def arrive(
        self, name: str, session: str | None = None, *, environment: str = "a", prompt: int = 10, cost: int = 20, validation=False
    ) -> None:
        self._arrive(name, Arrival(next(self._numbers), session, environment, validation, prompt, cost), frozenset())

    def fail(self, name: str) -> None:
        """The engine fails on the call, which asks for another one."""
        engine, call = self.running.pop(name)
        self.dispatcher.done(engine, call)
        self._arrive(name, call, frozenset({engine.id}))

    def _arrive(self, name: str, call: Arrival, avoided_ids: frozenset[str]) -> None:
        def bind(engine: Engine) -> None:
            assert name not in self.running
            self.bound.append((name, engine.id))
            self.running[name] = (engine, call)

        arrived = self.dispatcher.arrive(call, bind, avoided_ids=avoided_ids)
        if isinstance(arrived, Engine):
            bind(arrived)
        else:
            self.waiters[name] = arrived

    def close(self) -> None:
        """No engine may take calls, as during a weight update."""
        self._closed, self.engines = self.engines, []
        self.dispatcher.engines_changed()

    def open(self) -> None:
        self.engines = self._closed
        self.dispatcher.engines_changed()

    def finish(self, name: str, num_tokens: int = 5) -> None:
        engine, call = self.running.pop(name)
        self.dispatcher.answered(engine, call, num_tokens)
        self.dispatcher.done(engine, call)

    @property
    def order(self) -> list[str]:
        return [name for name, _ in self.bound]


def test_a_call_waits_while_no_engine_has_a_place_and_gets_the_first_one():
    desk = Desk(Engine("e0", 1), Engine("e1", 1))
    for name in ("first", "second", "third", "fourth"):
        desk.arrive(name)
    assert desk.order == ["first", "second"]
    desk.finish("second")
    assert desk.bound[2] == ("third", "e1")
    desk.finish("third")
    desk.finish("first")
    assert desk.order == ["first", "second", "third", "fourth"]


def test_validation_comes_first_then_next_turns_then_new_episodes():
    desk = Desk(Engine("e0", 1))
    desk.arrive("turn 1", "s")
    desk.finish("turn 1")
    desk.arrive("blocker")
    desk.arrive("new", "t")
    desk.arrive("turn 2", "s")
    desk.arrive("validation", "v", validation=True)
    for name in ("blocker", "validation", "turn 2"):
        desk.finish(name)
    assert desk.order[2:] == ["validation", "turn 2", "new"]


def test_environments_take_turns_by_the_tokens_they_have_in_engines():
    desk = Desk(Engine("e0", 2))
    desk.arrive("a1", environment="a")
    desk.arrive("a2", environment="a")
    for index in range(3, 6):
        desk.arrive(f"a{index}", environment="a")
    desk.arrive("b1", environment="b")
    desk.finish("a1")
    desk.finish("b1")
    assert desk.order == ["a1", "a2", "b1", "a3"]


def test_a_next_turn_waits_for_the_engine_that_has_its_prefix():
    desk = Desk(Engine("e0", 2), Engine("e1", 2))
    desk.arrive("turn 1", "s")
    desk.finish("turn 1")
    desk.arrive("x1", prompt=1, cost=100)
    desk.arrive("y1", prompt=1, cost=100)
    desk.arrive("x2", prompt=1, cost=100)
    home = dict(desk.bound)["turn 1"]
    there = [name for name, engine_id in desk.bound if engine_id == home and name in desk.running]
    if len(there) < 2:
        desk.arrive("z", prompt=1, cost=100)
        there = [name for name, engine_id in desk.bound if engine_id == home and name in desk.running]
    desk.arrive("turn 2", "s")
    assert "turn 2" in desk.waiters
    desk.finish(there[0])
    assert desk.bound[-1] == ("turn 2", home)


def test_a_next_turn_leaves_an_overloaded_engine_for_one_with_a_place():
    desk = Desk(Engine("e0", 8), Engine("e1", 8))
    desk.arrive("turn 1", "s")
    home = desk.bound[0][1]
    desk.finish("turn 1")
    busy = next(engine for engine in desk.engines if engine.id == home)
    busy.begin_call(prompt_tokens=10, cost_tokens=100_000)
    desk.arrive("turn 2", "s")
    assert desk.bound[-1][1] != home


def test_calls_that_waited_for_an_engine_that_is_gone_go_anywhere():
    engines = [Engine("e0", 1), Engine("e1", 1)]
    desk = Desk(*engines)
    desk.arrive("turn 1", "s")
    home = desk.bound[0][1]
    desk.finish("turn 1")
    desk.arrive("x")
    desk.arrive("y")
    desk.arrive("turn 2", "s")
    assert "turn 2" in desk.waiters
    desk.engines = [engine for engine in engines if engine.id != home]
    desk.dispatcher.engines_changed()
    desk.finish(next(name for name, (engine, _) in desk.running.items() if engine.id != home))
    assert desk.order[-1] == "turn 2"


def test_calls_that_no_engine_might_take_go_in_the_order_of_all_waiting_calls():
    desk = Desk(Engine("e0", 1))
    desk.arrive("turn 1", "s")
    desk.finish("turn 1")
    desk.close()
    desk.arrive("new a1", "t1", environment="a")
    desk.arrive("new a2", "t2", environment="a")
    desk.arrive("new b1", "t3", environment="b")
    desk.arrive("turn 2", "s", environment="a")
    desk.arrive("validation", "v", environment="a", validation=True)
    assert not desk.running
    desk.open()
    for name in ("validation", "turn 2", "new a1", "new a2", "new b1"):
        assert list(desk.running) == [name]
        desk.finish(name)


def test_environments_share_what_opens_at_once():
    desk = Desk(Engine("e0", 2))
    desk.close()
    for name in ("a1", "a2", "b1"):
        desk.arrive(name, environment=name[0])
    desk.open()
    assert sorted(desk.running) == ["a1", "b1"]


def test_a_crowd_that_no_engine_might_take_is_spread_over_all_engines():
    desk = Desk(*(Engine(f"e{index}", 100) for index in range(4)))
    desk.close()
    for index in range(40):
        desk.arrive(f"call {index}")
    desk.open()
    assert [engine.num_outstanding_calls for engine in desk.engines] == [10] * 4


def test_a_turn_goes_back_to_the_engine_with_its_prefix_when_calls_are_let_through_again():
    desk = Desk(*(Engine(f"e{index}", 100) for index in range(4)))
    for index in range(8):
        desk.arrive(f"turn 1 of {index}", f"s{index}")
    homes = {name.split()[-1]: engine_id for name, engine_id in desk.bound}
    for name in list(desk.running):
        desk.finish(name)
    desk.close()
    for index in reversed(range(8)):
        desk.arrive(f"turn 2 of {index}", f"s{index}")
    desk.open()
    assert {name.split()[-1]: engine_id for name, engine_id in desk.bound[8:]} == homes


def test_turns_of_one_engine_are_not_all_let_into_it_while_others_are_idle():
    desk = Desk(Engine("e0", 100), Engine("e1", 100))
    away = desk.engines.pop()
    for index in range(20):
        desk.arrive(f"turn 1 of {index}", f"s{index}")
    for name in list(desk.running):
        desk.finish(name)
    desk.engines.append(away)
    desk.close()
    for index in range(20):
        desk.arrive(f"turn 2 of {index}", f"s{index}")
    desk.open()
    assert len(desk.running) == 20
    assert away.num_outstanding_calls >= 7  # Bounded load: the other has at most 1.25 times the mean, and one more.


def test_a_call_that_failed_keeps_its_place_in_the_order():
    desk = Desk(Engine("e0", 2))
    desk.arrive("first")
    desk.arrive("second")
    desk.arrive("third")
    desk.close()
    desk.fail("second")
    desk.fail("first")
    desk.open()
    assert list(desk.running) == ["first", "second"]


def test_those_that_waited_for_an_engine_that_is_gone_are_before_younger_ones():
    engines = [Engine("e0", 1), Engine("e1", 1)]
    desk = Desk(*engines)
    desk.arrive("turn 1", "s", validation=True)
    home = desk.bound[0][1]
    desk.finish("turn 1")
    desk.arrive("x")
    desk.arrive("y")
    desk.arrive("older", "s", validation=True)
    desk.arrive("younger", validation=True)
    desk.engines = [engine for engine in engines if engine.id != home]
    desk.dispatcher.engines_changed()
    desk.finish(next(name for name, (engine, _) in desk.running.items() if engine.id != home))
    assert desk.order[-1] == "older"


def test_an_engine_that_failed_on_a_call_gets_it_again_only_while_no_other_has_a_place():
    desk = Desk(Engine("e0", 1), Engine("e1", 1))
    desk.arrive("call")
    failed = desk.bound[0][1]
    desk.fail("call")
    assert desk.bound[1][1] != failed
    desk.fail("call")
    assert desk.bound[2][1] == failed
    desk.arrive("x")
    desk.fail("call")
    assert desk.bound[4] == ("call", failed)


def test_who_avoids_an_engine_keeps_nobody_else_from_it():
    desk = Desk(Engine("e0", 2), Engine("e1", 2))
    desk.arrive("call")
    failed = desk.bound[0][1]
    desk.close()
    desk.fail("call")
    for index in range(3):
        desk.arrive(f"other {index}")
    desk.open()
    assert len(desk.running) == 4
    assert dict(desk.bound[1:])["call"] != failed


def test_no_episode_begins_where_running_ones_fill_the_cache():
    desk = Desk(Engine("e0", 100, cache_tokens=1_000))
    desk.arrive("r", "r", prompt=500, cost=900)
    desk.finish("r", num_tokens=250)
    desk.arrive("busy", prompt=1)
    desk.arrive("new", "n", prompt=100, cost=300)
    assert "new" in desk.waiters
    desk.dispatcher.end_session("r")
    assert desk.order == ["r", "busy", "new"]


def test_a_silent_episode_keeps_others_from_beginning_only_for_a_while():
    desk = Desk(Engine("e0", 100, cache_tokens=1_000))
    desk.arrive("r", "r", prompt=790, cost=900)
    desk.finish("r")
    desk.arrive("busy", prompt=1)
    desk.arrive("new", "n", prompt=100, cost=200)
    desk.now = SILENT_S - 1
    desk.dispatcher.look()
    assert "new" not in desk.running
    desk.now = SILENT_S
    desk.dispatcher.look()
    assert "new" in desk.running


def test_an_idle_engine_takes_any_call():
    desk = Desk(Engine("e0", 1, cache_tokens=10))
    desk.arrive("long", prompt=1_000)
    assert desk.order == ["long"]


@pytest.mark.parametrize("prompt", [451, 900])
def test_prompts_of_running_calls_fit_into_the_cache(prompt: int):
    desk = Desk(Engine("e0", 100, cache_tokens=1_000))
    desk.arrive("first", prompt=450)
    desk.arrive("second", prompt=prompt)
    assert desk.order == ["first"]


actions = st.lists(
    st.one_of(
        st.tuples(st.just("arrive"), st.integers(0, 5), st.integers(1, 400), st.sampled_from("abc"), st.booleans()),
        st.tuples(st.just("finish"), st.integers(0, 50)),
        st.tuples(st.just("leave"), st.integers(0, 50)),
        st.tuples(st.just("kill"), st.integers(0, 2)),
        st.tuples(st.just("revive"), st.integers(0, 2)),
        st.tuples(st.just("end"), st.integers(0, 5)),
        st.tuples(st.just("retract"), st.integers(0, 2)),
        st.tuples(st.just("fail"), st.integers(0, 50)),
    ),
    max_size=60,
)


@given(actions)
def test_no_call_is_lost_or_bound_twice_and_no_place_leaks(history):
    """The invariant of waiting: each call that arrived is waiting, running, finished or gone, and exactly one of these."""
    everyone = [Engine(f"e{index}", 2, cache_tokens=1_000) for index in range(3)]
    desk = Desk(*everyone)
    gone, finished = set(), set()
    names: list[str] = []
    for action in history:
        match action:
            case ("arrive", session, prompt, environment, validation):
                names.append(f"call {len(names)}")
                desk.arrive(names[-1], f"s{session}", prompt=prompt, environment=environment, validation=validation)
            case ("finish", index) if desk.running:
                name = sorted(desk.running)[index % len(desk.running)]
                desk.finish(name)
                finished.add(name)
            case ("fail", index) if desk.running:
                desk.fail(sorted(desk.running)[index % len(desk.running)])
            case ("leave", index) if waiting := sorted(set(desk.waiters) - set(desk.running) - finished - gone):
                name = waiting[index % len(waiting)]
                assert desk.dispatcher.leave(desk.waiters[name])
                gone.add(name)
            case ("kill", index):
                desk.engines = [engine for engine in desk.engines if engine is not everyone[index]]
                desk.dispatcher.engines_changed()
            case ("revive", index) if everyone[index] not in desk.engines:
                desk.engines = [*desk.engines, everyone[index]]
                desk.dispatcher.engines_changed()
            case ("end", session):
                desk.dispatcher.end_session(f"s{session}")
            case ("retract", index):
                limit = everyone[index].limit
                limit.answered(began_in_round=limit.round, num_retractions=1, was_full=True)
        waiting = set(names) - set(desk.running) - finished - gone
        assert len(desk.dispatcher.waiting) == len(waiting)
        assert sum(engine.num_outstanding_calls for engine in everyone) == len(desk.running)
    desk.engines = everyone
    desk.dispatcher.engines_changed()
    while desk.running:
        name = next(iter(desk.running))
        desk.finish(name)
        finished.add(name)
    assert finished | gone == set(names)
    assert all(
        engine.num_outstanding_calls == engine.outstanding_tokens == engine.outstanding_prompt_tokens == 0 for engine in everyone
    )


arrivals = st.lists(
    st.tuples(st.sampled_from(["validation", "next turn", "new episode"]), st.sampled_from("abc")), min_size=1, max_size=20
)


@given(arrivals, st.booleans())
def test_whatever_calls_waited_for_they_go_by_rank_and_then_by_age(calls, is_closed):
    """One place, and nothing else in it when it is given away: then environments are even, and rank and age decide."""
    desk = Desk(Engine("e0", 1))
    for index in range(len(calls)):
        desk.arrive(f"turn 1 of {index}", f"s{index}")
        desk.finish(f"turn 1 of {index}")
    if is_closed:
        desk.close()
    else:
        desk.arrive("blocker")
    for index, (kind, environment) in enumerate(calls):
        session = f"s{index}" if kind == "next turn" else None
        desk.arrive(f"{index}", session, environment=environment, validation=kind == "validation")
    if is_closed:
        desk.open()
    else:
        desk.finish("blocker")
    order = []
    while desk.running:
        order += desk.running
        desk.finish(order[-1])
    ranks = ["validation", "next turn", "new episode"]
    assert order == [str(index) for index in sorted(range(len(calls)), key=lambda index: (ranks.index(calls[index][0]), index))]
