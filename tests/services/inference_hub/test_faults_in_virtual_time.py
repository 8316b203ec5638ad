"""The hub's own registry, prober, gate, dispatcher and generate endpoint over engines that do anything at any time.

Only HTTP, Redis and the clock are not real.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, cast

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.asynchrony import virtual_time
from services.inference_hub.access import Access
from services.inference_hub.engine_client import EngineClient, EngineTimeoutError, EngineUnreachableError, ModelInfo, ServerInfo
from services.inference_hub.engines import Engine, EngineRegistry, WeightsInForce
from services.inference_hub.gate import Gate
from services.inference_hub.generate import GenerateEndpoint
from services.inference_hub.limits import EngineLoad
from services.inference_hub.metrics import Metrics
from services.inference_hub.probes import Prober
from services.inference_hub.waiting import WaitingCalls
from shared.errors import EngineError
from shared.hub_tokens import HubTokens
from shared.keys import Keys

EPOCH = "epoch"
STEP_S = 0.5
HANG_TIMEOUT_S = 60.0
MAX_RUNNING = 3
VOCABULARY = 10**6


@dataclass(frozen=True)
class Act:
    """What an engine does with one attempt, after some seconds."""

    kind: str = "finish"
    seconds: float = 1.0
    num_tokens: int = 0


class ScriptedEngine:
    """In place of an engine's HTTP client. Its policy counts, so that any continuation of a prompt is known."""

    url = "http://engine"

    def __init__(self, running: set[int]) -> None:
        """Args: running: calls that any engine works on, by the first token of their prompts."""
        self.running = running
        self.version = 0
        self.acts: deque[Act] = deque()
        self.is_dead = False
        self.is_paused = False
        self.is_stopped = False
        """Its scheduler makes no step, and its HTTP process answers."""
        self.aborted: set[str] = set()
        self.left: set[str] = set()
        """Requests whose hub went away."""
        self.rids: list[str] = []
        self._changed = asyncio.Event()
        self._cuts: set[asyncio.Future[None]] = set()
        self._last_step = 0.0

    def change(self, **state: bool) -> None:
        self._last_step = self._step()
        for name, value in state.items():
            setattr(self, name, value)
        if self.is_dead:
            self._cut_all()
        self._changed.set()
        self._changed = asyncio.Event()

    async def generate(self, body: bytes) -> tuple[int, bytes]:
        self._require_life()
        request = msgspec.json.decode(body)
        self.rids.append(request["rid"])
        act = self.acts.popleft() if self.acts else Act()
        cut: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._cuts.add(cut)
        call = request["input_ids"][0]
        assert call not in self.running, "a call runs in one engine at a time"
        self.running.add(call)
        try:
            await self._work(cut, act.seconds)
        except asyncio.CancelledError:
            self.left.add(request["rid"])
            raise
        finally:
            self._cuts.discard(cut)
            self.running.discard(call)
        match act.kind:
            case "cut":
                raise EngineError("cut")
            case "error":
                return 500, b"oops"
            case "garbage":
                return 200, b"?"
        left = request["sampling_params"]["max_new_tokens"]
        return 200, self._answer(request, min(act.num_tokens, left) if act.kind == "abort" else left, act.kind)

    async def _work(self, cut: asyncio.Future[None], seconds: float) -> None:
        """Returns when it has worked for so long. Raises: EngineError when it is cut."""
        while seconds > 0 or self.is_paused or self.is_stopped:
            if self.is_paused or self.is_stopped:
                changed = asyncio.ensure_future(self._changed.wait())
                await asyncio.wait((cut, changed), return_when=asyncio.FIRST_COMPLETED)
                changed.cancel()
            else:
                await asyncio.wait((cut,), timeout=min(STEP_S, seconds))
                seconds -= STEP_S
            if cut.done():
                raise EngineError("lost the connection")

    def _answer(self, request: dict[str, Any], length: int, kind: str) -> bytes:
        ids = [request["input_ids"][-1] + 1 + index for index in range(length)]
        meta_info = {
            "finish_reason": {"type": "abort" if kind == "abort" else "length"},
            "completion_tokens": length,
            "output_token_logprobs": [[-token / 1000, token, None] for token in ids],
            "weight_versions": [{"version": str(self.version), "start": 0, "end": length}] if ids else [],
        }
        return msgspec.json.encode({"output_ids": ids, "meta_info": meta_info})

    def close_old(self) -> None:
        """Has no connections."""

    async def abort(self, rid: str) -> None:
        self.aborted.add(rid)

    async def close(self) -> None:
        self._cut_all()

    async def model_info(self, *, timeout_s: float) -> ModelInfo:
        self._require_life()
        return ModelInfo(str(self.version))

    async def server_info(self, *, timeout_s: float) -> ServerInfo:
        self._require_life()
        if self.is_stopped:
            await asyncio.sleep(timeout_s)
            raise EngineTimeoutError("no answer")
        return ServerInfo("0.5.23")

    async def context_tokens(self, *, timeout_s: float) -> int | None:
        return None

    async def vocabulary(self, *, timeout_s: float) -> int | None:
        self._require_life()
        if self.is_paused or self.is_stopped:
            await asyncio.sleep(timeout_s)
            raise EngineTimeoutError("no answer")
        return VOCABULARY

    async def is_ready(self, *, timeout_s: float) -> bool:
        return not self.is_paused

    async def post(self, path: str, payload: object, *, timeout_s: float) -> bytes:
        assert path == "continue_generation"
        return b""

    async def load(self, *, timeout_s: float) -> EngineLoad:
        self._require_life()
        return EngineLoad(max_running_requests=MAX_RUNNING, timestamp=1.0 + self._step())

    def _step(self) -> float:
        is_working = not (self.is_dead or self.is_paused or self.is_stopped)
        return asyncio.get_running_loop().time() if is_working else self._last_step

    def _require_life(self) -> None:
        if self.is_dead:
            raise EngineUnreachableError("dead")

    def _cut_all(self) -> None:
        for cut in self._cuts:
            if not cut.done():
                cut.set_result(None)


