"""The process's HTTP interface: environments, evaluations, health, status, metrics, and the page that documents them."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import Any, Final, TypeVar

import msgspec
from fastapi import FastAPI, Request, Response
from fastapi.responses import RedirectResponse, StreamingResponse
from fastapi_offline import FastAPIOffline

from services.env_agents import documentation
from services.env_agents.episode_statistics import RunStatistics
from services.env_agents.evaluation import Evaluator
from services.env_agents.loading import NotAllowedError
from services.env_agents.messages import (
    EnvironmentDescription,
    Health,
    Refusal,
    RolloutChanges,
    Status,
    describe,
    describe_rollout,
)
from services.env_agents.metrics import AgentMetrics
from services.env_agents.openenv import UnreachableEnvironmentError
from services.env_agents.operations import JSON_LINES
from services.env_agents.registry import EnvironmentExistsError, EnvironmentRegistry, RegisteredEnvironment, UnknownEnvironmentError
from services.env_agents.remote_hosts import HostNotAllowedError
from services.env_agents.rollout_loop import REDIS_AWAY, RolloutLoop
from shared import strict_yaml
from shared.decoding import UNDECODABLE
from shared.environment_spec import EnvironmentSpec
from shared.errors import ConfigurationError, HeadraceError
from shared.evaluation import EvaluationLine, EvaluationRequest
from shared.ledger import AdmissionLedger

MAX_BODY_BYTES: Final = 2**20
"""A spec has a few hundred."""
BODY_TIMEOUT_S: Final = 30.0


class SlowBodyError(HeadraceError):
    """A request whose body does not come."""


class BodyTooLargeError(HeadraceError):
    """A request whose body is longer than any that means something."""


class MediaTypeError(HeadraceError):
    """A body that does not say that it is JSON, as a page in somebody's browser could send it to this machine unasked."""


STATUS_OF: Final[Mapping[type[Exception], int]] = {
    NotAllowedError: 403,
    HostNotAllowedError: 403,
    SlowBodyError: 408,
    BodyTooLargeError: 413,
    MediaTypeError: 415,
    UnknownEnvironmentError: 404,
    EnvironmentExistsError: 409,
    ConfigurationError: 422,
    UnreachableEnvironmentError: 502,
}

T = TypeVar("T")


def create_control(
    registry: EnvironmentRegistry,
    evaluator: Evaluator,
    rollouts: RolloutLoop,
    ledger: AdmissionLedger,
    metrics: AgentMetrics,
    statistics: RunStatistics,
) -> FastAPI:
    """The application; what it is given is open already and closed by others."""
    app = FastAPIOffline(title=documentation.TITLE, redoc_url=None)
    app.openapi = documentation.openapi  # type: ignore[method-assign]  # The way that FastAPI documents.
    for error_type, code in STATUS_OF.items():
        app.add_exception_handler(error_type, _refusal(code))
    for error_type in REDIS_AWAY:
        app.add_exception_handler(error_type, _refuse_without_redis)

    async def described(environments: Sequence[RegisteredEnvironment]) -> list[EnvironmentDescription]:
        recent_by_name = await statistics.read([environment.spec.name for environment in environments])
        return [describe(environment, recent_by_name[environment.spec.name]) for environment in environments]

    @app.get("/", include_in_schema=False)
    async def root() -> Response:
        return RedirectResponse("docs")

    @app.post("/environments")
    async def register(request: Request) -> Response:
        environment = await registry.register(await _body(request, EnvironmentSpec))
        return _json((await described([environment]))[0], status=201)

    @app.get("/environments")
    async def list_environments() -> Response:
        await registry.refresh()
        return _json(await described(list(registry.environments.values())))

    @app.get("/environments/{name}")
    async def show(name: str) -> Response:
        await registry.refresh()
        return _json((await described([registry.get(name)]))[0])

    @app.patch("/environments/{name}")
    async def patch(name: str, request: Request) -> Response:
        environment = await registry.patch(name, await _mapping(request))
        return _json((await described([environment]))[0])

    @app.delete("/environments/{name}")
    async def delete(name: str) -> Response:
        await registry.delete(name)
        return Response(status_code=204)

    @app.post("/evaluations")
    async def evaluate(request: Request) -> Response:
        return _json(await evaluator.evaluate(await _body(request, EvaluationRequest)))

    @app.post("/evaluations/episodes")
    async def evaluate_by_episode(request: Request) -> Response:
        asked = await _body(request, EvaluationRequest)
        lines = evaluator.lines(evaluator.plan(asked), asked)
        return StreamingResponse(_encoded(lines), media_type=JSON_LINES)

    @app.get("/rollout")
    async def show_rollout() -> Response:
        return _json(describe_rollout(await ledger.books()))

    @app.patch("/rollout")
    async def change_rollout(request: Request) -> Response:
        changes = await _body(request, RolloutChanges)
        await ledger.set_ratio(changes.async_generation_ratio)
        return _json(describe_rollout(await ledger.books()))

    @app.get("/health")
    async def health() -> Response:
        return _json(Health())

    @app.get("/status")
    async def status() -> Response:
        books = await ledger.books()
        return _json(
            Status(
                books=books,
                is_balanced=books.is_balanced,
                pipeline=await ledger.pipeline(),
                processes=await ledger.processes(),
                process=rollouts.owner,
                episodes_in_flight=rollouts.num_episodes_in_flight,
                episodes_by_environment={name: entry.slots.num_claimed for name, entry in registry.environments.items()},
            )
        )

    @app.get("/metrics")
    async def show_metrics() -> Response:
        metrics.tasks.set(len(asyncio.all_tasks()))
        return Response(metrics.exposition(), media_type="text/plain; version=0.0.4")

    return app


def _json(value: Any, *, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status_code=status, media_type="application/json")


async def _encoded(lines: AsyncGenerator[EvaluationLine, None]) -> AsyncIterator[bytes]:
    async with contextlib.aclosing(lines):
        async for line in lines:
            yield msgspec.json.encode(line) + b"\n"


def _refusal(status: int) -> Callable[[Request, Exception], Awaitable[Response]]:
    async def refuse(_: Request, error: Exception) -> Response:
        return _json(Refusal(str(error)), status=status)

    return refuse


async def _refuse_without_redis(_: Request, error: Exception) -> Response:
    return _json(Refusal(f"Redis must answer, and does not: {error}; try again when it is back"), status=503)


async def _mapping(request: Request) -> dict[str, Any]:
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != "application/json":
        raise MediaTypeError(
            f"{_named(request)}: the body must have the header Content-Type: application/json, got {media_type or 'none'!r:.100}"
        )
    try:
        return msgspec.json.decode(await _content(request), type=dict[str, Any])
    except UNDECODABLE as error:
        raise ConfigurationError(
            f"{_named(request)}: the body must be a JSON object: {error}; /docs shows what it takes"
        ) from error


async def _content(request: Request) -> bytes:
    """Raises: BodyTooLargeError, SlowBodyError."""
    content = bytearray()
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            async for chunk in request.stream():
                content += chunk
                if len(content) > MAX_BODY_BYTES:
                    raise BodyTooLargeError(
                        f"{_named(request)}: the body must have at most {MAX_BODY_BYTES} bytes, got more; data belongs in a dataset"
                    )
    except TimeoutError as error:
        raise SlowBodyError(f"{_named(request)}: the body must be there within {BODY_TIMEOUT_S:g} s, and is not") from error
    return bytes(content)


def _named(request: Request) -> str:
    return f"{request.method} {request.url.path}"


async def _body(request: Request, struct: type[T]) -> T:
    return strict_yaml.decode(await _mapping(request), struct, source=_named(request))
