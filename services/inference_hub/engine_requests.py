"""What an engine is asked to load, by transport. Pure functions: a bucket as the trainer announced it → SGLang's call."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from services.inference_hub.weight_groups import WeightGroup
from shared.configuration import WeightTransport
from shared.errors import WeightUpdateError

OPENS_SESSION: Final[Mapping[WeightTransport, bool]] = {"broadcast": True, "tensor": True, "disk": False}
"""SGLang loads from disk outside a weight session, and by the others only within one."""


@dataclass(frozen=True)
class Bucket:
    """One part of a set of weights. What it needs depends on the transport."""

    is_last: bool
    names: Sequence[str] = ()
    dtypes: Sequence[str] = ()
    shapes: Sequence[Sequence[int]] = ()
    load_format: str | None = None
    path: str | None = None
    """disk: the folder of the whole set."""
    handles: Mapping[str, Sequence[str]] | None = None
    """tensor: by engine, for each of its ranks, where the bucket's memory is; base64."""


def check_bucket(group: WeightGroup, bucket: Bucket) -> None:
    """Raises: WeightUpdateError if the group's transport cannot carry this bucket."""
    transport = group.master.transport
    missing = {
        "broadcast": _missing_layout(bucket),
        "disk": None if bucket.path and bucket.is_last else "a path, and is_last because it is the whole set",
        "tensor": _missing_handles(group, bucket),
    }[transport]
    if missing:
        raise WeightUpdateError(
            f"a bucket of weight group {group.name} goes over {transport} and must have {missing}; send it anew"
        )


def _missing_layout(bucket: Bucket) -> str | None:
    counts = {len(bucket.names), len(bucket.dtypes), len(bucket.shapes)}
    if len(counts) == 1 and bucket.names:
        return None
    return (
        "a name, a dtype and a shape for each tensor, "
        f"got {len(bucket.names)} names, {len(bucket.dtypes)} dtypes and {len(bucket.shapes)} shapes"
    )


def _missing_handles(group: WeightGroup, bucket: Bucket) -> str | None:
    expected = {member.engine.id: member.tensor_parallel_size for member in group.members}
    found = {engine_id: len(handles) for engine_id, handles in (bucket.handles or {}).items()}
    return None if found == expected else f"one handle for each rank of each engine, {expected}, got {found}"


def load_request(
    group: WeightGroup, bucket: Bucket, engine_id: str, *, version: int, flushes_cache: bool
) -> tuple[str, dict[str, Any]]:
    """Path and body of the call by which the engine loads `bucket`. The last one names the version."""
    common = {"weight_version": str(version) if bucket.is_last else None, "flush_cache": flushes_cache and bucket.is_last}
    match group.master.transport:
        case "broadcast":
            layout = {"names": bucket.names, "dtypes": bucket.dtypes, "shapes": bucket.shapes, "load_format": bucket.load_format}
            return "update_weights_from_distributed", {**layout, "group_name": group.name, **common}
        case "disk":
            return "update_weights_from_disk", {"model_path": bucket.path, "load_format": "safetensors", **common}
        case "tensor":
            assert bucket.handles is not None
            handles = bucket.handles[engine_id]
            return "update_weights_from_tensor", {
                "serialized_named_tensors": handles,
                "load_format": "flattened_bucket",
                **common,
            }
