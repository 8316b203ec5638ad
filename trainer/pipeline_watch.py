"""Measures the pipeline from update to update on rank 0, and says what would help: on the console, in Redis, at the end."""

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping

from shared.configuration import Configuration
from shared.errors import EngineError, WeightUpdateError
from shared.ledger import Books
from shared.pipeline import PipelineReport
from shared.trajectory import Timings
from shared.versions import max_lag
from trainer.advice import Setup, advise
from trainer.pipeline import EngineReading, EngineSeconds, Stretch, engine_seconds, rise

WINDOW = 20
"""Updates that a report is of."""
SAID_EVERY = 10
"""Updates between two words of advice on the console."""


class PipelineWatch:
    """BEGUN by the first wait for data, then `measure` and `report` once an update.

    The first 1 + ⌈α⌉ updates of a process are measured and not reported: their episodes began before it trained, and the pipeline
    fills meanwhile.
    """

    def __init__(
        self,
        configuration: Configuration,
        *,
        usage: Callable[[], list[EngineReading]],
        num_ranks: int,
        publish: Callable[[PipelineReport], None],
        note: Callable[[str], None],
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Args: usage: the hub's counters now. publish, note: get every report, and now and then its words."""
        self._configuration = configuration
        self._usage = usage
        self._num_ranks = num_ranks
        self._publish = publish
        self._note = note
        self._clock = clock
        self._since: float | None = None
        self._engines: list[EngineReading] = []
        self._discarded_tokens: Mapping[str, int] | None = None
        self._num_measured = 0
        self._window: deque[Stretch] = deque(maxlen=WINDOW)
        self._whole = Stretch()
        self._books: Books | None = None

    def begin(self) -> None:
        """The first update begins; later calls change nothing."""
        if self._since is None:
            self._since = self._clock()
            self._engines = self._read_engines() or []

    def measure(
        self,
        books: Books,
        *,
        wait_s: float,
        train_s: float,
        timings: Iterable[Timings],
        trained_tokens: int,
        unused_tokens: Mapping[str, int],
    ) -> Stretch:
        """The update that ends now. Args: books: after its publication. timings: of the episodes that it trained."""
        assert self._since is not None
        now, engines = self._clock(), self._read_engines()
        timings = list(timings)
        lost_before = books.discarded_tokens if self._discarded_tokens is None else self._discarded_tokens
        stretch = Stretch(
            num_updates=1,
            update_s=now - self._since,
            wait_s=wait_s,
            train_s=train_s,
            engines=EngineSeconds() if engines is None else engine_seconds(self._engines, engines),
            num_episodes=len(timings),
            timings=Timings(
                sum(item.queued_s for item in timings),
                sum(item.generating_s for item in timings),
                sum(item.environment_s for item in timings),
                sum(item.reward_s for item in timings),
            ),
            trained_tokens=trained_tokens,
            discarded_tokens=rise(lost_before, books.discarded_tokens) | dict(unused_tokens),
            num_fallen_back=int(books.ratio_in_force < books.async_generation_ratio),
        )
        self._since = now
        self._discarded_tokens = books.discarded_tokens
        self._engines = self._engines if engines is None else engines
        return stretch

    def report(self, stretch: Stretch, books: Books) -> None:
        """Publishes what the newest updates measured together, `stretch` the newest; every few updates in words too."""
        self._num_measured += 1
        if self._num_measured <= 1 + max_lag(books.async_generation_ratio):
            return
        self._books = books
        self._window.append(stretch)
        self._whole += stretch
        report = self._report_of(sum(self._window, Stretch()), books)
        self._publish(report)
        if books.version % SAID_EVERY == 0:
            self._say(report)

    def summarise(self) -> None:
        """The same about all updates of this process, in words, when training ends."""
        if self._books is None:
            return
        report = self._report_of(self._whole, self._books)
        discarded = sum(report.discarded_token_shares.values())
        idle = "unknown" if report.engine_idle_share is None else f"{report.engine_idle_share:.0%}"
        self._note(
            f"{report.updates} updates of {report.update_s:.1f} s: training waited {report.wait_share:.0%} of the time for data, "
            f"engines were idle {idle}, {discarded:.1%} of the sampled tokens were discarded"
        )
        self._say(report)

    def _say(self, report: PipelineReport) -> None:
        for sentence in report.advice:
            self._note(f"advice: {sentence}")

    def _read_engines(self) -> list[EngineReading] | None:
        """None if the hub cannot tell: a measure is no reason to stop training."""
        try:
            return self._usage()
        except (EngineError, WeightUpdateError):
            return None

    def _report_of(self, stretch: Stretch, books: Books) -> PipelineReport:
        return PipelineReport(
            version=books.version,
            time=time.time(),
            updates=stretch.num_updates,
            update_s=stretch.update_s / stretch.num_updates,
            wait_share=stretch.wait_share,
            trainer_idle_share=stretch.trainer_idle_share,
            engine_idle_share=stretch.engines.idle_share,
            engine_utilisation=stretch.engines.utilisation,
            episode_shares=stretch.episode_shares,
            discarded_token_shares=stretch.discarded_token_shares,
            advice=tuple(advice.text for advice in advise(stretch, self._setup(books))),
        )

    def _setup(self, books: Books) -> Setup:
        configuration = self._configuration
        used = [engine for engine in self._engines if engine.ready_s > 0]
        bounds = {spec.limits.max_concurrent_episodes for spec in configuration.env_agents.environments}
        return Setup(
            num_engines=len(used),
            gpus_per_engine=max((engine.tensor_parallel_size for engine in used), default=1),
            trainer_gpus=self._num_ranks,
            has_gpus=configuration.engines.device == "cuda",
            async_generation_ratio=books.async_generation_ratio,
            on_stale=configuration.rollout.on_stale,
            max_concurrent_episodes=bounds.pop() if len(bounds) == 1 else None,
        )
