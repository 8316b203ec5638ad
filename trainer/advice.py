"""What would make a run faster or waste less, in words, from what its last updates measured. No clock, no Redis, no guess.

The throughput model. An update takes U seconds, of which training waits W for data, and learns C on its M GPUs. Engines were busy
for S GPU-seconds an update, on R GPUs. Learning and generating divide by their GPUs; what else the trainer does (weights,
checkpoints, evaluations: U - W - C) does not:

    T(M') = (U - W - C) + C · M / M'             seconds of training an update
    G(R') = S / R'                               seconds of generation an update
    U(R', M') = max(T, G) + (1 - min(1, α)) · min(T, G)

With α >= 1 the two overlap, with α = 0 they take turns. So U(R, M) is what the measured work takes if nobody waits for anything
else. Where training waits, GPUs can take away U(R, M) - T(M), and the rest, U - U(R, M), is latency: environments, stragglers, too
few episodes at once. Advice goes to the larger of the two. GPUs do not change latency, but Little's law says what does, episodes in
flight = rate · life: for updates of U(R, M) the rate has to rise by the factor U / U(R, M), and so have the episodes in flight, of
which admission allows (1 + α) · B groups. On engines with room in their batches generation is no bound to that, only T(M) is.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from trainer.pipeline import MASKED, NO_REWARD, Stretch

MIN_UPDATES = 5
"""Fewer say nothing: one slow batch would speak for all."""
NOTABLE_SHARE = 0.1
"""Of an update's time; below it waiting is noise."""
IDLE_SHARE = 0.2
"""Of the engines' time; with less, moving GPUs away from them gains little."""
LOW_UTILISATION = 0.25
"""Of GPU engines' limits. Below it they are not short of GPUs: a decoding step of few calls takes as long as one of many."""
MIN_GAIN = 0.05
"""Of an update's time; a smaller promise is not worth a restart."""
QUEUED_SHARE = 0.25
OVERHEAD_SHARE = 0.25
WASTED_SHARE = 0.05
FILTERED_SHARE = 0.3
FALLEN_BACK_SHARE = 0.25
MAX_TIMES = 99
"""More is said as this much: the measure is then noise divided by next to nothing."""
MAX_RATIO = 8
"""A higher α is not advised: at such lags the loss corrects for little."""


class Kind(StrEnum):
    """What a sentence is about. Those of one run differ, and at most one of them is a bottleneck's."""

    TO_ROLLOUTS = "to_rollouts"
    MORE_ENGINES = "more_engines"
    TO_TRAINING = "to_training"
    MORE_TRAINING = "more_training"
    HIGHER_RATIO = "higher_ratio"
    MORE_CONCURRENCY = "more_concurrency"
    FASTER_ENVIRONMENT = "faster_environment"
    FALLEN_BACK = "fallen_back"
    OVERHEAD = "overhead"
    STALE = "stale"
    NO_REWARD = "no_reward"
    FILTERED = "filtered"
    NOTHING = "nothing"


@dataclass(frozen=True)
class Advice:
    kind: Kind
    text: str


@dataclass(frozen=True)
class Setup:
    """What the run has to work with."""

    num_engines: int
    gpus_per_engine: int
    trainer_gpus: int
    """Ranks."""
    has_gpus: bool
    """False where engines and ranks share CPU cores, which the model's division of work does not describe."""
    async_generation_ratio: float
    on_stale: str
    max_concurrent_episodes: int | None
    """Of an environment in one agent process; None where environments differ."""

    @property
    def engine_gpus(self) -> int:
        return self.num_engines * self.gpus_per_engine

    @property
    def num_gpus(self) -> int:
        return self.engine_gpus + self.trainer_gpus


