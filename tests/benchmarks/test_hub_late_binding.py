"""The hub's dispatcher in front of bench-hub's engine model, in virtual time: what waiting in the hub is worth."""

import heapq
from collections.abc import Callable
from itertools import count

from benchmarks.hub.engine_model import CACHE_TOKENS, MAX_RUNNING, EngineModel, ModelRequest
from benchmarks.hub.makespan import MAX_NEW_TOKENS, Turn, episodes
from services.inference_hub.dispatcher import Arrival, Dispatcher
from services.inference_hub.limits import CallLimit, EngineLoad
from services.inference_hub.routing import choose
from services.inference_hub.sessions import Sessions

REPORT_S = 2.0


class Clock:
    """Events in the order of their times."""

    def __init__(self) -> None:
        self.now = 0.0
        self._order = count()
        self._events: list[tuple[float, int, Callable[[], None]]] = []

    def at(self, when: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._events, (when, next(self._order), action))

    def run(self, until: Callable[[], bool]) -> None:
        while not until():
            self.now, _, action = heapq.heappop(self._events)
            action()


class Engine:
    """One model as the dispatcher sees it, stepped by the clock."""

    id = "e0"
    cache_tokens = CACHE_TOKENS

    def __init__(self, clock: Clock, answered: Callable[[ModelRequest], None]) -> None:
        self.model = EngineModel()
        self.limit = CallLimit()
        self.limit.reported(EngineLoad(max_running_requests=MAX_RUNNING))
        self.outstanding_tokens = self.outstanding_prompt_tokens = self.num_outstanding_calls = 0
        self._clock = clock
        self._answered = answered
        self._is_stepping = False

    def begin_call(self, *, prompt_tokens: int, cost_tokens: int) -> None:
        self.num_outstanding_calls += 1
        self.outstanding_prompt_tokens += prompt_tokens
        self.outstanding_tokens += cost_tokens

    def end_call(self, *, prompt_tokens: int, cost_tokens: int) -> None:
        self.num_outstanding_calls -= 1
        self.outstanding_prompt_tokens -= prompt_tokens
        self.outstanding_tokens -= cost_tokens

    def submit(self, request: ModelRequest) -> None:
        self.model.submit(request)
        if not self._is_stepping:
            self._is_stepping = True
            self.model.now = self._clock.now
            self._clock.at(self._clock.now, self._step)

    def _step(self) -> None:
        for request in self.model.advance(self.model.now + 1e-9):
            self._clock.at(self.model.now, lambda request=request: self._answered(request))
        if self.model.waiting or self.model.running:
            self._clock.at(self.model.now, self._step)
        else:
            self._is_stepping = False


class Run:
    """Plays episodes to their end, through a dispatcher or straight into the engine's own queue."""

    def __init__(self, plans: list[list[Turn]], *, is_late_binding: bool) -> None:
        self.clock = Clock()
        self.engine = Engine(self.clock, self._answered)
        self._plans = plans
        self._dispatcher: Dispatcher[Engine] | None = None
        if is_late_binding:
            self._dispatcher = Dispatcher(lambda: [self.engine], choose, Sessions(), clock=lambda: self.clock.now)
            self.clock.at(REPORT_S, self._report)
        self._numbers = count()
        self._calls: dict[ModelRequest, tuple[int, int, Arrival]] = {}
        self._num_ended = 0
        for episode in range(len(plans)):
            self._turn(episode, 0, 0)
        self.clock.run(until=lambda: self._num_ended == len(plans))

    def _turn(self, episode: int, index: int, known_tokens: int) -> None:
        turn = self._plans[episode][index]
        prompt_tokens = known_tokens + turn.added_tokens
        request = ModelRequest(episode, prompt_tokens, turn.output_tokens, MAX_NEW_TOKENS)
        call = Arrival(next(self._numbers), f"s{episode}", "", False, prompt_tokens, prompt_tokens + MAX_NEW_TOKENS)
        self._calls[request] = (episode, index, call)
        if self._dispatcher is None:
            self.engine.submit(request)
            return
        engine = self._dispatcher.arrive(call, lambda engine: engine.submit(request))
        if isinstance(engine, Engine):
            engine.submit(request)

    def _answered(self, request: ModelRequest) -> None:
        episode, index, call = self._calls.pop(request)
        if self._dispatcher is not None:
            self._dispatcher.answered(self.engine, call, request.output_tokens)
            self._dispatcher.done(self.engine, call)
        known_tokens = request.prompt_tokens + request.output_tokens
        then = self.clock.now + self._plans[episode][index].tool_s
        if index + 1 < len(self._plans[episode]):
            self.clock.at(then, lambda: self._turn(episode, index + 1, known_tokens))
        else:
            self.clock.at(then, lambda: self._end(episode))

    def _end(self, episode: int) -> None:
        self._num_ended += 1
        if self._dispatcher is not None:
            self._dispatcher.end_session(f"s{episode}")

    def _report(self) -> None:
        assert self._dispatcher is not None
        model = self.engine.model
        self.engine.limit.reported(
            EngineLoad(
                num_running_reqs=model.num_running,
                num_waiting_reqs=len(model.waiting),
                max_running_requests=MAX_RUNNING,
                token_usage=model.used_tokens / CACHE_TOKENS,
            )
        )
        self._dispatcher.look()
        self._dispatcher.engines_changed()
        self.clock.at(self.clock.now + REPORT_S, self._report)


def test_calls_that_wait_in_the_hub_find_their_prefixes_and_end_sooner():
    plans = episodes(256, seed=1)
    waiting_in_the_engine = Run(plans, is_late_binding=False)
    waiting_in_the_hub = Run(plans, is_late_binding=True)
    needed = sum(turn.added_tokens for plan in plans for turn in plan)
    assert waiting_in_the_hub.engine.model.prefilled_tokens < 1.5 * needed
    assert waiting_in_the_engine.engine.model.prefilled_tokens > 3 * needed
    assert waiting_in_the_hub.clock.now < 0.8 * waiting_in_the_engine.clock.now
