"""Where a run writes."""

import os
from dataclasses import dataclass
from pathlib import Path

from services.standalone.doctor.finding import Finding, ok, problem
from services.standalone.doctor.packages import installed_version


@dataclass(frozen=True)
class RunDirectory:
    """`existing` is the directory itself, or the nearest one above it that exists."""

    path: str
    existing: Path
    is_writable: bool
    """`existing` is a directory in which this user makes files."""
    has_trainer: bool = True
    """The trainer's packages are installed here."""


def look(path: Path) -> RunDirectory:
    existing = next(folder for folder in (path.absolute(), *path.absolute().parents) if os.path.exists(folder))
    is_writable = os.path.isdir(existing) and os.access(existing, os.W_OK | os.X_OK)
    return RunDirectory(str(path), existing, is_writable, installed_version("deepspeed") is not None)


def check(directory: RunDirectory) -> Finding:
    """Only the trainer writes: elsewhere, as in the agents' container, the directory may be there to be read."""
    rule = "the trainer can write run.directory"
    if not directory.is_writable:
        found = f"{directory.path}: this user cannot write in {directory.existing}"
        if not directory.has_trainer:
            return ok("run directory", found, f"{rule}, and is not installed here")
        return problem("run directory", found, rule, "change its owner or permissions, or set run.directory")
    is_there = Path(directory.path).absolute() == directory.existing
    return ok("run directory", directory.path if is_there else f"{directory.path}, made at start", rule)
