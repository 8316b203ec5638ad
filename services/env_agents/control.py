"""The process's HTTP interface: environments, evaluations, health, status and metrics."""

import dataclasses
from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec
from fastapi import FastAPI, Request, Response

from services.env_agents.evaluation import EvaluationRequest, Evaluator
from services.env_agents.loading import NotAllowedError
from services.env_agents.metrics import AgentMetrics
from services.env_agents.openenv import UnreachableEnvironmentError
from services.env_agents.registry import (
    EnvironmentExistsError,
    EnvironmentRegistry,
    RegisteredEnvironment,
    UnknownEnvironmentError,
)
from services.env_agents.rollout_loop import REDIS_AWAY, RolloutLoop
from shared import strict_yaml
from shared.environment_spec import EnvironmentSpec
from shared.errors import ConfigurationError
from shared.ledger import AdmissionLedger

_STATUS_OF: Mapping[type[Exception], int] = {
    NotAllowedError: 403,
    UnknownEnvironmentError: 404,
    EnvironmentExistsError: 409,
    ConfigurationError: 422,
    UnreachableEnvironmentError: 502,
    **dict.fromkeys(REDIS_AWAY, 503),
}

T = TypeVar("T")


def create_control(
    registry: EnvironmentRegistry,
    evaluator: Evaluator,
    rollouts: RolloutLoop,
    ledger: AdmissionLedger,
    metrics: AgentMetrics,
) -> FastAPI:
    """The application; what it is given is open already and closed by others."""
    app = FastAPI(title="Headrace environment agents", docs_url=None, redoc_url=None)
    for error_type, code in _STATUS_OF.items():
        app.add_exception_handler(error_type, _refusal(code))

    @app.post("/environments")
    async def register(request: Request) -> Response:
        spec = await _body(request, EnvironmentSpec)
        return _json(_description(await registry.register(spec)), status=201)

    @app.get("/environments")
    async def list_environments() -> Response:
        await registry.refresh()
        return _json([_description(environment) for environment in registry.environments.values()])

    @app.get("/environments/{name}")
    async def show(name: str) -> Response:
        await registry.refresh()
        return _json(_description(registry.get(name)))

    @app.patch("/environments/{name}")
    async def patch(name: str, request: Request) -> Response:
        return _json(_description(await registry.patch(name, await _mapping(request))))

    @app.delete("/environments/{name}")
    async def delete(name: str) -> Response:
        await registry.delete(name)
        return Response(status_code=204)

    @app.post("/evaluations")
    async def evaluate(request: Request) -> Response:
        return _json(await evaluator.evaluate(await _body(request, EvaluationRequest)))

    @app.get("/health")
    async def health() -> Response:
        return _json({"status": "ok"})

    @app.get("/status")
    async def status() -> Response:
        books = await ledger.books()
        environments = registry.environments.items()
        return _json(
            {
                "books": {**dataclasses.asdict(books), "is_balanced": books.is_balanced},
                "episodes_in_flight": rollouts.num_episodes_in_flight,
                "episodes_by_environment": {name: environment.slots.num_claimed for name, environment in environments},
            }
        )

    @app.get("/metrics")
    async def show_metrics() -> Response:
        return Response(metrics.exposition(), media_type="text/plain; version=0.0.4")

    return app


def _description(environment: RegisteredEnvironment) -> dict[str, Any]:
    """A spec, and how this process's recent episodes of it went."""
    return {
        **msgspec.to_builtins(environment.spec),
        "statistics": msgspec.to_builtins(environment.window.statistics()),
        "last_problem": environment.window.last_problem,
    }


def _json(value: Any, *, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status_code=status, media_type="application/json")


def _refusal(status: int) -> Any:
    async def refuse(_: Request, error: Exception) -> Response:
        return _json({"detail": str(error)}, status=status)

    return refuse


async def _mapping(request: Request) -> dict[str, Any]:
    try:
        return msgspec.json.decode(await request.body(), type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise ConfigurationError(f"a request's body must be a JSON object: {error}") from error


async def _body(request: Request, struct: type[T]) -> T:
    return strict_yaml.decode(await _mapping(request), struct, source=f"{request.method} {request.url.path}")
