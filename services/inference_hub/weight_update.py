"""One weight update: what it is about, how far it got, and what its steps took."""

import asyncio
import time
import uuid
from dataclasses import dataclass
from typing import Final, Literal

from services.inference_hub.engine_requests import OPENS_SESSION
from services.inference_hub.engines import Engine, WeightsInForce
from services.inference_hub.update_state import UpdateProgress
from services.inference_hub.update_store import UpdateRecord
from services.inference_hub.weight_groups import WeightGroup
from shared.errors import EngineError

UNTOUCHED: Final = "Failed to get weights iterator"
"""How SGLang's answer begins when it found nothing at a path."""

PauseMode = Literal["in_place", "retract"]


@dataclass(frozen=True)
class UpdateTimes:
    """What a committed update took, in seconds."""

    pause_s: float
    """From the first pause sent to the last continue answered."""
    pause_call_s: float
    """Until every engine stood still: each ends the step it is in, and so generates for most of it."""
    load_s: float
    """From then to the last closed session; the trainer's broadcasts are in it."""
    verify_s: float
    """Checksums; 0 if none were asked for."""
    resume_s: float


@dataclass(frozen=True)
class Outcome:
    """How a committed update ended."""

    version: int
    times: UpdateTimes
    engine_urls: tuple[str, ...]
    """Those that hold the new weights."""
    left_out: dict[str, str]
    """Engine URL → why it was left out on the way."""
    is_verified: bool
    """Checksums were compared."""


@dataclass
class Clock:
    """Readings of one monotonic clock as the update passes its steps."""

    began_at: float = 0.0
    paused_at: float = 0.0
    loaded_at: float = 0.0
    verified_at: float = 0.0
    resumed_at: float = 0.0

    def times(self) -> UpdateTimes:
        return UpdateTimes(
            pause_s=self.resumed_at - self.began_at,
            pause_call_s=self.paused_at - self.began_at,
            load_s=self.loaded_at - self.paused_at,
            verify_s=self.verified_at - self.loaded_at,
            resume_s=self.resumed_at - self.verified_at,
        )


class WeightUpdate:
    """`engines` are those that still take part; `left_out` has the others, by URL, with the reason."""

    def __init__(self, group: WeightGroup, version: int, mode: PauseMode, *, is_rolling: bool, timeout_s: float) -> None:
        self.id = uuid.uuid4().hex
        self.group = group
        self.engines: list[Engine] = group.engines
        self.left_out: dict[str, str] = {}
        self.refusers: dict[str, str] = {}
        """Engine id → its words, of those that received weights and could not load them."""
        self.incomplete_before: frozenset[str] = frozenset()
        """Ids of engines that held part of another set when this one came."""
        self.calls: list[asyncio.Task[tuple[Engine, EngineError | None]]] = []
        """The engines' calls of the step under way, or of the one that failed."""
        self.preparing: asyncio.Task[None] | None = None
        """Has the engines stand still."""
        self.version = version
        self.mode = mode
        self.is_rolling = is_rolling
        self.has_session = OPENS_SESSION[group.master.transport]
        self.progress = UpdateProgress(self.id, timeout_s=timeout_s, now=time.monotonic())
        self.clock = Clock()

    @property
    def weights(self) -> WeightsInForce:
        return WeightsInForce(self.version, self.group.epoch)

    @property
    def record(self) -> UpdateRecord:
        return UpdateRecord(
            id=self.id,
            version=self.version,
            epoch=self.group.epoch,
            state=self.progress.state,
            engine_urls=tuple(engine.url for engine in self.group.engines),
            deadline_unix_s=time.time() + self.progress.remaining_s(time.monotonic()),
            failure=self.progress.failure,
        )

    async def prepared(self) -> None:
        """Returns when its engines stand still with open sessions, or it has failed."""
        if self.preparing is not None:
            await asyncio.wait((self.preparing,))

    def is_untouched(self, engine: Engine) -> bool:
        """It found none of the set, and holds the whole one that it held."""
        return UNTOUCHED in self.refusers.get(engine.id, "") and engine.id not in self.incomplete_before

    def leave_out(self, engine: Engine, problem: str) -> None:
        self.engines = [other for other in self.engines if other is not engine]
        self.left_out[engine.url] = problem
