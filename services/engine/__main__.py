"""`python -m services.engine`: one SGLang engine, as the run file describes it."""

import argparse
import os
import sys
from pathlib import Path
from typing import NoReturn

EXAMPLES = """examples:
  python -m services.engine --config run.yaml --port 30000
  python -m services.engine --config run.yaml --port 30000 --host 0.0.0.0 --set engines.dtype=float32
"""


def main() -> NoReturn:
    parser = argparse.ArgumentParser(
        prog="python -m services.engine",
        description="Replaces itself with a stock SGLang server for the model of a run.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--config", type=Path, required=True, help="the run file")
    parser.add_argument("--port", type=int, required=True, help="where the engine listens")
    parser.add_argument("--host", default="127.0.0.1", help="the address it listens on (default: %(default)s)")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override one key of the run file")
    arguments = parser.parse_args()

    from services.engine.launch import engine_command, engine_environment, require_device, require_sglang
    from shared import configuration
    from shared.errors import ConfigurationError

    try:
        require_sglang()
        run = configuration.load(arguments.config, overrides=arguments.set)
        require_device(run.engines)
    except ConfigurationError as error:
        sys.stderr.write(f"{error}\n")
        sys.exit(2)
    command = engine_command(run, host=arguments.host, port=arguments.port)
    os.execve(command[0], command, engine_environment(run, os.environ))  # noqa: S606


if __name__ == "__main__":
    main()
