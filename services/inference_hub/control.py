"""The control plane: REST routes over the registry and the weight updates."""

import asyncio
from collections import Counter
from dataclasses import asdict
from typing import Annotated, Final

from fastapi import APIRouter, Path, Query, Response
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from services.inference_hub import refusal_examples
from services.inference_hub.documentation import refusals
from services.inference_hub.engine_requests import Bucket
from services.inference_hub.engines import Engine, EngineRegistry, EngineState, WeightsInForce
from services.inference_hub.hub import Hub
from services.inference_hub.messages import (
    Commit,
    EngineDescription,
    EngineUsage,
    GroupMember,
    Health,
    NewBucket,
    NewEngine,
    NewWeightGroup,
    NewWeightUpdate,
    Quarantine,
    Readiness,
    Status,
    UpdateReport,
    WeightGroupDescription,
    Weights,
    WeightUpdateDescription,
    WeightUpdateState,
)
from services.inference_hub.refusals import NotReadyError
from services.inference_hub.weight_groups import Master, WeightGroup
from services.inference_hub.weight_update import Outcome

EngineId = Annotated[str, Path(examples=["3f1c9a0d5e77"])]
Force = Annotated[bool, Query(description="Forget it at once: the calls it has begin again at other engines.", examples=[False])]
GroupName = Annotated[str, Path(examples=["headrace-1763-a41f-ab12cd34"])]
UpdateId = Annotated[str, Path(examples=["5d0b4c9e7b8f4b1c9a55a1d1b6a3c2f0"])]
UNVERIFIED: Final = Commit()
METRICS: Final = {
    "schema": {"type": "string"},
    "example": "# TYPE headrace_hub_policy_version gauge\nheadrace_hub_policy_version 12.0\n",
}


def describe(engine: Engine, registry: EngineRegistry) -> EngineDescription:
    state = registry.state_of(engine)
    return EngineDescription(
        id=engine.id,
        url=engine.url,
        state=state.value,
        version=engine.version,
        model_path=engine.model_path,
        tensor_parallel_size=engine.tensor_parallel_size,
        outstanding_calls=engine.num_outstanding_calls,
        outstanding_tokens=engine.outstanding_tokens,
        problem=_why_syncing(engine, registry.in_force)
        if state is EngineState.SYNCING
        else engine.quarantined_because or engine.problem,
    )


def describe_usage(engine: Engine) -> EngineUsage:
    return EngineUsage(
        id=engine.id,
        tensor_parallel_size=engine.tensor_parallel_size,
        max_running_calls=engine.limits.calls,
        max_tokens=engine.limits.tokens,
        **asdict(engine.usage.read()),
    )


def _why_syncing(engine: Engine, in_force: WeightsInForce) -> str:
    if engine.is_incomplete:
        because = f" ({engine.problem})" if engine.problem else ""
        return f"it may hold part of a set of weights; the next complete weight update makes it ready{because}"
    return (
        f"it holds version {engine.version} of epoch {engine.synced_epoch}, and version {in_force.version} of epoch "
        f"{in_force.epoch} is in force; the next weight update makes it ready"
    )


def _describe_group(group: WeightGroup) -> WeightGroupDescription:
    members = [
        GroupMember(
            id=member.engine.id,
            url=member.engine.url,
            rank_offset=member.rank_offset,
            tensor_parallel_size=member.tensor_parallel_size,
        )
        for member in group.members
    ]
    return WeightGroupDescription(group_name=group.name, world_size=group.world_size, engines=members)


def _describe_outcome(outcome: Outcome) -> UpdateReport:
    return UpdateReport(
        version=outcome.version,
        engines=list(outcome.engine_urls),
        left_out=outcome.left_out,
        is_verified=outcome.is_verified,
        **asdict(outcome.times),
    )


def engine_routes(hub: Hub) -> APIRouter:
    routes = APIRouter(prefix="/engines", tags=["engines"])

    @routes.post("", status_code=201, responses=refusals(refusal_examples.REGISTER_ENGINE))
    async def register_engine(new: NewEngine) -> EngineDescription:
        """Registers an engine that runs."""
        return describe(await hub.register(new.url), hub.registry)

    @routes.get("")
    async def list_engines() -> list[EngineDescription]:
        """All engines, with the state of each and why it is not ready."""
        return [describe(engine, hub.registry) for engine in hub.registry.by_id.values()]

    @routes.delete("/{engine_id}", responses=refusals(refusal_examples.REMOVE_ENGINE))
    async def remove_engine(engine_id: EngineId, force: Force = False) -> EngineDescription:
        """Takes an engine out of routing; it is forgotten when the calls it has are answered. It keeps running."""
        return describe(await hub.remove(engine_id, is_forced=force), hub.registry)

    @routes.post("/{engine_id}/quarantine", responses=refusals(refusal_examples.QUARANTINE_ENGINE))
    async def quarantine_engine(engine_id: EngineId, body: Quarantine) -> EngineDescription:
        """Keeps an engine that cannot take the run's weights from weight groups and calls until it is lost, as in a restart."""
        return describe(await hub.quarantine(engine_id, body.problem), hub.registry)

    return routes


