"""DeepSpeed's own JSON, as the user gave it, completed with what the run file decides.

Nothing the user wrote is rewritten: where DeepSpeed's JSON and the run file contradict each other, both values are named and
training does not start. The value "auto" stands for the run file's.
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shared.configuration import TrainerSection
from shared.errors import ConfigurationError

ZERO_STAGES = (1, 2, 3)
AUTO = "auto"
NEVER_PRINT = 10**12


def deepspeed_settings(trainer: TrainerSection, *, is_cpu: bool, key: str = "trainer.deepspeed") -> dict[str, Any]:
    """The configuration for `deepspeed.initialize`. Raises: ConfigurationError on a contradiction.

    Args: key: where the user wrote `trainer.deepspeed`, for messages.
    """
    user = trainer.deepspeed if isinstance(trainer.deepspeed, dict) else _read(Path(trainer.deepspeed), key)
    if "scheduler" in user:
        _require_no_schedule(trainer, user["scheduler"], key)
    settings = _merge(_defaults(is_cpu=is_cpu), user)
    settings = _impose(settings, _decided(trainer), path=key)
    stage = settings["zero_optimization"]["stage"]
    if stage not in ZERO_STAGES:
        raise ConfigurationError(f"{key}.zero_optimization.stage must be 1, 2 or 3, got {stage!r}")
    return settings


def uses_zero_3(trainer: TrainerSection) -> bool:
    """No rank holds the whole model. Raises: ConfigurationError as `deepspeed_settings` does."""
    return bool(deepspeed_settings(trainer, is_cpu=True)["zero_optimization"]["stage"] == max(ZERO_STAGES))


def _require_no_schedule(trainer: TrainerSection, scheduler: Any, key: str) -> None:
    """DeepSpeed's scheduler steps once an optimizer step and starts from `trainer.learning_rate`; ours would overrule it."""
    ours = {"learning_rate_schedule": "constant", "warmup_updates": 0, "final_learning_rate": 0.0}
    for name, nothing in ours.items():
        if (value := getattr(trainer, name)) != nothing:
            raise ConfigurationError(
                f"{key}.scheduler is {scheduler!r} where trainer.{name}={value!r} makes a schedule too; remove one of them"
            )


def _defaults(*, is_cpu: bool) -> dict[str, Any]:
    """What the user may change."""
    adam = {"torch_adam": True} if is_cpu else {}
    return {
        "optimizer": {"type": "AdamW", "params": adam},
        "zero_optimization": {"stage": 1},
        "steps_per_print": NEVER_PRINT,
    }


def _decided(trainer: TrainerSection) -> dict[str, Any]:
    """What the run file says, and what the planning of micro-batches by tokens implies."""
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": trainer.max_grad_norm,
        "bf16": {"enabled": trainer.dtype == "bfloat16"},
        "fp16": {"enabled": False},
        "optimizer": {
            "params": {
                "lr": trainer.learning_rate,
                "betas": list(trainer.adam_betas),
                "weight_decay": trainer.weight_decay,
            }
        },
    }


def _read(path: Path, key: str) -> dict[str, Any]:
    try:
        settings = json.loads(path.read_text())
    except OSError as error:
        raise ConfigurationError(
            f"{key} must be settings or the path of a JSON file, got {str(path)!r}: {os.strerror(error.errno or 0)}"
        ) from error
    except json.JSONDecodeError as error:
        raise ConfigurationError(f"{key}: {path} is not JSON: {error}") from error
    if not isinstance(settings, dict):
        raise ConfigurationError(f"{key}: {path} must hold an object, got {type(settings).__name__}")
    return settings


def _merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in over.items():
        below = base.get(key)
        merged[key] = _merge(below, value) if isinstance(below, dict) and isinstance(value, dict) else value
    return merged


def _impose(user: Mapping[str, Any], decided: Mapping[str, Any], *, path: str) -> dict[str, Any]:
    """`user` with `decided` added where it says nothing or "auto"."""
    settings = dict(user)
    for key, value in decided.items():
        given = user.get(key, AUTO)
        if isinstance(value, dict):
            settings[key] = _impose({} if given == AUTO else given, value, path=f"{path}.{key}")
        elif given in (AUTO, value):
            settings[key] = value
        else:
            raise ConfigurationError(
                f"{path}.{key} is {given!r} where the run file's own settings make it {value!r}; remove it, or make both the same"
            )
    return settings
