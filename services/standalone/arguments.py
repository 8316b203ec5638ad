"""The command line of `headrace`: its commands, their options and examples. Imports nothing but argparse."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction[argparse.ArgumentParser]

EXAMPLES: Final = """examples:
  headrace doctor --config run.yaml
  headrace up --config run.yaml
  headrace status --config run.yaml
  headrace environments --config run.yaml
  headrace rollouts --config run.yaml --follow
  headrace evaluate --config run.yaml --checkpoint runs/x/checkpoints/v00010
  HEADRACE_HUB_URL=http://control:8800 HEADRACE_AGENTS_URL=http://control:8801 headrace status --config run.yaml
  headrace demo

Every command but demo takes the run file, and --set for one key of it. A password of Redis is given in HEADRACE_REDIS_PASSWORD, or
in a file that HEADRACE_REDIS_PASSWORD_FILE names.
"""
UP_EXAMPLES: Final = """examples:
  headrace up --config examples/demo.yaml
  headrace up --config run.yaml --set run.directory=runs/second --set trainer.learning_rate=1e-5
  headrace up --config run.yaml --set inference_hub.port=0 --set env_agents.port=0
  headrace up --config run.yaml --external-redis --set redis.url=redis://10.0.0.5:6379/0

A port of 0 lets the system choose one. What was chosen is in run.yaml in run.directory; what each process prints is also in
run.directory/logs. Ctrl-C stops everything in order, a second Ctrl-C at once. Started again with the same run.directory, the run
goes on where its newest checkpoint is. A process that ends unasked after it has worked is started again, at most up.max_restarts
times in up.restart_window_s; up.agent_processes says how many agent processes there are.
"""
STATUS_EXAMPLES: Final = """examples:
  headrace status --config run.yaml
  headrace status --config run.yaml --json | jq .books
"""
ENVIRONMENTS_EXAMPLES: Final = """examples:
  headrace environments --config run.yaml
  headrace environments --config run.yaml --json | jq '.[] | {name, statistics}'
  headrace environments add weather.yaml --config run.yaml
  headrace environments show weather --config run.yaml
  headrace environments pause weather --config run.yaml
  headrace environments weight weather 0.5 --config run.yaml
  headrace environments remove weather --config run.yaml

Statistics are over recent episodes. weather.yaml is an entry of env_agents.environments in a file of its own:
  name: weather
  import_path: examples.weather:Weather
  tasks: {kind: parquet, path: examples/weather.parquet}
"""
ROLLOUTS_EXAMPLES: Final = """examples:
  headrace rollouts --config run.yaml
  headrace rollouts --config run.yaml --last 1 --environment calculator
  headrace rollouts --config run.yaml --follow | grep -A2 '^  policy'
  headrace rollouts --config run.yaml --follow --json | jq 'select(.reward > 0) | .turns[].sampled'

The source is the Redis stream, read so that the trainer never notices. An entry leaves the stream when it has been trained and a
checkpoint holds what it taught, or when its group is discarded; what has left is not shown. --follow shows every episode that ends
from now on, until Ctrl-C; it misses none unless one leaves the stream while the output is held up.
"""
EVALUATE_EXAMPLES: Final = """examples:
  headrace evaluate --config run.yaml --checkpoint runs/x/checkpoints/v00010
  headrace evaluate --config run.yaml --checkpoint models/Qwen3-8B --episodes 512 --greedy --output runs/baseline
  headrace evaluate --config run.yaml --checkpoint runs/x/checkpoints/v00010 --environment calculator --json | jq .results

It starts a Redis, engines, a hub and agents of its own: the run need not run, and one that does is left alone, where there is
room for both. Episodes are played at each environment's own sampling settings, on the first of its evaluation_tasks in file order.
In --output are evaluation.json, trajectories.jsonl with every episode in words, and logs/. The interval is Wilson's at 95 %.
The exit status is 0; 1 if an environment had no episode that could be scored, or a process failed; 2 if something cannot be used.
"""
DOCTOR_EXAMPLES: Final = """examples:
  headrace doctor
  headrace doctor --config run.yaml
  headrace doctor --config run.yaml --json | jq -r '.findings[] | select(.severity == "problem") | .remedy'

Without --config it looks at this machine only. It changes nothing. The exit status is 1 if there is a problem.
"""
DEMO_EXAMPLES: Final = """examples:
  headrace demo
  headrace demo --seed 1 --directory runs/demo-1
  headrace demo | tail -n 1 | jq .success_after
