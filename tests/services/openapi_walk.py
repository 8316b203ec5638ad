"""Walks an OpenAPI document as its readers do: what every operation says, and whether its examples are what it promises."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jsonschema


@dataclass(frozen=True)
class Operation:
    method: str
    path: str
    body: dict[str, Any]

    def __str__(self) -> str:
        return f"{self.method.upper()} {self.path}"

    @property
    def request_examples(self) -> dict[str, Any]:
        """Bodies by name."""
        content = self.body.get("requestBody", {}).get("content", {}).get("application/json", {})
        named = {name: example["value"] for name, example in content.get("examples", {}).items()}
        return {**named, **({"example": content["example"]} if "example" in content else {})}

    @property
    def refusals(self) -> set[int]:
        return {int(status) for status in self.body["responses"] if int(status) >= 400}


def operations(document: dict[str, Any]) -> list[Operation]:
    return [Operation(method, path, body) for path, methods in document["paths"].items() for method, body in methods.items()]


def gaps(document: dict[str, Any]) -> list[str]:
    """What the document leaves unsaid or says wrongly, one line each."""
    return [f"{operation}: {gap}" for operation in operations(document) for gap in _gaps(operation, document)]


def _gaps(operation: Operation, document: dict[str, Any]) -> Iterator[str]:
    body = operation.body
    yield from (f"no {word}" for word in ("summary", "description") if not body.get(word))
    if "requestBody" in body:
        schema = body["requestBody"]["content"]["application/json"]["schema"]
        if not operation.request_examples:
            yield "no example of a request"
        for name, example in operation.request_examples.items():
            yield from (f"request {name}: {problem}" for problem in _problems(example, schema, document))
    if not any(status.startswith("2") for status in body["responses"]):
        yield "no answer of success"
    for status, response in body["responses"].items():
        yield from (f"{status}: {gap}" for gap in _response_gaps(status, response, document))
    for parameter in body.get("parameters", ()):
        if "example" not in parameter and "examples" not in parameter["schema"]:
            yield f"no example of {parameter['name']}"


def _response_gaps(status: str, response: dict[str, Any], document: dict[str, Any]) -> Iterator[str]:
    if status == "204":
        return
    if not response.get("content"):
        yield "no content"
    for content in response.get("content", {}).values():
        if "schema" not in content or "example" not in content:
            yield "no schema or no example"
            continue
        yield from _problems(content["example"], content["schema"], document)
        if status >= "4" and not _is_sentence(content["example"].get("detail", "")):
            yield "its example has no sentence in detail"


def _problems(example: Any, schema: dict[str, Any], document: dict[str, Any]) -> list[str]:
    if not schema:
        return ["an empty schema"]
    rooted = {**schema, "components": document["components"]}
    return [error.message for error in jsonschema.Draft202012Validator(rooted).iter_errors(example)]


def _is_sentence(words: str) -> bool:
    return len(words.split()) >= 5
