"""Puts a rank together from the run file: model, DeepSpeed, Redis, and on rank 0 the hub, the agents and the files."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from pathlib import Path

import torch

from shared.configuration import Configuration
from shared.keys import Keys
from shared.ledger import TrainingLedger
from shared.stream import TrajectoryConsumer
from trainer import ranks
from trainer.checkpoints import Checkpoints, RunState
from trainer.evaluation import Evaluations
from trainer.hub_client import HubClient
from trainer.lead import Lead
from trainer.learner import Learner
from trainer.model import Policy, build_engine, load_policy, start_ranks
from trainer.model_fit import model_check
from trainer.pipeline_watch import PipelineWatch
from trainer.redis_connection import impatient_client, patient_client
from trainer.rollouts import RolloutReader
from trainer.step import TrainingLoop
from trainer.stopping import StopSignal
from trainer.tracking import ConsoleTracker
from trainer.weight_push import WeightPusher

SLACK_S = 600.0
HUB_SLACK_S = 10.0
"""By which the hub's answer may be later than its own deadline."""


@contextmanager
def training(configuration: Configuration, stop: StopSignal) -> Iterator[TrainingLoop]:
    """This rank's training loop, ready to run; everything it opened is closed at the end."""
    trainer = configuration.trainer
    start_ranks(timeout=_longest_silence(configuration))
    with ExitStack() as stack:
        stack.callback(torch.distributed.destroy_process_group)
        policy = load_policy(Path(configuration.run.model_path), trainer)
        checkpoints = _checkpoints(configuration, policy)
        engine = build_engine(policy, trainer)
        resumed = _resume(configuration, checkpoints, engine)
        keys = Keys(configuration.run.id)
        client = stack.enter_context(patient_client(configuration.redis.url))
        ledger = TrainingLedger(client, keys)
        lead = _lead(configuration, keys, ledger, policy, engine.device, stop, stack) if ranks.rank() == 0 else None
        yield TrainingLoop(
            configuration,
            resumed=resumed,
            learner=Learner(engine, trainer, seed=configuration.run.seed),
            consumer=TrajectoryConsumer(client, keys, ledger),
            checkpoints=checkpoints,
            lead=lead,
        )


def _longest_silence(configuration: Configuration) -> timedelta:
    """How long the other ranks may wait for rank 0: a push, an evaluation twice, a batch."""
    trainer = configuration.trainer
    waits = 3 * trainer.generation_timeout_s + 4 * trainer.weight_push.timeout_s + configuration.engines.start_timeout_s
    return timedelta(seconds=waits + SLACK_S)


def _checkpoints(configuration: Configuration, policy: Policy) -> Checkpoints:
    return Checkpoints(
        Path(configuration.run.directory),
        keep=configuration.trainer.checkpoint.keep,
        fingerprint=policy.fingerprint(),
        model_path=Path(configuration.run.model_path),
    )


def _resume(configuration: Configuration, checkpoints: Checkpoints, engine: object) -> RunState | None:
    """The checkpoint that `engine` holds afterwards; None if the run starts anew."""
    if configuration.trainer.checkpoint.resume == "never":
        checkpoints.require_none()
        return None
    state = checkpoints.newest()
    if state is not None:
        checkpoints.load(engine, state)
    return state


def _lead(
    configuration: Configuration,
    keys: Keys,
    ledger: TrainingLedger,
    policy: Policy,
    device: torch.device,
    stop: StopSignal,
    stack: ExitStack,
) -> Lead:
    trainer = configuration.trainer
    directory = Path(configuration.run.directory)
    directory.mkdir(parents=True, exist_ok=True)
    tracker = stack.enter_context(ConsoleTracker(trainer.num_updates))
    reading = stack.enter_context(impatient_client(configuration.redis.url))
    hub = HubClient(
        configuration.inference_hub.address,
        timeout_s=configuration.inference_hub.weight_update_timeout_s + HUB_SLACK_S,
        run_id=configuration.run.id,
    )
    pusher = WeightPusher(
        hub,
        trainer.weight_push,
        dtype=getattr(torch, configuration.engines.dtype),
        device=device,
        patience_s=max(trainer.weight_push.timeout_s, configuration.engines.start_timeout_s),
        notice=tracker.note,
        can_check_values=configuration.engines.device == "cpu",
        check_model=model_check(policy.causal_lm.config),
    )
    evaluations = Evaluations(
        trainer.evaluation,
        agents=configuration.env_agents.address,
        directory=directory,
        num_updates=trainer.num_updates,
        timeout_s=trainer.generation_timeout_s,
        tracker=tracker,
    )
    lead = Lead(
        configuration,
        reader=RolloutReader(
            TrajectoryConsumer(reading, keys, ledger), ledger, configuration.rollout, timeout_s=trainer.generation_timeout_s
        ),
        ledger=ledger,
        pusher=pusher,
        evaluations=evaluations,
        pipeline=PipelineWatch(
            configuration, usage=hub.usage, num_ranks=ranks.count(), publish=ledger.report_pipeline, note=tracker.note
        ),
        tracker=tracker,
        stop=stop,
    )
    stack.callback(lead.close)
    return lead