"""


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="headrace",
        description="Train tool-using LLM agents by asynchronous reinforcement learning: start a run, look into it, change it.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_up(commands)
    _add_status(commands)
    _add_environments(commands)
    _add_rollouts(commands)
    _add_evaluate(commands)
    _add_doctor(commands)
    _add_demo(commands)
    return parser


def _add_up(commands: "Commands") -> None:
    up = _command(commands, "up", "start Redis, engines, hub, agents and trainer, and stop them when training ends", UP_EXAMPLES)
    _add_run_file(up)
    up.add_argument("--external-redis", action="store_true", help="use the Redis at redis.url instead of starting one")


def _add_status(commands: "Commands") -> None:
    status = _command(commands, "status", "show engines, environments and the ledger of a run", STATUS_EXAMPLES)
    _add_run_file(status)
    _add_json(status, "as one JSON object")


def _add_environments(commands: "Commands") -> None:
    """Options stand before the action or after it."""
    environments = _command(
        commands, "environments", "list the environments of a run, add, change and remove them", ENVIRONMENTS_EXAMPLES
    )
    environments.add_argument("--config", type=Path, metavar="FILE", help="the run file")
    _add_overrides(environments)
    _add_json(environments, "the agents' answer as JSON")
    environments.set_defaults(action_overrides=[])
    actions = environments.add_subparsers(dest="action", metavar="[ACTION]", help="without one, list", prog=environments.prog)
    _add_action(actions, "list", "list them, as without an action")
    add = _add_action(actions, "add", "register an environment")
    add.add_argument("file", type=Path, metavar="FILE", help="its spec, YAML or JSON; a relative path in it is the agents'")
    for name, text in (
        ("show", "print the whole spec and the statistics of one environment"),
        ("pause", "start no new groups of an environment"),
        ("resume", "start new groups of it again"),
        ("weight", "change an environment's share of new groups"),
        ("remove", "remove an environment; what runs of it is given up"),
    ):
        _add_action(actions, name, text).add_argument("name", metavar="NAME", help="the environment")
    actions.choices["weight"].add_argument("value", type=float, metavar="VALUE", help=">= 0, relative to the others' weights")
    for parser in (environments, *actions.choices.values()):
        _show_as_required(parser)


def _show_as_required(parser: argparse.ArgumentParser) -> None:
    """--config may stand before the action or after it, which argparse can only be told as two options that may be missing."""
    parser.usage = parser.format_usage().removeprefix("usage: ").rstrip().replace("[--config FILE]", "--config FILE")


def _add_action(actions: "Commands", name: str, text: str) -> argparse.ArgumentParser:
    action = _command(actions, name, text, ENVIRONMENTS_EXAMPLES)
    action.add_argument("--config", type=Path, metavar="FILE", default=argparse.SUPPRESS, help="the run file")
    _add_overrides(action, destination="action_overrides")
    action.add_argument("--json", action="store_true", default=argparse.SUPPRESS, help="the agents' answer as JSON")
    return action


def _add_rollouts(commands: "Commands") -> None:
    rollouts = _command(commands, "rollouts", "show trajectories as readable transcripts", ROLLOUTS_EXAMPLES)
    _add_run_file(rollouts)
    rollouts.add_argument("--follow", action="store_true", help="go on with what comes, until Ctrl-C")
    rollouts.add_argument(
        "--last", type=_count, metavar="N", help="begin with the newest N in the stream (default: 5; 0 with --follow)"
    )
    rollouts.add_argument("--environment", metavar="NAME", help="only of this environment")
    _add_json(rollouts, "one JSON object a line, with the text of every turn")


def _add_evaluate(commands: "Commands") -> None:
    evaluate = _command(commands, "evaluate", "play held-out tasks on a checkpoint, or on any model", EVALUATE_EXAMPLES)
    _add_run_file(evaluate)
    evaluate.add_argument(
        "--checkpoint", type=Path, required=True, metavar="DIRECTORY", help="a checkpoint of a run, or a Hugging Face model"
    )
    evaluate.add_argument(
        "--episodes", type=_positive, metavar="N", help="of each environment (default: trainer.evaluation.num_episodes)"
    )
    evaluate.add_argument("--greedy", action="store_true", help="at the most likely token instead of sampling")
    evaluate.add_argument(
        "--environment",
        dest="environments",
        action="append",
        default=[],
        metavar="NAME",
        help="only this one; may be given again (default: all that have evaluation_tasks)",
    )
    evaluate.add_argument(
        "--output", type=Path, metavar="DIRECTORY", help="new or empty (default: a new one in evaluations/ of run.directory)"
    )
    _add_json(evaluate, "as one JSON object, which is also in evaluation.json")


def _add_doctor(commands: "Commands") -> None:
    doctor = _command(commands, "doctor", "check this machine, and whether a run can run on it", DOCTOR_EXAMPLES)
    doctor.add_argument("--config", type=Path, metavar="FILE", help="the run file; without it, only the machine is checked")
    _add_overrides(doctor)
    _add_json(doctor, "as one JSON object")


def _add_demo(commands: "Commands") -> None:
    demo = _command(commands, "demo", "train the demo's tiny policy to use a calculator, and show that it learns", DEMO_EXAMPLES)
    demo.add_argument("--directory", type=Path, default=Path("runs/demo"), help="where everything goes (default: %(default)s)")
    demo.add_argument("--seed", type=int, default=0, help="of the policy and of the run (default: %(default)s)")
    _add_overrides(demo)


def _command(commands: "Commands", name: str, text: str, examples: str) -> argparse.ArgumentParser:
    description = text[0].upper() + text[1:] + "."
    return commands.add_parser(
        name, help=text, description=description, epilog=examples, formatter_class=argparse.RawDescriptionHelpFormatter
    )


def _add_run_file(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", type=Path, metavar="FILE", required=True, help="the run file")
    _add_overrides(parser)


def _add_overrides(parser: argparse.ArgumentParser, *, destination: str = "overrides") -> None:
    parser.add_argument(
        "--set", dest=destination, action="append", default=[], metavar="KEY=VALUE", help="override one key of the run file"
    )


def _add_json(parser: argparse.ArgumentParser, text: str) -> None:
    parser.add_argument("--json", action="store_true", help=text)


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"must be a whole number >= 0, got {text!r}")
    return int(text)


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number >= 1, got {text!r}")
    return int(text)
