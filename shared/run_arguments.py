"""The arguments of every process that reads a run file. Imports argparse only, so that `--help` answers at once."""

import argparse
from pathlib import Path
from typing import Final

BAD_INPUT: Final = 2
"""Exit status of a process that cannot use what it was given: started again, it would end the same way."""


def run_parser(*, prog: str, description: str | None, epilog: str) -> argparse.ArgumentParser:
    """A parser whose result has `config`, the run file's path, and `overrides`, a list of KEY=VALUE for `configuration.load`."""
    parser = argparse.ArgumentParser(
        prog=prog, description=description, epilog=epilog, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", type=Path, required=True, help="the run file")
    parser.add_argument(
        "--set",
        dest="overrides",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="override one key of the run file; repeatable",
    )
    return parser
