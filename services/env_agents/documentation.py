"""The OpenAPI document that /docs shows, made of `operations` and of the types that `control` decodes and encodes."""

import re
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any, Final

import msgspec

from services.env_agents import schemas
from services.env_agents.access import OPEN_PATHS, REFUSAL
from services.env_agents.messages import EnvironmentDescription, Health, Refusal, RolloutChanges, RolloutDescription, Status
from services.env_agents.operations import BODY_REFUSALS, CHANGES, OPERATIONS, PYTHON_ENVIRONMENT, Operation
from services.env_agents.registry import PATCHABLE
from shared.environment_spec import EnvironmentSpec
from shared.evaluation import EvaluationLine, EvaluationRequest, EvaluationResult
from shared.release import VERSION

TITLE: Final = "Headrace environment agents"
DESCRIPTION: Final = """
The environments of a run: register, weigh, pause, watch and remove them while it goes on. Every agent process of a run answers for
all of them. Refusals carry a sentence in `detail`. Where the agents have a token, all but
`/health`, `/status` and `/metrics` need it in `Authorization: Bearer`.
"""
_REASONS: Final[Mapping[int, str]] = {
    401: "It has not the agents' token.",
    403: "It may not be imported, or connected to.",
    404: "There is none of this name.",
    408: "The body does not come.",
    409: "There is another one of this name.",
    413: "The body is too long.",
    415: "The body is of another type.",
    422: "The body cannot be used.",
    502: "The environment's server does not answer.",
    503: "Redis does not answer.",
}


@cache
def openapi() -> dict[str, Any]:
    """The OpenAPI 3.1 document."""
    paths: dict[str, dict[str, Any]] = {}
    for (method, path), operation in OPERATIONS.items():
        paths.setdefault(path, {})[method] = _operation(path, operation)
    return {
        "openapi": "3.1.0",
        "info": {"title": TITLE, "version": VERSION, "description": DESCRIPTION},
        "paths": paths,
        "components": {"schemas": _components()},
    }


def _components() -> dict[str, Any]:
    found = schemas.components(
        [
            EnvironmentSpec,
            EvaluationRequest,
            RolloutChanges,
            EnvironmentDescription,
            EvaluationResult,
            EvaluationLine,
            RolloutDescription,
            Status,
            Health,
            Refusal,
        ]
    )
    properties = found[EnvironmentSpec.__name__]["properties"]
    found[CHANGES] = {
        "title": CHANGES,
        "description": "What to change of an environment; what is left out stays as it is.",
        "type": "object",
        "properties": {key: {word: value for word, value in properties[key].items() if word != "default"} for key in PATCHABLE},
        "additionalProperties": False,
    }
    return found


def _operation(path: str, operation: Operation) -> dict[str, Any]:
    documented: dict[str, Any] = {
        "tags": [operation.tag],
        "summary": operation.summary,
        "description": operation.description,
        "parameters": [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}, "example": PYTHON_ENVIRONMENT["name"]}
            for name in re.findall(r"{(\w+)}", path)
        ],
        "responses": dict(_responses(path, operation)),
    }
    if operation.request is not None:
        examples = {
            re.sub(r"\W+", "_", summary.lower()): {"summary": summary, "value": body}
            for summary, body in operation.requests.items()
        }
        content = {"schema": {"$ref": schemas.REFERENCE.format(name=operation.request)}, "examples": examples}
        documented["requestBody"] = {"required": True, "content": {"application/json": content}}
    return documented


def _of_every(path: str, operation: Operation) -> dict[int, str]:
    """Refusals that an operation has in common with others."""
    found = {} if path in OPEN_PATHS else {401: REFUSAL}
    return found if operation.request is None else {**found, **BODY_REFUSALS}


def _responses(path: str, operation: Operation) -> Iterable[tuple[str, dict[str, Any]]]:
    if operation.answer is None:
        yield str(operation.status), {"description": "Done; no body."}
    else:
        media_type = "text/plain" if operation.answer is str else operation.media_type
        [schema], _ = msgspec.json.schema_components([operation.answer], ref_template=schemas.REFERENCE)
        yield (
            str(operation.status),
            {"description": "Done.", "content": {media_type: {"schema": schema, "example": operation.example}}},
        )
    for status, sentence in sorted({**_of_every(path, operation), **operation.refusals}.items()):
        content = {"schema": schemas.reference(Refusal), "example": {"detail": sentence}}
        yield str(status), {"description": _REASONS[status], "content": {"application/json": content}}
