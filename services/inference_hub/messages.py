"""Bodies of the control plane's requests and answers, with the examples its documentation shows."""

from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StringConstraints

from shared.configuration import WeightTransport

_LABEL = r"[A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?"
_NAME = rf"{_LABEL}(\.{_LABEL})*\.?"
_IPV6 = r"[0-9A-Fa-f:.]{2,45}"


def _has_port(url: str) -> str:
    try:
        port = urlsplit(url).port
    except ValueError:
        port = 0
    if port == 0:
        raise ValueError("the port must be from 1 to 65535")
    return url


HostAddress = Annotated[str, StringConstraints(pattern=rf"^({_NAME}|{_IPV6})$", max_length=253)]
"""A name or an IP address."""
EngineUrl = Annotated[
    str,
    StringConstraints(
        strip_whitespace=True, pattern=rf"^https?://({_NAME}|\[{_IPV6}\])(:[0-9]{{1,5}})?(/[!-~]*)?$", max_length=2_000
    ),
    AfterValidator(_has_port),
]


class Message(BaseModel):
    """Base of every body: unknown fields are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Problem(Message):
    """Why a request was refused: rule, value and remedy in a sentence."""

    detail: str = Field(examples=["weight group headrace-1-ab12 is not the current one; form a new one with POST /weight_groups"])
    code: str | None = Field(default=None, description="For programs that react to this problem.", examples=["group_stale"])


class NewEngine(Message):
    url: EngineUrl = Field(description="Where the engine's HTTP API is.", examples=["http://10.0.0.7:30000"])


class EngineDescription(Message):
    id: str = Field(examples=["3f1c9a0d5e77"])
    url: str = Field(examples=["http://10.0.0.7:30000"])
    state: Literal["joining", "syncing", "ready", "suspect", "draining", "quarantined", "gone"] = Field(
        description="Only a ready engine gets calls.", examples=["syncing"]
    )
    version: int | None = Field(description="Policy version in the engine's label; null if unknown.", examples=[11])
    model_path: str = Field(
        description="The model that the engine was started with; empty until it has answered.", examples=["/models/qwen3-8b"]
    )
    tensor_parallel_size: int = Field(examples=[8])
    outstanding_calls: int = Field(description="Generate calls it is answering.", examples=[0])
    outstanding_tokens: int = Field(description="Tokens it has to prefill and sample for them, at most.", examples=[0])
    problem: str | None = Field(
        description="Why it is not ready, as a sentence.",
        examples=[
            "it holds version 11 of epoch 1763-a41f, and version 12 of epoch 1763-a41f is in force; the next weight update makes "
            "it ready"
        ],
    )


class EngineUsage(Message):
    """Where an engine's time went since this hub knows it; two readings tell what lies between them."""

    id: str = Field(examples=["3f1c9a0d5e77"])
    tensor_parallel_size: int = Field(examples=[8])
    max_running_calls: int | None = Field(
        description="Calls it can run at the same time; null if it has not said so.", examples=[256]
    )
    max_tokens: int | None = Field(description="Tokens its KV cache holds; null if it has not said so.", examples=[1_200_000])
    ready_s: float = Field(description="Seconds in which it was ready for calls.", examples=[3_600.0])
    idle_s: float = Field(description="Of these, without a call of this hub.", examples=[420.0])
    used_s: float = Field(
        description="Of these, each weighted by the share of its limits that its calls used; 0 if it has told none.",
        examples=[1_590.0],
    )


class Quarantine(Message):
    problem: str = Field(
        min_length=1,
        max_length=4_000,
        description="Why it cannot take this run's weights, as a sentence.",
        examples=[
            "engine http://10.0.0.7:30000 must serve the model of run.model_path, and its own has other weights: lm_head is …"
        ],
    )


class NewWeightGroup(Message):
    epoch: str = Field(
        pattern=r"^[A-Za-z0-9_.-]{1,64}$", description="Names one life of the trainer; never used twice.", examples=["1763-a41f"]
    )
    master_address: HostAddress = Field(
        description="Where the trainer's rank 0 waits for the engines to join.",
        examples=["10.0.0.2"],
    )
    master_port: int = Field(ge=1, le=65535, examples=[29_600])
    presence_port: int | None = Field(
        default=None,
        ge=1,
        le=65535,
        description="At the same address, where it listens as long as it lives: no other trainer may push then. null: master_port.",
        examples=[29_599],
    )
    transport: WeightTransport = Field(default="broadcast", description="How the weights travel.")
    backend: Literal["gloo", "nccl"] = Field(default="nccl", description="Of transport broadcast.", examples=["nccl"])
    engine_ids: list[str] | None = Field(
        default=None, description="The engines it is for; null for all live ones.", examples=[None]
    )
    run_id: str | None = Field(default=None, description="The trainer's run.id; refused unless the hub's.", examples=["demo"])


class GroupMember(Message):
    id: str = Field(examples=["3f1c9a0d5e77"])
    url: str = Field(examples=["http://10.0.0.7:30000"])
    rank_offset: int = Field(description="The engine's first rank in the group.", examples=[1])
    tensor_parallel_size: int = Field(examples=[8])


