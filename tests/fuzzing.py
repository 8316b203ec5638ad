"""Requests that schemathesis makes from a service's own OpenAPI document, right and wrong ones; answers have to be as it says."""

from collections.abc import Callable, Collection
from contextlib import suppress

import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.errors import Unsatisfiable
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_schema_conformance,
    status_code_conformance,
)

ANSWER_TIMEOUT_S = 30
CHECKS: list[Callable[..., bool | None]] = [
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
    negative_data_rejection,
]
"""No answer but those that the document has, so no 500, and none but a refusal for what the document excludes."""


def fuzz(url: str, *, num_requests: int, leave_out: Collection[str] = ()) -> list[str]:
    """Makes `num_requests` of each kind to each operation of the service at `url`, but for the paths in `leave_out`.

    Returns the operations that it asked. Raises: schemathesis' failure, with the request as a curl command.
    """
    asked = []
    document = schemathesis.openapi.from_url(f"{url}/openapi.json")
    for result in document.get_all_operations():
        operation = result.ok()
        if operation.path not in leave_out:
            asked.append(operation.label)
            _ask(operation, schemathesis.GenerationMode.POSITIVE, num_requests)
            with suppress(Unsatisfiable):  # Of an operation without parameters nothing can be wrong.
                _ask(operation, schemathesis.GenerationMode.NEGATIVE, num_requests)
    return asked


def _ask(operation: schemathesis.APIOperation, mode: schemathesis.GenerationMode, num_requests: int) -> None:
    @settings(
        max_examples=num_requests,
        deadline=None,
        database=None,
        phases=[Phase.explicit, Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(operation.as_strategy(generation_mode=mode))
    def answers_as_documented(case: schemathesis.Case) -> None:
        case.call_and_validate(checks=CHECKS, timeout=ANSWER_TIMEOUT_S)

    answers_as_documented()
