"""Trains the policy of a run on the trajectories its agents record, and pushes every update to its engines."""

import argparse
import os
import sys
from collections.abc import Sequence

from shared.run_arguments import BAD_INPUT, run_parser

EXAMPLES = """\
examples:
  one rank:                       python trainer/train.py --config run.yaml
  all GPUs of this machine:       deepspeed trainer/train.py --config run.yaml
  two CPU ranks:                  deepspeed --num_gpus 2 trainer/train.py --config run.yaml
  several machines:               deepspeed --hostfile hosts trainer/train.py --config run.yaml
  another value for one setting:  python trainer/train.py --config run.yaml --set trainer.learning_rate=1e-6

SIGTERM or Ctrl-C: finishes the update under way, writes a checkpoint, and exits with 0. Started again, it resumes there.
"""
FAILED = 1


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = run_parser(prog="trainer/train.py", description=__doc__, epilog=EXAMPLES)
    parser.add_argument("--local_rank", help=argparse.SUPPRESS)  # DeepSpeed's launcher adds it.
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    parsed = parse_arguments(arguments)
    import redis

    from shared import configuration
    from shared.errors import ConfigurationError, HeadraceError
    from trainer import redis_connection

    try:
        run = configuration.load(parsed.config, overrides=parsed.overrides)
        redis_connection.require(run.redis)
        # Last, because torch and DeepSpeed take seconds to import.
        from trainer.startup import training
        from trainer.stopping import StopSignal

        stop = StopSignal()
        stop.install()
        with training(run, stop) as loop:
            loop.run()
    except ConfigurationError as error:
        return _fail(error, BAD_INPUT)
    except (HeadraceError, redis.ConnectionError, redis.TimeoutError) as error:
        return _fail(error, FAILED)
    return 0


def _fail(error: Exception, status: int) -> int:
    rank = os.environ.get("RANK", "0")
    sys.stderr.write(f"trainer{'' if rank == '0' else f' rank {rank}'}: {error}\n")
    return status


if __name__ == "__main__":
    sys.exit(main())
