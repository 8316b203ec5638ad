"""One rank of the trainer around a real Redis, with a clock on DeepSpeed's part of an update."""

import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import redis
import redis.asyncio

from benchmarks.trainer import workload
from shared.configuration import Configuration, RolloutSection, RunSection, TrainerSection
from shared.keys import Keys
from shared.ledger import AdmissionLedger, GroupRecord, TrainingLedger
from shared.stream import TrajectoryConsumer
from shared.trajectory import Outcome, Timings, Trajectory
from shared.versions import VersionSpan
from trainer.assembly import Selection
from trainer.batching import BatchPlan, entry_ids
from trainer.lead import plan_batch
from trainer.learner import Learner
from trainer.model import build_engine, load_policy, start_ranks
from trainer.rollouts import RolloutReader

LEASE_MS = 600_000


class Clock:
    """Seconds spent in what it is put around."""

    def __init__(self) -> None:
        self.seconds = 0.0

    @contextmanager
    def running(self) -> Iterator[None]:
        started = time.perf_counter()
        try:
            yield
        finally:
            self.seconds += time.perf_counter() - started

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any, **named: Any) -> Any:
            with self.running():
                return function(*arguments, **named)

        return timed


class Update:
    """EMPTY → `fill_the_stream` → `run` → EMPTY, one version later."""

    def __init__(
        self, model_path: Path, *, redis_url: str, num_episodes: int, max_tokens: int, gradient_checkpointing: bool
    ) -> None:
        num_groups = num_episodes // workload.GROUP_SIZE
        self._configuration = Configuration(
            run=RunSection(id=f"bench-{uuid.uuid4().hex[:8]}", directory=str(model_path.parent), model_path=str(model_path)),
            rollout=RolloutSection(
                rollout_batch_size=num_groups,
                num_return_sequences_in_group=workload.GROUP_SIZE,
                async_generation_ratio=0.0,
            ),
            trainer=TrainerSection(
                num_updates=10**6,
                dtype="float32",
                ppo_max_token_len_per_gpu=max_tokens,
                gradient_checkpointing=gradient_checkpointing,
                max_logprob_mismatch=100.0,
            ),
        )
        start_ranks(timeout=timedelta(minutes=10))
        trainer = self._configuration.trainer
        policy = load_policy(model_path, trainer)
        self._cost = policy.sequence_cost()
        self._engine = build_engine(policy, trainer)
        self._learner = Learner(self._engine, trainer, seed=0, reference=None)
        self._keys = Keys(self._configuration.run.id)
        self._redis_url = redis_url
        client = redis.Redis.from_url(redis_url)
        self._ledger = TrainingLedger(client, self._keys)
        self._ledger.create_consumer_group()
        self._ledger.restore(0)
        self._consumer = TrajectoryConsumer(client, self._keys, self._ledger)
        self._reader = RolloutReader(self._consumer, self._ledger, self._configuration.rollout, timeout_s=60)
        self._version = 0
        self._tokens = workload.tokens_of(num_episodes, policy.causal_lm.config.vocab_size)
        self._rewards = workload.rewards(num_episodes)
        self._deepspeed = Clock()
        self._engine.backward = self._deepspeed.around(self._engine.backward)
        self._engine.step = self._deepspeed.around(self._engine.step)
        policy.forward = self._deepspeed.around(policy.forward)
        self._num_forwarded = 0
        policy.causal_lm.base_model.register_forward_pre_hook(self._count, with_kwargs=True)

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self._tokens))

    async def fill_the_stream(self) -> None:
        """The episodes of one batch, finished by agents."""
        async with redis.asyncio.Redis.from_url(self._redis_url) as client:
            ledger = AdmissionLedger(client, self._keys)
            num_groups = self._configuration.rollout.rollout_batch_size
            await ledger.configure(async_generation_ratio=0.0, batch_groups=num_groups)
            for start in range(0, len(self._tokens), workload.GROUP_SIZE):
                group = await ledger.admit(
                    group_id=uuid.uuid4().hex, environment="bench", group_size=workload.GROUP_SIZE, owner="bench", lease_ms=LEASE_MS
                )
                assert group is not None, "the batch before is published"
                for index in range(workload.GROUP_SIZE):
                    await ledger.finish(self._episode(group, index, start + index))

    def run(self) -> dict[str, float]:
        """Seconds of one update, and what share of it and of its tokens was for nothing."""
        self._deepspeed.seconds, self._num_forwarded = 0.0, 0
        started, cpu_started = time.perf_counter(), time.process_time()
        selection = self._reader.next_batch(self._version, progress=lambda *_: None, is_stopped=lambda: False)
        assert selection is not None
        plan = self._plan(selection, num_ranks=1)
        wanted = entry_ids(plan.shares[0])
        self._learner.learn(plan, dict(zip(wanted, self._consumer.fetch(wanted), strict=True)))
        self._version += 1
        self._ledger.publish(self._version, [group.group_id for group in selection.batch])
        self._reader.give_up_stale(self._version)
        self._ledger.acknowledge(self._version)
        seconds = time.perf_counter() - started
        needed = sum(len(episode) - 1 for episode in self._tokens)
        return {
            "seconds": seconds,
            "cpu_s": time.process_time() - cpu_started,
            "overhead_share": 1 - self._deepspeed.seconds / seconds,
            "padding_share": 1 - needed / self._num_forwarded,
            "rank_imbalance": self._rank_imbalance(selection, num_ranks=2),
        }

    def _rank_imbalance(self, selection: Selection, *, num_ranks: int) -> float:
        """How much longer than the mean the slowest of `num_ranks` takes, by the cost of the sequences planned for it."""
        shares = self._plan(selection, num_ranks=num_ranks).shares
        loads = [sum(self._cost(sequence.num_tokens) for rows in share for sequence in rows) for share in shares]
        return max(loads) / (sum(loads) / num_ranks) - 1

    def _plan(self, selection: Selection, *, num_ranks: int) -> BatchPlan:
        return plan_batch(selection, self._version, self._configuration, num_ranks=num_ranks, cost=self._cost)

    def _count(self, module: Any, arguments: Any, named: dict[str, Any]) -> None:
        self._num_forwarded += named["input_ids"].numel()

    def _episode(self, group: GroupRecord, sample_index: int, index: int) -> Trajectory:
        tokens = self._tokens[index]
        mask = np.arange(len(tokens)) >= workload.PROMPT_TOKENS
        return Trajectory(
            run_id=self._configuration.run.id,
            trajectory_id=uuid.uuid4().hex,
            group_id=group.group_id,
            group_size=group.group_size,
            sample_index=sample_index,
            attempt=0,
            environment="bench",
            task_id="0",
            token_bytes=np.asarray(tokens, dtype="<i4").tobytes(),
            loss_mask_bytes=mask.astype(np.uint8).tobytes(),
            logprob_bytes=np.where(mask, -9.0, 0.0).astype("<f4").tobytes(),
            version_spans=(VersionSpan(0, len(tokens), self._version),),
            temperature=1.0,
            turns=(),
            reward=self._rewards[index],
            reward_parts={},
            outcome=Outcome.COMPLETED,
            detail="",
            timings=Timings(0, 0, 0, 0),
            finished_at=0.0,
        )