def weight_routes(hub: Hub) -> APIRouter:
    routes = APIRouter(tags=["weights"])
    updates = hub.updates

    @routes.post("/weight_groups", responses=refusals(refusal_examples.FORM_GROUP))
    async def form_weight_group(new: NewWeightGroup) -> WeightGroupDescription:
        """Starts a group of engines; over broadcast, a process group with the trainer. Join it as rank 0, then POST …/ready."""
        hub.require_run(new.run_id)
        presence_port = new.presence_port or new.master_port
        master = Master(new.master_address, new.master_port, new.backend, new.transport, presence_port)
        return _describe_group(await updates.form_group(new.epoch, master, new.engine_ids))

    @routes.post("/weight_groups/{group_name}/ready", responses=refusals(refusal_examples.AWAIT_GROUP))
    async def await_weight_group(group_name: GroupName) -> WeightGroupDescription:
        """Answers when all engines have joined; 502 names the one that did not."""
        return _describe_group(await updates.wait_group_ready(group_name))

    @routes.get("/weights")
    async def weights() -> Weights:
        """What is in force, and which engines lack it. The trainer asks this while it waits for data."""
        registry = hub.registry
        return Weights(
            version=registry.in_force.version,
            epoch=registry.in_force.epoch,
            ready_engines=len(registry.routable),
            wanting_engines=[engine.id for engine in registry.wanting],
            update=updates.state,
        )

    @routes.post("/weight_updates", responses=refusals(refusal_examples.BEGIN_UPDATE))
    async def begin_weight_update(new: NewWeightUpdate) -> WeightUpdateDescription:
        """Pauses the group's engines; new calls wait, or go to others. 409 `group_stale`: form a new group."""
        update = await updates.begin(new.group_name, new.version, new.mode, is_rolling=new.rolling)
        return WeightUpdateDescription(update_id=update.id)

    @routes.post("/weight_updates/{update_id}/buckets", responses=refusals(refusal_examples.LOAD_BUCKET))
    async def load_bucket(update_id: UpdateId, new: NewBucket) -> WeightUpdateState:
        """Has every engine load one bucket; broadcast it at the same time. Answers when all have loaded it, or one failed."""
        await updates.load_bucket(update_id, Bucket(**new.model_dump(exclude={"commit"})))
        report = None if new.commit is None else _describe_outcome(await updates.commit(update_id, new.commit.checksums))
        return WeightUpdateState(state=updates.state, report=report)

    @routes.post("/weight_updates/{update_id}/commit", responses=refusals(refusal_examples.COMMIT_UPDATE))
    async def commit_weight_update(update_id: UpdateId, body: Commit = UNVERIFIED) -> UpdateReport:
        """Compares checksums if there are some, puts the version in force and lets generation go on."""
        return _describe_outcome(await updates.commit(update_id, body.checksums))

    @routes.delete("/weight_updates/{update_id}", responses=refusals(refusal_examples.ABANDON_UPDATE))
    async def abandon_weight_update(update_id: UpdateId) -> WeightUpdateState:
        """Gives an update up. Engines that may hold part of the set get no calls until one completes."""
        await updates.abandon(update_id)
        return WeightUpdateState(state=updates.state)

    return routes


def health_routes(hub: Hub) -> APIRouter:
    routes = APIRouter(tags=["health"])

    @routes.get("/health")
    async def health() -> Health:
        """200 as long as the process serves."""
        return Health()

    @routes.get("/ready", responses=refusals(refusal_examples.READINESS))
    async def ready() -> Readiness:
        """200 if at least one engine can take calls."""
        if not hub.registry.routable:
            raise NotReadyError("at least one engine must be ready, none is; GET /engines says why")
        return Readiness(ready_engines=len(hub.registry.routable))

    @routes.get("/status")
    async def status() -> Status:
        """The hub at one instant."""
        registry = hub.registry
        states = Counter(str(registry.state_of(engine)) for engine in registry.by_id.values())
        return Status(
            run=hub.run_id,
            version=registry.in_force.version,
            epoch=registry.in_force.epoch,
            engines=dict(states),
            calls=hub.generate.num_calls,
            held_calls=hub.num_held_calls,
            held_because=[str(reason) for reason in hub.gate.reasons],
            weight_update=hub.updates.state,
            weight_groups=list(hub.updates.groups),
        )

    @routes.get("/usage")
    async def usage() -> list[EngineUsage]:
        """Of every engine, how long it was ready, idle and busy. The same seconds are in /metrics."""
        return [describe_usage(engine) for engine in hub.registry.by_id.values()]

    @routes.get("/metrics", response_class=Response, responses={200: {"content": {"text/plain": METRICS}}})
    async def metrics() -> Response:
        """Prometheus's text format."""
        hub.metrics.tasks.set(len(asyncio.all_tasks()))
        return Response(generate_latest(hub.metrics.collectors), media_type=CONTENT_TYPE_LATEST)

    return routes
