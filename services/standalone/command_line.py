"""The `headrace` command. Nothing heavy is imported before the arguments are parsed."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

INTERRUPTED = 130

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction[argparse.ArgumentParser]

EXAMPLES = """examples:
  headrace up --config run.yaml
  headrace up --config run.yaml --set run.directory=runs/second --set trainer.learning_rate=1e-5
  HEADRACE_REDIS_URL=redis://redis.internal:6379/0 headrace up --config run.yaml
  headrace status --config run.yaml
  headrace demo
"""
UP_EXAMPLES = """examples:
  headrace up --config examples/demo.yaml
  headrace up --config run.yaml --set inference_hub.port=0 --set env_agents.port=0
  headrace up --config run.yaml --external-redis --set redis.url=redis://10.0.0.5:6379/0

A port of 0 lets the system choose one. What was chosen is in run.yaml in run.directory; what each process prints is also in
run.directory/logs. Ctrl-C stops everything in order, a second Ctrl-C at once. Started again with the same run.directory, the run
goes on where its newest checkpoint is.
"""
STATUS_EXAMPLES = """examples:
  headrace status --config run.yaml
  headrace status --config run.yaml --json | jq .books
"""
DEMO_EXAMPLES = """examples:
  headrace demo
  headrace demo --seed 1 --directory runs/demo-1
"""


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)

    from shared.errors import ConfigurationError, HeadraceError, ProcessError

    try:
        return _run(options)
    except ConfigurationError as error:
        return _fail(error, 2)
    except ProcessError as error:
        for line in error.last_lines:
            print(f"  {line}", file=sys.stderr)  # noqa: T201
        return _fail(error, 1)
    except HeadraceError as error:
        return _fail(error, 1)
    except KeyboardInterrupt:
        return INTERRUPTED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="headrace",
        description="Train tool-using LLM agents by asynchronous reinforcement learning, on one machine.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    up = _command(commands, "up", "start Redis, engines, hub, agents and trainer, and stop them when training ends", UP_EXAMPLES)
    _add_run_file(up)
    up.add_argument("--external-redis", action="store_true", help="use the Redis at redis.url instead of starting one")

    status = _command(commands, "status", "show engines, environments and the ledger of a run", STATUS_EXAMPLES)
    _add_run_file(status)
    status.add_argument("--json", action="store_true", help="as one JSON object")

    demo = _command(commands, "demo", "train the demo's tiny policy to use a calculator, and show that it learns", DEMO_EXAMPLES)
    demo.add_argument("--directory", type=Path, default=Path("runs/demo"), help="where everything goes (default: %(default)s)")
    demo.add_argument("--seed", type=int, default=0, help="of the policy and of the run (default: %(default)s)")
    _add_overrides(demo)
    return parser


def _command(
    commands: "argparse._SubParsersAction[argparse.ArgumentParser]", name: str, text: str, examples: str
) -> argparse.ArgumentParser:
    return commands.add_parser(
        name, help=text, description=text.capitalize() + ".", epilog=examples, formatter_class=argparse.RawDescriptionHelpFormatter
    )


def _add_run_file(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", type=Path, required=True, help="the run file")
    _add_overrides(parser)


def _add_overrides(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--set", dest="overrides", action="append", default=[], metavar="KEY=VALUE", help="override one key of the run file"
    )


def _run(options: argparse.Namespace) -> int:
    match options.command:
        case "up":
            from services.standalone import up

            return up.run(options.config, options.overrides, external_redis=options.external_redis)
        case "status":
            from services.standalone import status

            return status.run(options.config, options.overrides, as_json=options.json)
        case _:
            from services.standalone import demo

            return demo.run(options.directory, seed=options.seed, overrides=options.overrides)


def _fail(error: Exception, exit_code: int) -> int:
    print(f"headrace: {error}", file=sys.stderr)  # noqa: T201
    return exit_code


if __name__ == "__main__":
    sys.exit(main())