@dataclass(frozen=True)
class Throughput:
    """The model above, with its measured numbers: seconds of one update."""

    update_s: float
    wait_s: float
    train_s: float
    generating_gpu_s: float
    setup: Setup

    @classmethod
    def of(cls, stretch: Stretch, setup: Setup) -> "Throughput":
        n = stretch.num_updates
        return cls(
            update_s=stretch.update_s / n,
            wait_s=stretch.wait_s / n,
            train_s=stretch.train_s / n,
            generating_gpu_s=stretch.engines.busy_s * setup.gpus_per_engine / n,
            setup=setup,
        )

    @property
    def fixed_s(self) -> float:
        """What the trainer does besides learning and waiting."""
        return max(0.0, self.update_s - self.wait_s - self.train_s)

    def training_s(self, trainer_gpus: int) -> float:
        return self.fixed_s + self.train_s * self.setup.trainer_gpus / trainer_gpus

    def generating_s(self, engine_gpus: int) -> float:
        return self.generating_gpu_s / engine_gpus

    def update_with(self, engine_gpus: int) -> float:
        """Seconds of an update with so many of all GPUs for engines, and the others for training."""
        training_s, generating_s = self.training_s(self.setup.num_gpus - engine_gpus), self.generating_s(engine_gpus)
        in_turns = 1 - min(1.0, self.setup.async_generation_ratio)
        return max(training_s, generating_s) + in_turns * min(training_s, generating_s)

    @property
    def explained_s(self) -> float:
        """What the work alone takes on the GPUs as they are shared out."""
        return self.update_with(self.setup.engine_gpus)

    def best_engine_gpus(self) -> int:
        """The engines' GPUs with which an update is shortest, moving whole engines and as few as that takes."""
        setup = self.setup
        possible = range(setup.gpus_per_engine, setup.num_gpus, setup.gpus_per_engine)
        return min(possible, key=lambda gpus: (round(self.update_with(gpus), 9), abs(gpus - setup.engine_gpus)))


def advise(stretch: Stretch, setup: Setup) -> tuple[Advice, ...]:
    """What to change, the bottleneck first; nothing at all while too little is measured."""
    if stretch.num_updates < MIN_UPDATES or stretch.update_s <= 0:
        return ()
    bottleneck = _bottleneck(stretch, setup)
    found = [advice for advice in (bottleneck, *_losses(stretch, setup)) if advice is not None]
    if found:
        return tuple(found)
    if stretch.engines.idle_share is None:
        return ()
    return (
        Advice(
            Kind.NOTHING,
            f"nothing to change: training waits {stretch.wait_share:.0%} of the time for data, engines are idle "
            f"{stretch.engines.idle_share:.0%} of it",
        ),
    )


def _bottleneck(stretch: Stretch, setup: Setup) -> Advice | None:
    fallen_back = stretch.num_fallen_back / stretch.num_updates
    if fallen_back >= FALLEN_BACK_SHARE:
        return Advice(
            Kind.FALLEN_BACK,
            f"{fallen_back:.0%} of the updates were synchronous because the KL between behaviour and trained policy passed its "
            "threshold: lower trainer.learning_rate, or raise rollout.kl_fallback_threshold if rewards still rise",
        )
    if stretch.engines.idle_share is None or setup.num_engines == 0:
        return None
    throughput = Throughput.of(stretch, setup)
    if stretch.wait_share >= NOTABLE_SHARE:
        return _when_training_waits(stretch, setup, throughput)
    if stretch.engines.idle_share >= IDLE_SHARE:
        return _when_engines_idle(stretch, setup, throughput)
    return None


def _when_training_waits(stretch: Stretch, setup: Setup, throughput: Throughput) -> Advice | None:
    waits = f"training waits {stretch.wait_share:.0%} of the time for data"
    gained = _gained_by_overlap(throughput)
    if gained >= NOTABLE_SHARE:
        return Advice(
            Kind.HIGHER_RATIO,
            f"{waits}, because at rollout.async_generation_ratio: {setup.async_generation_ratio:g} generation and training take "
            f"turns: 1 lets them overlap, for updates up to {gained:.0%} shorter at a lag of one update",
        )
    training_s, explained_s = throughput.training_s(setup.trainer_gpus), throughput.explained_s
    if _have_room(stretch, setup):
        return _more_in_flight(waits, stretch, setup, factor=throughput.update_s / max(training_s, 1e-9))
    if explained_s - training_s >= throughput.update_s - explained_s:
        return _more_generation(waits, stretch, throughput)
    return _more_in_flight(waits, stretch, setup, factor=throughput.update_s / max(explained_s, 1e-9))


