"""What /docs and /openapi.json say beyond what FastAPI finds in the control plane: /generate, and an example of every body."""

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, Final

from fastapi import FastAPI

from services.inference_hub.generate_operation import GENERATE_OPERATION, GENERATE_PATH
from services.inference_hub.messages import Problem

DESCRIPTION: Final = """
One address in front of all inference engines. Agents call `/generate` with token ids; weight updates, an engine's death and
aborted requests are only a longer wait to them. Trainers push weights with `/weight_groups` and `/weight_updates`.
Refusals carry a sentence in `detail`. Where the hub has tokens, everything but `/health` needs one in `Authorization: Bearer`:
`/generate` the callers' or the control token, the rest the control token.
"""

REASONS: Final[Mapping[int, str]] = {
    403: "It is not allowed.",
    404: "There is none of this id.",
    409: "The hub is in another state.",
    422: "The body cannot be used.",
    502: "An engine does not do its part.",
    503: "Redis or the engines cannot be used now.",
}


def install(application: FastAPI) -> None:
    """Has `application` serve the completed document, made when it is first asked for."""
    generate: Callable[[], dict[str, Any]] = application.openapi
    application.openapi = cache(lambda: completed(generate()))  # type: ignore[method-assign]  # The way that FastAPI documents.


def refusals(sentence_by_status: Mapping[int, str]) -> dict[int | str, dict[str, Any]]:
    """`responses` of a route that refuses with sentences such as these."""
    return {
        status: {
            "model": Problem,
            "description": REASONS[status],
            "content": {"application/json": {"example": {"detail": sentence}}},
        }
        for status, sentence in sentence_by_status.items()
    }


def completed(document: dict[str, Any]) -> dict[str, Any]:
    """FastAPI's document with /generate, examples, and summaries that are written like sentences.

    Without the validation errors of paths, which no route answers.
    """
    schemas = document["components"]["schemas"]
    for operation in (operation for methods in document["paths"].values() for operation in methods.values()):
        operation["summary"] = operation["summary"].capitalize()
        responses = operation["responses"]
        if "HTTPValidationError" in str(responses.get("422")):
            del responses["422"]
        for holder in (operation.get("requestBody", {}), *responses.values()):
            for content in holder.get("content", {}).values():
                if "example" not in content:
                    content["example"] = example_of(content["schema"], schemas)
    for name in ("HTTPValidationError", "ValidationError"):
        schemas.pop(name, None)
    return {**document, "paths": {GENERATE_PATH: {"post": GENERATE_OPERATION}, **document["paths"]}}


def example_of(schema: Mapping[str, Any], schemas: Mapping[str, Any]) -> Any:
    """A value of `schema`, made of the examples that its fields have."""
    match schema:
        case {"examples": [example, *_]} | {"const": example} | {"default": example} | {"enum": [example, *_]}:
            return example
        case {"$ref": reference}:
            return example_of(schemas[reference.rpartition("/")[2]], schemas)
        case {"type": "array", "items": items}:
            return [example_of(items, schemas)]
        case {"type": "object", "properties": properties}:
            return {name: example_of(field, schemas) for name, field in properties.items()}
    raise AssertionError(f"a field of the control plane's messages must have an example, and {schema} has none")