class WeightGroupDescription(Message):
    group_name: str = Field(examples=["headrace-1763-a41f-ab12cd34"])
    world_size: int = Field(description="1 + the engines' tensor-parallel ranks; the trainer is rank 0.", examples=[9])
    engines: list[GroupMember]


class NewWeightUpdate(Message):
    group_name: str = Field(examples=["headrace-1763-a41f-ab12cd34"])
    version: int = Field(ge=0, description="The policy version of the weights to come.", examples=[13])
    mode: Literal["in_place", "retract"] = Field(
        default="in_place", description="Running requests keep their KV cache, or recompute it under the new weights."
    )
    rolling: bool = Field(default=False, description="Engines outside the group go on with the weights that were in force.")


class WeightUpdateDescription(Message):
    update_id: str = Field(examples=["5d0b4c9e7b8f4b1c9a55a1d1b6a3c2f0"])


class Commit(Message):
    checksums: dict[str, str] | None = Field(
        default=None,
        description="The trainer's, by the engine's tensor names, to compare with each engine's; {} compares engines with each "
        "other, null compares nothing.",
        examples=[None],
    )


class UpdateReport(Message):
    """A committed update. Times are in seconds."""

    version: int = Field(examples=[13])
    engines: list[str] = Field(description="URLs of those that hold the version now.", examples=[["http://10.0.0.7:30000"]])
    left_out: dict[str, str] = Field(
        description="URL of each engine that was left out on the way, and why.",
        examples=[{"http://10.0.0.8:30000": "engine http://10.0.0.8:30000 lost the connection during /end_weight_update"}],
    )
    is_verified: bool = Field(description="Checksums were compared.", examples=[True])
    pause_s: float = Field(description="From the first pause sent to the last engine that went on.", examples=[0.071])
    pause_call_s: float = Field(description="Of that, until every engine had ended its step.", examples=[0.009])
    load_s: float = Field(description="Of that, until the last weight session was closed.", examples=[0.055])
    verify_s: float = Field(description="Of that, for checksums.", examples=[0.003])
    resume_s: float = Field(description="Of that, until every engine went on.", examples=[0.004])


class WeightUpdateState(Message):
    state: str = Field(examples=["loading"])
    report: UpdateReport | None = Field(
        default=None, description="Of an update that was committed with this bucket.", examples=[None]
    )


class NewBucket(Message):
    """One part of a set of weights: of transport broadcast its tensors, in the order in which the trainer sends them."""

    names: list[str] = Field(default=[], examples=[["model.embed_tokens.weight", "model.norm.weight"]])
    dtypes: list[str] = Field(default=[], description="torch's names without `torch.`.", examples=[["bfloat16", "bfloat16"]])
    shapes: list[list[int]] = Field(default=[], examples=[[[151936, 4096], [4096]]])
    load_format: Literal["flattened_bucket"] | None = Field(
        default=None,
        description="flattened_bucket: one uint8 broadcast for all tensors; null: one for each.",
        examples=["flattened_bucket"],
    )
    path: str | None = Field(default=None, description="Of transport disk: the folder of the whole set.", examples=[None])
    handles: dict[str, list[str]] | None = Field(
        default=None, description="Of transport tensor: by engine id, base64 for each of its ranks.", examples=[None]
    )
    is_last: bool = Field(description="With this bucket the set is complete.", examples=[True])
    commit: Commit | None = Field(
        default=None, description="With the last bucket: commit as soon as it is loaded, without another request.", examples=[None]
    )


class Weights(Message):
    """What is in force, and who lacks it."""

    version: int = Field(examples=[12])
    epoch: str = Field(description="Names the trainer that pushed it.", examples=["1763-a41f"])
    ready_engines: int = Field(description="Engines that calls go to.", examples=[7])
    wanting_engines: list[str] = Field(
        description="Ids of live engines that have to be brought to this version before their first call.",
        examples=[["3f1c9a0d5e77"]],
    )
    update: str = Field(description="State of the last weight update.", examples=["committed"])


class Health(Message):
    status: Literal["ok"] = "ok"


class Readiness(Message):
    ready_engines: int = Field(ge=1, examples=[2])


class Status(Message):
    """The hub at one instant."""

    run: str = Field(description="The run it serves, by run.id.", examples=["demo"])
    version: int = Field(description="The policy version in force.", examples=[12])
    epoch: str = Field(description="Names the trainer that pushed it.", examples=["1763-a41f"])
    engines: dict[str, int] = Field(description="Number of engines by state.", examples=[{"ready": 2}])
    calls: int = Field(description="Generate calls in the hub.", examples=[64])
    held_calls: int = Field(description="Of those, waiting because no engine may take any.", examples=[3])
    held_because: list[str] = Field(examples=[["a weight update pauses generation"]])
    weight_update: str = Field(description="idle, preparing, paused, loading, committed or failed.", examples=["idle"])
    weight_groups: list[str] = Field(examples=[["headrace-1763-a41f-ab12cd34"]])