def _gained_by_overlap(throughput: Throughput) -> float:
    """The share of an update that α = 1 saves: in turns it takes training and waiting one after the other."""
    in_turns = max(0.0, 1 - throughput.setup.async_generation_ratio)
    work_s = throughput.update_s - throughput.wait_s
    return in_turns * min(work_s, throughput.wait_s) / throughput.update_s


def _have_room(stretch: Stretch, setup: Setup) -> bool:
    """Whether engines would run more calls in the same time."""
    utilisation = stretch.engines.utilisation
    return setup.has_gpus and utilisation is not None and utilisation < LOW_UTILISATION


def _more_generation(waits: str, stretch: Stretch, throughput: Throughput) -> Advice | None:
    setup = throughput.setup
    busy = f"{waits}, and the engines are busy {1 - (stretch.engines.idle_share or 0):.0%} of it"
    ready_at = throughput.training_s(setup.trainer_gpus)
    times = min(MAX_TIMES, throughput.generating_s(setup.engine_gpus) / max(ready_at, 1e-9))
    if times <= 1:
        return None
    if not setup.has_gpus:
        return Advice(Kind.MORE_ENGINES, f"{busy}: generation would have to be {times:.1f} times as fast to keep training busy")
    if moved := _moved(throughput, sign=1):
        return Advice(Kind.TO_ROLLOUTS, f"{busy}: give rollouts {moved}")
    more = math.ceil(setup.num_engines * times - 1e-9) - setup.num_engines
    return Advice(
        Kind.MORE_ENGINES, f"{busy}: {_counted(more, 'more engine')} would keep training busy; no GPU can be moved for it"
    )


def _when_engines_idle(stretch: Stretch, setup: Setup, throughput: Throughput) -> Advice | None:
    idle = f"engines are idle {stretch.engines.idle_share:.0%} of the time and training waits {stretch.wait_share:.0%} of it"
    overhead = throughput.fixed_s / throughput.update_s
    if overhead >= OVERHEAD_SHARE and overhead > throughput.train_s / throughput.update_s:
        return None  # Said by _losses: more GPUs make none of it shorter.
    if setup.has_gpus and (moved := _moved(throughput, sign=-1)):
        return Advice(Kind.TO_TRAINING, f"{idle}: give training {moved}")
    times = min(MAX_TIMES, throughput.training_s(setup.trainer_gpus) / max(throughput.generating_s(setup.engine_gpus), 1e-9))
    if times <= 1 + MIN_GAIN:
        return None
    return Advice(Kind.MORE_TRAINING, f"{idle}: training would have to be {times:.1f} times as fast to keep them busy")


def _moved(throughput: Throughput, *, sign: int) -> str:
    """The move of GPUs to engines (sign 1) or away from them (-1) that the model promises something of; "" if there is none."""
    setup = throughput.setup
    best = throughput.best_engine_gpus()
    num_moved = sign * (best - setup.engine_gpus)
    now_s, then_s = throughput.explained_s, throughput.update_with(best)
    if num_moved <= 0 or then_s > (1 - MIN_GAIN) * now_s:
        return ""
    return (
        f"{num_moved} more of the {setup.num_gpus} GPUs ({best} for engines and {setup.num_gpus - best} for training, instead of "
        f"{setup.engine_gpus} and {setup.trainer_gpus}); an update's work then takes {then_s:.1f} s instead of {now_s:.1f} s"
    )