@dataclass
class World:
    """A hub with such engines."""

    num_engines: int
    tasks: asyncio.TaskGroup
    segment_tokens: int | None = None
    scripts: list[ScriptedEngine] = field(default_factory=list)

    def __post_init__(self) -> None:
        clock = asyncio.get_running_loop().time
        gate: Gate = Gate(clock)
        waiting: WaitingCalls[Engine] = WaitingCalls()
        self.registry = EngineRegistry(cast(Any, None), Keys("run"), gate)
        self.registry.in_force = WeightsInForce(0, EPOCH)
        metrics = Metrics(self.registry, gate, waiting)
        self.gate, self.waiting, self.metrics = gate, waiting, metrics
        self.endpoint = GenerateEndpoint(
            self.registry,
            gate,
            waiting,
            metrics,
            Access(HubTokens(None, None)),
            self.tasks,
            timeout_s=1e6,
            max_attempts=10**6,
            max_waiting_calls=10**6,
            max_body_bytes=10**6,
            segment_tokens=self.segment_tokens,
            strategy_name="affinity",
            clock=clock,
        )
        self.prober = Prober(
            self.registry,
            metrics,
            interval_s=2.0,
            hang_timeout_s=HANG_TIMEOUT_S,
            engine_version="any",
            model_type=None,
            clock=clock,
        )
        self.background = [self.tasks.create_task(self.endpoint.watch())]
        running: set[int] = set()
        for index in range(self.num_engines):
            script = ScriptedEngine(running)
            engine = Engine(f"e{index}", script.url, cast(EngineClient, script), synced_epoch=EPOCH)
            self.scripts.append(script)
            self.registry.by_id[engine.id] = engine
            self.background.append(self.tasks.create_task(self.prober.watch(engine)))

    @property
    def engines(self) -> list[Engine]:
        return list(self.registry.by_id.values())

    def call(self, prompt: list[int], length: int, **headers: str) -> asyncio.Task[Any]:
        body = {"input_ids": prompt, "sampling_params": {"max_new_tokens": length}}
        named = {name.replace("_", "-").encode(): value.encode() for name, value in headers.items()}
        return self.tasks.create_task(self.endpoint.answer(msgspec.json.encode(body), named))

    def begin_update(self) -> None:
        for engine, script in zip(self.engines, self.scripts, strict=True):
            if engine.is_live:
                engine.is_updating = True
                script.change(is_paused=True)
        self.registry.refresh()

    def end_update(self) -> None:
        """Every engine has the next version; those that no update reached are brought up with it."""
        version = self.registry.in_force.version + 1
        self.registry.in_force = WeightsInForce(version, EPOCH)
        for engine, script in zip(self.engines, self.scripts, strict=True):
            script.version = engine.version = version
            engine.is_updating = False
            script.change(is_paused=False)
        self.registry.refresh()

    def heal(self) -> None:
        for script in self.scripts:
            script.acts.clear()
            script.change(is_dead=False, is_stopped=False, is_paused=False)
        for engine in self.engines:
            engine.is_updating = False
        self.registry.refresh()

    def stop(self) -> None:
        for task in self.background:
            task.cancel()


