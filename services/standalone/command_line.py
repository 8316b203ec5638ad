"""The `headrace` command. Nothing heavy is imported before the arguments are parsed."""

import argparse
import os
import sys
from collections.abc import Sequence
from typing import Final

from services.standalone import arguments as command_line_arguments

INTERRUPTED: Final = 130
READER_GONE: Final = 141
"""A shell's convention for SIGPIPE: `headrace rollouts | head` is no failure of ours."""
DEFAULT_LAST: Final = 5


def main(arguments: Sequence[str] | None = None) -> int:
    options = command_line_arguments.parser().parse_args(arguments)

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
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # For what Python flushes at its exit.
        return READER_GONE


def _run(options: argparse.Namespace) -> int:
    match options.command:
        case "up":
            from services.standalone import up

            return up.run(options.config, options.overrides, external_redis=options.external_redis)
        case "status":
            from services.standalone import status

            return status.run(options.config, options.overrides, as_json=options.json)
        case "environments":
            return _run_environments(options)
        case "rollouts":
            return _run_rollouts(options)
        case "doctor":
            from services.standalone.doctor import examination

            return examination.run(options.config, options.overrides, as_json=options.json)
        case "evaluate":
            from services.standalone import evaluate

            return evaluate.run(
                options.config,
                options.overrides,
                checkpoint=options.checkpoint,
                num_episodes=options.episodes,
                is_greedy=options.greedy,
                environments=options.environments,
                output=options.output,
                as_json=options.json,
            )
        case _:
            from services.standalone import demo

            return demo.run(options.directory, seed=options.seed, overrides=options.overrides)


def _run_environments(options: argparse.Namespace) -> int:
    from services.standalone import environments
    from services.standalone.run_location import locate
    from shared.errors import ConfigurationError

    if options.config is None:
        raise ConfigurationError("headrace environments must know the run; give its run file with --config")
    configuration = locate(options.config, [*options.overrides, *options.action_overrides])
    match options.action:
        case "add":
            return environments.run_add(configuration, options.file, as_json=options.json)
        case "show":
            return environments.run_show(configuration, options.name, as_json=options.json)
        case "pause" | "resume":
            is_paused = options.action == "pause"
            return environments.run_pause(configuration, options.name, is_paused=is_paused, as_json=options.json)
        case "weight":
            return environments.run_weight(configuration, options.name, options.value, as_json=options.json)
        case "remove":
            return environments.run_remove(configuration, options.name, as_json=options.json)
        case _:
            return environments.run_list(configuration, as_json=options.json)


def _run_rollouts(options: argparse.Namespace) -> int:
    from services.standalone import rollouts
    from services.standalone.run_location import locate

    default = 0 if options.follow else DEFAULT_LAST
    return rollouts.run(
        locate(options.config, options.overrides),
        last=default if options.last is None else options.last,
        environment=options.environment,
        does_follow=options.follow,
        as_json=options.json,
    )


def _fail(error: Exception, exit_code: int) -> int:
    print(f"headrace: {error}", file=sys.stderr)  # noqa: T201
    return exit_code


if __name__ == "__main__":
    sys.exit(main())
