"""`python -m services.engine`: one SGLang engine, as the run file describes it."""

import os
import sys
from typing import NoReturn

from shared.run_arguments import run_parser

EXAMPLES = """examples:
  python -m services.engine --config run.yaml --port 30000
  python -m services.engine --config run.yaml --port 30000 --host 0.0.0.0 --set engines.dtype=float32
"""


def main() -> NoReturn:
    parser = run_parser(
        prog="python -m services.engine",
        description="Replaces itself with a stock SGLang server for the model of a run.",
        epilog=EXAMPLES,
    )
    parser.add_argument("--port", type=int, required=True, help="where the engine listens")
    parser.add_argument("--host", default="127.0.0.1", help="the address it listens on (default: %(default)s)")
    arguments = parser.parse_args()

    from services.engine.launch import engine_command, engine_environment, require_device, require_sglang
    from shared import configuration
    from shared.errors import ConfigurationError

    try:
        require_sglang()
        run = configuration.load(arguments.config, overrides=arguments.overrides)
        require_device(run.engines)
    except ConfigurationError as error:
        sys.stderr.write(f"{error}\n")
        sys.exit(2)
    command = engine_command(run, host=arguments.host, port=arguments.port)
    os.execve(command[0], command, engine_environment(run, os.environ))  # noqa: S606


if __name__ == "__main__":
    main()