def _more_in_flight(waits: str, stretch: Stretch, setup: Setup, *, factor: float) -> Advice:
    """Latency holds training up: `factor` times as many episodes at once, by Little's law."""
    shares = stretch.episode_shares
    waits += f" while engines are idle {stretch.engines.idle_share:.0%} of it"
    if stretch.engines.utilisation is not None:
        waits += f" and use {stretch.engines.utilisation:.0%} of what they can hold"
    if shares.get("queued", 0.0) >= QUEUED_SHARE:
        limit = setup.max_concurrent_episodes
        now = f" from {limit} to {math.ceil(limit * factor)}" if limit else f" to {factor:.1f} times as many"
        return Advice(
            Kind.MORE_CONCURRENCY,
            f"{waits}, and episodes spend {shares['queued']:.0%} of their life queued: raise limits.max_concurrent_episodes{now}, "
            "with as many places on the environments' servers, or start more agent processes",
        )
    name, share = max(shares.items(), key=lambda item: item[1], default=("generating", 0.0))
    where = "waiting for " + {"environment": "the environment", "reward": "rewards"}.get(name, "generation")
    spent = f", and episodes spend {share:.0%} of their life {where}" if share else ""
    ratio = math.ceil((1 + setup.async_generation_ratio) * factor - 1 - 1e-9)
    if ratio > MAX_RATIO or ratio <= setup.async_generation_ratio:
        faster = {"environment": "the environment", "reward": "the reward"}.get(name, "the longest episodes")
        return Advice(
            Kind.FASTER_ENVIRONMENT, f"{waits}{spent}: only {factor:.1f} times as many at once would do, so make {faster} faster"
        )
    return Advice(
        Kind.HIGHER_RATIO,
        f"{waits}{spent}: raise rollout.async_generation_ratio from {setup.async_generation_ratio:g} to {ratio}, which lets "
        f"{(1 + ratio) / (1 + setup.async_generation_ratio):.1f} times as many run at once",
    )


def _losses(stretch: Stretch, setup: Setup) -> Sequence[Advice]:
    """What is thrown away, whatever the bottleneck."""
    found = []
    overhead = (stretch.update_s - stretch.wait_s - stretch.train_s) / stretch.update_s
    if overhead >= OVERHEAD_SHARE:
        found.append(
            Advice(
                Kind.OVERHEAD,
                f"the trainer spends {overhead:.0%} of the time on weight pushes, checkpoints and evaluations: do them less often "
                "(trainer.checkpoint.every_updates, trainer.evaluation.every_updates)",
            )
        )
    shares = stretch.discarded_token_shares
    stale = shares.get("stale", 0.0) + shares.get(MASKED, 0.0)
    if stale >= WASTED_SHARE:
        # Not a lower α: with less time to finish in, more is stale (bench-async, α = 1, 2 and 4), until at 0 nothing runs ahead.
        remedy = {
            "wait": "raise rollout.stale_wait_s, so that training waits for the slowest",
            "mask": "set rollout.on_stale: wait, which loses none of them, but waits for the slowest",
        }.get(
            setup.on_stale,
            "set rollout.on_stale: mask, which trains on what is young enough in them, or wait, which loses none of them but waits "
            "for the slowest",
        )
        found.append(Advice(Kind.STALE, f"{stale:.0%} of the sampled tokens are discarded or masked as stale: {remedy}"))
    unrewarded = shares.get("failed", 0.0) + shares.get(NO_REWARD, 0.0)
    if unrewarded >= WASTED_SHARE:
        found.append(
            Advice(
                Kind.NO_REWARD,
                f"{unrewarded:.0%} of the sampled tokens are of episodes that environment errors and deadlines left without a "
                "reward: see last_problem in GET /environments of the agents",
            )
        )
    filtered = sum(share for reason, share in shares.items() if reason.startswith("filtered:"))
    if filtered >= FILTERED_SHARE:
        found.append(
            Advice(
                Kind.FILTERED,
                f"{filtered:.0%} of the sampled tokens are of groups that rollout.group_filters discard: give the run tasks that "
                "are neither always solved nor never",
            )
        )
    return found


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