def in_world(num_engines: int, play: Callable[[World], Any], **options: Any) -> Any:
    async def main() -> Any:
        async with asyncio.TaskGroup() as tasks:
            world = World(num_engines, tasks, **options)
            await asyncio.sleep(5)
            try:
                return await play(world)
            finally:
                world.stop()

    return virtual_time.run(main())


def tokens_of(reply: Any) -> list[int]:
    assert reply.status == 200, reply.body
    return msgspec.json.decode(reply.body)["output_ids"]


def counted(prompt: list[int], length: int) -> list[int]:
    return [prompt[-1] + 1 + index for index in range(length)]


def test_a_call_in_an_engine_that_hangs_is_answered_by_another_within_the_deadline():
    async def play(world: World) -> tuple[list[int], float, str]:
        world.scripts[0].acts.append(Act(seconds=30))
        world.scripts[1].acts.append(Act(seconds=30))
        call = world.call([5], 3)
        await asyncio.sleep(1)
        hanging = next(index for index, engine in enumerate(world.engines) if engine.num_outstanding_calls)
        world.scripts[1 - hanging].acts.clear()
        world.scripts[hanging].change(is_stopped=True)
        since = asyncio.get_running_loop().time()
        reply = await call
        taken_s = asyncio.get_running_loop().time() - since
        return tokens_of(reply), taken_s, world.engines[hanging].problem or ""

    tokens, taken_s, problem = in_world(2, play)
    assert tokens == [6, 7, 8]
    assert HANG_TIMEOUT_S <= taken_s <= HANG_TIMEOUT_S + 5
    assert "must make progress within 60 s while it has calls (inference_hub.hang_timeout_s)" in problem


def test_an_engine_that_went_on_after_it_was_taken_out_is_ready_again():
    async def play(world: World) -> bool:
        world.scripts[0].acts.append(Act(seconds=30))
        call = world.call([5], 3)
        await asyncio.sleep(1)
        world.scripts[0].change(is_stopped=True)
        await asyncio.sleep(HANG_TIMEOUT_S + 10)
        was_out = not world.registry.routable
        world.scripts[0].change(is_stopped=False)
        return was_out and tokens_of(await call) == [6, 7, 8]

    assert in_world(1, play)


@pytest.mark.parametrize("reason", ["a long prefill", "an update", "an operator's pause"])
def test_an_engine_that_is_slow_or_paused_does_not_hang(reason: str):
    """Ten times as long as the deadline, and the call stays where it is."""

    async def play(world: World) -> tuple[list[int], int]:
        seconds = 10 * HANG_TIMEOUT_S
        world.scripts[0].acts.append(Act(seconds=seconds if reason == "a long prefill" else 10))
        call = world.call([5], 3)
        await asyncio.sleep(1)
        if reason == "an update":
            world.begin_update()
        elif reason == "an operator's pause":
            world.scripts[0].change(is_paused=True)
        await asyncio.sleep(seconds)
        if reason == "an update":
            world.end_update()
        world.scripts[0].change(is_paused=False)
        return tokens_of(await call), len(world.scripts[0].rids)

    assert in_world(1, play) == ([6, 7, 8], 1)


