"""Every error as an HTTP answer of the control plane: a status, a sentence, and a code where a program reacts to it."""

from typing import Final

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from redis.exceptions import RedisError
from starlette.exceptions import HTTPException

from services.inference_hub.access import HostNotAllowedError
from services.inference_hub.hub import (
    AlreadyRegisteredError,
    EngineBusyError,
    OtherRunError,
    UnknownEngineError,
    UnusableEngineError,
)
from services.inference_hub.weight_updates import (
    AlreadyInForceError,
    GroupStaleError,
    NoEngineError,
    NotNewerError,
    OtherTrainerError,
    UnknownUpdateError,
)
from shared.errors import EngineError, HeadraceError, WeightUpdateError


class NotReadyError(HeadraceError):
    """No engine can take calls now."""


REFUSALS: Final[tuple[tuple[type[HeadraceError], int, str | None], ...]] = (
    (GroupStaleError, 409, "group_stale"),
    (NoEngineError, 409, "no_engine"),
    (UnknownUpdateError, 404, "unknown_update"),
    (OtherTrainerError, 409, "other_trainer"),
    (NotNewerError, 409, "not_newer"),
    (AlreadyInForceError, 409, "already_in_force"),
    (WeightUpdateError, 409, None),
    (AlreadyRegisteredError, 409, None),
    (UnusableEngineError, 422, None),
    (UnknownEngineError, 404, None),
    (EngineBusyError, 409, None),
    (OtherRunError, 409, "other_run"),
    (HostNotAllowedError, 403, None),
    (EngineError, 502, None),
    (NotReadyError, 503, None),
)
"""Error, status, code; the first class that fits decides."""


def install(application: FastAPI) -> None:
    application.add_exception_handler(HeadraceError, _refuse)
    application.add_exception_handler(RequestValidationError, _refuse_body)
    application.add_exception_handler(HTTPException, _refuse_request)
    application.add_exception_handler(RedisError, _refuse_without_redis)


def _answer(status: int, sentence: str, code: str | None = None) -> JSONResponse:
    return JSONResponse({"detail": sentence, "code": code}, status_code=status)


async def _refuse(request: Request, error: Exception) -> JSONResponse:
    status, code = next(((status, code) for kind, status, code in REFUSALS if isinstance(error, kind)), (500, None))
    return _answer(status, str(error), code)


async def _refuse_body(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    if first["type"] == "json_invalid":
        return _unreadable(request)
    where = ".".join(str(step) for step in first["loc"])
    return _answer(
        422, f"{request.method} {request.url.path}: {where}: {first['msg']}, got {first.get('input')!r}; /docs shows what it takes"
    )


async def _refuse_request(request: Request, error: Exception) -> JSONResponse:
    """What FastAPI and starlette refuse by themselves, with a sentence that helps."""
    assert isinstance(error, HTTPException)
    if error.status_code == 400:
        return _unreadable(request)
    is_unknown = error.status_code in (404, 405)
    sentence = f"there is no {request.method} {request.url.path}; /docs lists what there is" if is_unknown else str(error.detail)
    answer = _answer(error.status_code, sentence)
    answer.headers.update(error.headers or {})
    return answer


def _unreadable(request: Request) -> JSONResponse:
    return _answer(
        422, f"{request.method} {request.url.path}: the body must be JSON in UTF-8, and cannot be read; /docs shows what it takes"
    )


async def _refuse_without_redis(request: Request, error: Exception) -> JSONResponse:
    return _answer(503, f"Redis must be reachable to change engines or weights in force, got: {error}; try again when it is")
