"""`python -m services.env_agents`: runs the agent process."""

import logging
import os
import sys
import traceback

from shared.configuration import Configuration, load
from shared.errors import HeadraceError
from shared.run_arguments import run_parser

_EXAMPLES = """\
examples:
  python -m services.env_agents --config run.yaml
  python -m services.env_agents --config run.yaml --set env_agents.port=0 --set env_agents.lease_s=10
"""


def main() -> int:
    parser = run_parser(
        prog="python -m services.env_agents",
        description="Run episodes of registered environments and record them in the trajectory stream.",
        epilog=_EXAMPLES,
    )
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    try:
        _run(load(arguments.config, overrides=arguments.overrides))
    except HeadraceError as error:
        print(error, file=sys.stderr)  # noqa: T201
        return 2
    except Exception:
        traceback.print_exc()
        return 1
    return 0


def _run(configuration: Configuration) -> None:
    import asyncio

    import uvloop

    from services.env_agents.application import run

    # The runner is not closed: that would wait for threads, and one that hangs in somebody's environment never ends.
    asyncio.Runner(loop_factory=uvloop.new_event_loop).run(run(configuration))


if __name__ == "__main__":
    exit_code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)