def test_calls_held_by_an_update_go_in_order_and_are_counted_as_held():
    async def play(world: World) -> tuple[list[int], float | None]:
        world.begin_update()
        order: list[int] = []
        calls = {
            "new": world.call([100], 1, x_session_id="s1"),
            "other": world.call([200], 1, x_session_id="s2"),
            "validation": world.call([300], 1, x_session_id="s3", x_purpose="validation"),
        }
        for name, call in calls.items():
            call.add_done_callback(lambda _, name=name: order.append(name))
        await asyncio.sleep(20)
        world.engines[0].limit.reported(EngineLoad(max_running_requests=1))
        world.end_update()
        await asyncio.gather(*calls.values())
        held_s = world.metrics.collectors.get_sample_value("headrace_hub_hold_seconds_sum", {"environment": ""})
        return order, held_s

    order, held_s = in_world(1, play)
    assert order == ["validation", "new", "other"]
    assert held_s == pytest.approx(3 * 20)


acts = st.builds(
    Act,
    st.sampled_from(["finish", "abort", "cut", "error", "garbage"]),
    st.sampled_from([0.05, 0.5, 3.0, 40.0]),
    st.integers(0, 5),
)
events = st.tuples(
    st.sampled_from([0.0, 0.05, 1.0, 30.0]),
    st.sampled_from(["call", "call", "call", "leave", "die", "live", "stop", "go on", "begin update", "end update", "lose"]),
    st.integers(0, 7),
)


@settings(max_examples=300)
@given(
    st.integers(1, 3),
    st.lists(acts, max_size=15),
    st.lists(events, max_size=40),
    st.sampled_from([None, 2]),
)
def test_no_call_is_lost_answered_twice_or_with_another_tokens_whatever_fails_when(num_engines, script, history, segment_tokens):
    """Each call is answered once with exactly its tokens, or its caller left and its request was aborted; no place leaks."""

    async def play(world: World) -> None:
        calls: list[tuple[int, asyncio.Task[Any]]] = []
        for index, act in enumerate(script):
            world.scripts[index % num_engines].acts.append(act)
        for seconds, kind, index in history:
            if seconds:  # Else nothing else runs before it.
                await asyncio.sleep(seconds)
            engine, machine = world.engines[index % num_engines], world.scripts[index % num_engines]
            match kind:
                case "call":
                    length = 1 + index
                    prompt = [10_000 * (1 + len(calls))]
                    calls.append((length, world.call(prompt, length, x_session_id=f"s{index}", x_environment="ab"[index % 2])))
                case "leave" if calls:
                    calls[index % len(calls)][1].cancel()
                case "die" | "live":
                    machine.change(is_dead=kind == "die")
                case "stop" | "go on":
                    machine.change(is_stopped=kind == "stop")
                case "begin update":
                    world.begin_update()
                case "end update":
                    world.end_update()
                case "lose":
                    await world.registry.lose(engine, "it is lost")
        world.heal()
        async with asyncio.timeout(10_000):
            await asyncio.wait([task for _, task in calls] or [asyncio.create_task(asyncio.sleep(0))])
        await asyncio.sleep(60)
        for number, (length, task) in enumerate(calls):
            if task.cancelled():
                continue
            answer = msgspec.json.decode(task.result().body)
            assert task.result().status == 200, answer
            assert answer["output_ids"] == counted([10_000 * (1 + number)], length)
            assert [entry[1] for entry in answer["meta_info"]["output_token_logprobs"]] == answer["output_ids"]
            spans = answer["meta_info"]["weight_versions"]
            assert [span["start"] for span in spans] == [0, *(span["end"] for span in spans[:-1])]
            assert spans[-1]["end"] == length
        for machine in world.scripts:
            assert machine.left <= machine.aborted
        assert {engine.request_limits.vocabulary for engine in world.registry.routable} <= {VOCABULARY}
        assert not len(world.waiting)
        assert world.endpoint.num_calls == 0
        assert all(
            engine.num_outstanding_calls == engine.outstanding_tokens == engine.outstanding_prompt_tokens == 0
            for engine in world.engines
        )

    in_world(num_engines, play, segment_tokens=segment_tokens)
