"""Puts a rank together from the run file: model, DeepSpeed, Redis, and on rank 0 the hub, the agents and the files."""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from pathlib import Path

import torch

from shared.configuration import Configuration
from shared.errors import ConfigurationError
from shared.keys import Keys
from shared.ledger import TrainingLedger
from shared.stream import TrajectoryConsumer
from trainer import ranks
from trainer.advantages import advantage_estimator
from trainer.checkpoints import Checkpoints, Component, RunState
from trainer.critic import ValueModel, build_critic, load_value_model
from trainer.deepspeed_settings import uses_zero_3
from trainer.evaluation import Evaluations
from trainer.guards import SkippedUpdates
from trainer.hub_client import HubClient
from trainer.lead import Lead
from trainer.learner import Learner
from trainer.model import Policy, build_engine, fingerprint, load_policy, start_ranks
from trainer.model_fit import model_check
from trainer.pipeline_watch import PipelineWatch
from trainer.record_checks import RecordLimits, require_matching_tokenizer
from trainer.redis_connection import impatient_client, patient_client
from trainer.reference import load_reference
from trainer.rollouts import RolloutReader
from trainer.step import TrainingLoop
from trainer.stopping import StopSignal
from trainer.trackers.trackers import open_trackers, require_packages
from trainer.weight_push import WeightPusher

SLACK_S = 600.0
HUB_SLACK_S = 10.0
"""By which the hub's answer may be later than its own deadline."""


@contextmanager
def training(configuration: Configuration, stop: StopSignal) -> Iterator[TrainingLoop]:
    """This rank's training loop, ready to run; everything it opened is closed at the end."""
    trainer = configuration.trainer
    require_packages(trainer.trackers)
    min_trainable = _min_trainable(configuration)
    start_ranks(timeout=_longest_silence(configuration))
    with ExitStack() as stack:
        stack.callback(torch.distributed.destroy_process_group)
        policy = load_policy(Path(configuration.run.model_path), trainer, is_sharded=uses_zero_3(trainer))
        limits = policy.record_limits()
        require_matching_tokenizer(Path(configuration.run.model_path), limits)
        critic = _critic_model(configuration, policy) if trainer.critic else None
        checkpoints = _checkpoints(configuration, policy, critic)
        stack.callback(checkpoints.close)
        engine = build_engine(policy, trainer)
        learner = Learner(
            engine,
            trainer,
            seed=configuration.run.seed,
            reference=load_reference(trainer, model_path=Path(configuration.run.model_path), device=engine.device),
            critic=build_critic(critic, trainer) if critic else None,
        )
        skipped_updates = SkippedUpdates(max_in_a_row=trainer.max_skipped_updates)
        components: dict[str, Component] = {"skipped_updates": skipped_updates, "kl_controller": learner.kl_controller}
        resumed = _resume(configuration, checkpoints, learner.engines, components)
        keys = Keys(configuration.run.id)
        client = stack.enter_context(patient_client(configuration.redis.url))
        ledger = TrainingLedger(client, keys)
        lead = None
        if ranks.rank() == 0:
            lead = _lead(
                configuration, keys, ledger, policy, engine.device, stop, stack, min_trainable, resumed=resumed, limits=limits
            )
        yield TrainingLoop(
            configuration,
            resumed=resumed,
            learner=learner,
            consumer=TrajectoryConsumer(client, keys, ledger),
            checkpoints=checkpoints,
            skipped_updates=skipped_updates,
            components=components,
            lead=lead,
        )


def _min_trainable(configuration: Configuration) -> int:
    """Episodes that the estimator needs of a group."""
    trainer, group_size = configuration.trainer, configuration.rollout.num_return_sequences_in_group
    needed = advantage_estimator(trainer).min_group_size
    if group_size < needed:
        raise ConfigurationError(
            f"rollout.num_return_sequences_in_group must be >= {needed} with trainer.adv_estimator {trainer.adv_estimator!r}, got "
            f"{group_size}; raise it, or use another estimator"
        )
    return needed


def _longest_silence(configuration: Configuration) -> timedelta:
    """How long the other ranks may wait for rank 0: a push, an evaluation twice, a batch."""
    trainer = configuration.trainer
    waits = 3 * trainer.generation_timeout_s + 4 * trainer.weight_push.timeout_s + configuration.engines.start_timeout_s
    return timedelta(seconds=waits + SLACK_S)


def _critic_model(configuration: Configuration, policy: Policy) -> ValueModel:
    trainer = configuration.trainer
    assert trainer.critic is not None
    path = Path(trainer.critic.model_path or configuration.run.model_path)
    return load_value_model(path, trainer, vocabulary_size=policy.causal_lm.config.get_text_config().vocab_size)


def _checkpoints(configuration: Configuration, policy: Policy, critic: ValueModel | None) -> Checkpoints:
    return Checkpoints(
        Path(configuration.run.directory),
        keep=configuration.trainer.checkpoint.keep,
        fingerprint=policy.fingerprint() + (f"+{fingerprint(critic.backbone)}" if critic else ""),
        model_path=Path(configuration.run.model_path),
        timeout=_longest_silence(configuration),
    )


def _resume(
    configuration: Configuration, checkpoints: Checkpoints, engines: Mapping[str, object], components: Mapping[str, Component]
) -> RunState | None:
    """The checkpoint that `engines` and `components` hold afterwards; None if the run starts anew."""
    if configuration.trainer.checkpoint.resume == "never":
        checkpoints.require_none()
        return None
    state = checkpoints.newest()
    if state is not None:
        checkpoints.load(engines, state, components)
    return state


def _lead(
    configuration: Configuration,
    keys: Keys,
    ledger: TrainingLedger,
    policy: Policy,
    device: torch.device,
    stop: StopSignal,
    stack: ExitStack,
    min_trainable: int,
    *,
    resumed: RunState | None,
    limits: RecordLimits,
) -> Lead:
    trainer = configuration.trainer
    directory = Path(configuration.run.directory)
    directory.mkdir(parents=True, exist_ok=True)
    tracker = stack.enter_context(open_trackers(configuration, version=resumed.version if resumed else 0))
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
            TrajectoryConsumer(reading, keys, ledger),
            ledger,
            configuration.rollout,
            timeout_s=trainer.generation_timeout_s,
            limits=limits,
            min_trainable=min_trainable,
        ),
        ledger=ledger,
        pusher=pusher,
        evaluations=evaluations,
        pipeline=PipelineWatch(
            configuration, usage=hub.usage, num_ranks=ranks.count(), publish=ledger.report_pipeline, note=tracker.note
        ),
        tracker=tracker,
        stop=stop,
        cost=policy.sequence_cost(),
    )
    stack.callback(lead.close)
    return lead
