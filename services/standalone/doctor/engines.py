"""Engines that run already: the hub's view of each, and what the engine says of itself."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from services.standalone.connections import RefusedError, ServiceApi, UnreachableError
from services.standalone.doctor import parts
from services.standalone.doctor.finding import Finding, ok, problem, warning
from services.standalone.doctor.packages import ANY_VERSION
from services.standalone.doctor.parts import Part, port_at
from shared.hub_tokens import hub_tokens
from shared.versions import version_of_label

START_LIKE_THIS: Final = "start it with `python -m services.engine`, which sets this"


class EngineAnswer(msgspec.Struct, frozen=True):
    """What an engine says of itself in /server_info and /model_info. `weight_version` is None in an SGLang without labels."""

    version: str
    dp_size: int = 1
    weight_version: str | None = None


class HubView(msgspec.Struct, frozen=True):
    """What the hub's GET /engines says of one engine."""

    url: str
    state: str
    problem: str | None = None


class EngineFacts(msgspec.Struct, frozen=True):
    """`answer` is None if no SGLang answers; `view` if the hub does not know it; `is_hub_up` whether there is a hub to ask."""

    part: Part
    answer: EngineAnswer | None
    view: HubView | None
    is_hub_up: bool


def look_at_hubs_engines(hub_address: str) -> list[HubView] | None:
    """None if no hub answers."""
    try:
        with ServiceApi(hub_address, timeout_s=parts.TIMEOUT_S, access=hub_tokens().for_control) as api:
            return msgspec.convert(api.get("/engines"), list[HubView])
    except (UnreachableError, RefusedError, msgspec.ValidationError):
        return None


def look(url: str, views: Sequence[HubView] | None) -> EngineFacts:
    answer, trouble = _ask(url)
    words = None if answer is None else f"SGLang {answer.version}, weights {answer.weight_version}"
    part = Part(f"engine {url}", "engines.urls", url, port_at(url), words, trouble)
    view = next((view for view in views or () if view.url == url), None)
    return EngineFacts(part, answer, view, is_hub_up=views is not None)


def check(engine: EngineFacts, *, engine_version: str, is_run_up: bool) -> list[Finding]:
    """Its row, and one for each thing that keeps it from taking part."""
    rows = [parts.check(engine.part, is_run_up=is_run_up)]
    if engine.answer is not None:
        rows += _check_answer(engine.part.name, engine.answer, engine_version)
    if engine.is_hub_up:
        rows += _check_view(engine)
    return rows


def _check_answer(name: str, answer: EngineAnswer, wanted: str) -> list[Finding]:
    rows = []
    if wanted not in (ANY_VERSION, answer.version):
        rule = f"inference_hub.engine_version is {wanted}"
        remedy = f"install that version, or set inference_hub.engine_version={ANY_VERSION} to accept every one"
        rows.append(problem(name, f"SGLang {answer.version}", rule, remedy))
    if answer.dp_size != 1:
        rule = "dp_size is 1, because SGLang pushes weights to no other"
        rows.append(problem(name, f"dp_size {answer.dp_size}", rule, "start one engine for each replica"))
    if answer.weight_version is None:
        rule = "an engine labels its weights, so that every token carries its version"
        rows.append(problem(name, "no weight_version in /model_info", rule, f"install SGLang {wanted}"))
    elif version_of_label(answer.weight_version) is None:
        rule = "the label of an engine's weights is a policy version"
        rows.append(problem(name, f"label {answer.weight_version!r}", rule, START_LIKE_THIS))
    return rows


def _check_view(engine: EngineFacts) -> list[Finding]:
    name, rule, view = engine.part.name, "the hub has it ready", engine.view
    if view is None:
        return [warning(name, "not registered", rule, f"POST /engines at the hub with its url, {engine.part.address}")]
    found = f"{view.state}: {view.problem}" if view.problem else view.state
    match view.state:
        case "ready":
            return [ok(name, found, rule)]
        case "joining" | "syncing" | "draining":
            return [warning(name, found, rule, "wait for it; `headrace status` shows its state")]
        case _:
            return [problem(name, found, rule, parts.SEE_LOGS)]


def _ask(url: str) -> tuple[EngineAnswer | None, str]:
    """What the engine says, or why it says nothing."""
    try:
        with ServiceApi(url, timeout_s=parts.TIMEOUT_S) as api:
            told: Mapping[str, Any] = {**api.get("/server_info"), **_label(api.get("/model_info"))}
            return msgspec.convert(told, EngineAnswer), ""
    except (UnreachableError, RefusedError) as error:
        return None, str(error)
    except (msgspec.ValidationError, TypeError, AttributeError):
        return None, "its answer is not SGLang's"


def _label(model_info: Mapping[str, Any]) -> dict[str, Any]:
    return {"weight_version": model_info.get("weight_version")}
