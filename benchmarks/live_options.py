"""What the benchmarks of a live run have in common on their command lines."""

import argparse
from datetime import datetime
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser, *, directory: str) -> None:
    """Args: directory: the default of --directory."""
    parser.add_argument("--directory", type=Path, default=Path(directory), help=f"where everything goes (default {directory})")
    parser.add_argument("--policy", type=Path, help="one made by examples.tiny_policy (default: made in --directory)")


def prepare(options: argparse.Namespace) -> tuple[Path, Path]:
    """A new folder for one run under --directory, and the policy that it trains."""
    from benchmarks.live_run import make_policy

    options.directory.mkdir(parents=True, exist_ok=True)
    policy = make_policy((options.policy or options.directory / "policy").absolute())
    folder = (options.directory / f"{datetime.now():%Y%m%d-%H%M%S}").absolute()
    folder.mkdir()
    return folder, policy
