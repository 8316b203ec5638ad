"""What the HTTP interface says of itself: each operation in words, with its bodies, examples and refusals.

A test sends every example of a request to the running application, and holds those of answers against their types.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from services.env_agents.messages import EnvironmentDescription, Health, RolloutChanges, RolloutDescription, Status
from services.env_agents.registry import PATCHABLE
from shared.environment_spec import EnvironmentSpec
from shared.evaluation import EvaluationLine, EvaluationRequest, EvaluationResult

JSON_LINES: Final = "application/x-ndjson"
"""One JSON value a line, each as soon as it is there."""

CHANGES: Final = "EnvironmentChanges"
"""Schema of a PATCH: what of an EnvironmentSpec may be changed."""

PYTHON_ENVIRONMENT: Final = {
    "name": "calculator",
    "import_path": "examples.calculator:Calculator",
    "tasks": {"kind": "seeds", "count": 100_000},
    "evaluation_tasks": {"kind": "seeds", "start": 1_000_000, "count": 256},
    "sampling": {"max_new_tokens": 64},
    "limits": {"max_turns": 4},
}
OPENENV_ENVIRONMENT: Final = {
    "name": "guess",
    "url": "ws://10.0.0.9:8900",
    "arguments": {"highest": 20},
    "weight": 0.5,
    "limits": {"max_turns": 6, "step_timeout_s": 30},
}
GYMNASIUM_ENVIRONMENT: Final = {
    "name": "frozen-lake",
    "import_path": "gymnasium:make",
    "arguments": {"id": "FrozenLake-v1", "is_slippery": False},
    "limits": {"max_turns": 12},
}
DATASET_ENVIRONMENT: Final = {
    "name": "gsm8k",
    "import_path": "services.env_agents.dataset_environment:DatasetEnvironment",
    "tasks": {
        "kind": "jsonl",
        "path": "gsm8k/train.jsonl",
        "columns": {"prompt": "question", "answer": "answer"},
        "max_prompt_length": 512,
    },
    "reward": {"kind": "function", "import_path": "services.env_agents.reward_functions:same_number"},
}
JUDGED_ENVIRONMENT: Final = {
    "name": "polite-calculator",
    "import_path": "examples.calculator:Calculator",
    "reward": {
        "kind": "judge",
        "part": "politeness",
        "weight": 0.2,
        "prompt": "How polite is this answer, from 0 to 10? {answer}\nEnd with `Score:` and the number.",
        "pattern": r"Score:\s*(\d+)",
    },
}
SERVICE_ENVIRONMENT: Final = {
    "name": "checked-calculator",
    "import_path": "examples.calculator:Calculator",
    "reward": {"kind": "http", "url": "http://10.0.0.10:9100/score", "timeout_s": 20, "retries": {"unreachable": 10}},
}
DESCRIBED: Final = {
    **msgspec.to_builtins(msgspec.convert(PYTHON_ENVIRONMENT, EnvironmentSpec)),
    "statistics": {
        "episodes": 256,
        "success_rate": 0.91,
        "mean_reward": 0.91,
        "outcomes": {"completed": 254, "truncated": 1, "environment_error": 1},
    },
    "last_problem": {
        "outcome": "environment_error",
        "detail": "step: ZeroDivisionError: division by zero",
        "at": "2026-02-03T10:15:00Z",
        "process": "agents-1:7",
    },
    "dataset": None,
}
STATUS: Final = {
    "books": {
        "version": 12,
        "async_generation_ratio": 1.0,
        "batch_groups": 16,
        "started": 224,
        "running": 18,
        "ready": 12,
        "trained": 192,
        "unsaved": 32,
        "discarded": {"stale": 2},
        "discarded_tokens": {"stale": 6_021},
        "requeued": 0,
        "episodes_finished": 1_698,
        "episodes_discarded": 11,
        "episodes_surplus": 0,
        "filtered_in_a_row": 0,
        "redundant_groups": 0,
        "synchronous_until": 0,
        "holds": 0,
        "dead_letters": 0,
        "stream_entries": 385,
    },
    "is_balanced": True,
    "pipeline": {
        "version": 12,
        "time": 1_770_113_700.0,
        "updates": 10,
        "update_s": 41.0,
        "wait_share": 0.38,
        "trainer_idle_share": 0.45,
        "engine_idle_share": 0.03,
        "engine_utilisation": 0.91,
        "episode_shares": {"queued": 0.02, "generating": 0.83, "environment": 0.14, "reward": 0.01},
        "discarded_token_shares": {"stale": 0.01},
        "advice": (
            "training waits 38% of the time for data, and the engines are busy 97% of it: give rollouts 2 more of the 16 GPUs (10 "
            "for engines and 6 for training, instead of 8 and 8); an update's work then takes 32.9 s instead of 39.8 s",
        ),
    },
    "processes": {"agents-1:7": 72, "agents-2:7": 66},
    "process": "agents-1:7",
    "episodes_in_flight": 72,
    "episodes_by_environment": {"calculator": 48, "guess": 24},
}
ROLLOUT: Final = {
    "async_generation_ratio": 2.0,
    "ratio_in_force": 2.0,
    "max_lag": 2,
    "rollout_batch_size": 16,
    "version": 12,
    "groups_in_flight": 30,
}
EVALUATION: Final = {
    "version": 12,
    "results": {"calculator": {"episodes": 64, "success_rate": 0.95, "mean_reward": 0.95, "outcomes": {"completed": 64}}},
    "transcripts": [
        {"environment": "calculator", "task_id": "1000000", "reward": 1.0, "outcome": "completed", "text": "USER\nWhat is 3 + 4?…"}
    ],
}

BODY_REFUSALS: Final = {
    408: "POST /environments: the body must be there within 30 s, and is not",
    413: "POST /environments: the body must have at most 1048576 bytes, got more; data belongs in a dataset",
    415: "POST /environments: the body must have the header Content-Type: application/json, got text/plain",
}
_UNKNOWN = {404: "no environment is named 'calculater'; did you mean 'calculator'?"}
_REDIS_AWAY = {503: "Redis must answer, and does not: Error 111 connecting to redis:6379; try again when it is back"}
_UNREACHABLE = {
    502: "an OpenEnv server must answer at ws://10.0.0.9:8900, but GET /schema failed: Connection refused; start it, or correct "
    "the environment's url"
}


@dataclass(frozen=True)
class Operation:
    """One method of one path. `answer` is None where the body is empty, str where it is plain text."""

    tag: str
    summary: str
    description: str
    status: int
    answer: Any
    example: Any
    request: str | None = None
    """Name of the body's schema."""
    requests: Mapping[str, Any] = field(default_factory=dict)
    """Bodies by what they show."""
    media_type: str = "application/json"
    """Of an answer that is no plain text."""
    refusals: Mapping[int, str] = field(default_factory=dict)
    """Example sentences by status."""


OPERATIONS: Final[Mapping[tuple[str, str], Operation]] = {
    ("post", "/environments"): Operation(
        tag="environments",
        summary="Register an environment",
        description="Its share of the rollouts starts at once, in every agent process that can load it. Exactly one of "
        "`import_path` (a Python class inside `env_agents.import_allowlist`) and `url` (an OpenEnv server) says where it is. "
        "The same body a second time changes nothing.",
        request=EnvironmentSpec.__name__,
        requests={
            "A Python environment": PYTHON_ENVIRONMENT,
            "A remote OpenEnv environment": OPENENV_ENVIRONMENT,
            "A dataset with a reward function, and no code": DATASET_ENVIRONMENT,
            "A reward by a service": SERVICE_ENVIRONMENT,
            "A reward by a judge": JUDGED_ENVIRONMENT,
            "A Gymnasium environment, with gymnasium in env_agents.import_allowlist": GYMNASIUM_ENVIRONMENT,
        },
        status=201,
        answer=EnvironmentDescription,
        example=DESCRIBED,
        refusals={
            403: "import_path must be inside env_agents.import_allowlist (examples), got 'os:system'; add its package to the "
            "allowlist in the run file",
            409: "an environment named 'calculator' exists with another spec; PATCH it, DELETE it, or choose another name",
            422: "POST /environments: unknown key 'weigth'; did you mean 'weight'?",
            **_UNREACHABLE,
            **_REDIS_AWAY,
        },
    ),
    ("get", "/environments"): Operation(
        tag="environments",
        summary="List the environments",
        description="All that this process can run, each with the statistics of its most recent 256 episodes over all processes.",
        status=200,
        answer=list[EnvironmentDescription],
        example=[DESCRIBED],
        refusals=_REDIS_AWAY,
    ),
    ("get", "/environments/{name}"): Operation(
        tag="environments",
        summary="Show an environment",
        description="What it was registered with, its success rate, and why its last bad episode ended.",
        status=200,
        answer=EnvironmentDescription,
        example=DESCRIBED,
        refusals={**_UNKNOWN, **_REDIS_AWAY},
    ),
    ("patch", "/environments/{name}"): Operation(
        tag="environments",
        summary="Weigh, pause or change an environment",
        description=f"Changes {', '.join(f'`{key}`' for key in PATCHABLE)}; of the last two only the keys given. It counts for "
        "groups that start from now on. A paused environment starts none, and what runs goes on.",
        request=CHANGES,
        requests={
            "Another weight": {"weight": 2.5},
            "Pause": {"is_paused": True},
            "More room": {"limits": {"max_turns": 12}, "sampling": {"temperature": 0.8}},
        },
        status=200,
        answer=EnvironmentDescription,
        example=DESCRIBED,
        refusals={
            **_UNKNOWN,
            422: "environment 'calculator': weight: Expected `float` >= 0.0, got -1",
            **_UNREACHABLE,
            **_REDIS_AWAY,
        },
    ),
    ("delete", "/environments/{name}"): Operation(
        tag="environments",
        summary="Remove an environment",
        description="Its groups that run are discarded and its statistics forgotten; groups that are ready are still trained.",
        status=204,
        answer=None,
        example=None,
        refusals={**_UNKNOWN, **_REDIS_AWAY},
    ),
    ("post", "/evaluations"): Operation(
        tag="evaluations",
        summary="Evaluate on held-out tasks",
        description="Plays the first `num_episodes` tasks of `evaluation_tasks` on the weights in force, outside the books, while "
        "no process of the run starts new groups. Answers when all have ended.",
        request=EvaluationRequest.__name__,
        requests={
            "Every environment": {"num_episodes": 64},
            "One, greedily, with transcripts": {
                "num_episodes": 64,
                "greedy": True,
                "environments": ["calculator"],
                "transcripts": 3,
            },
        },
        status=200,
        answer=EvaluationResult,
        example=EVALUATION,
        refusals={
            **_UNKNOWN,
            422: "only environments with evaluation_tasks can be evaluated; guess has none",
            **_REDIS_AWAY,
        },
    ),
    ("post", "/evaluations/episodes"): Operation(
        tag="evaluations",
        summary="Evaluate, episode by episode",
        description="As `POST /evaluations`, with a line for each episode as soon as it has ended, and first a line with their "
        "number by environment. `transcripts` adds nothing here. Closing the connection ends what still plays.",
        request=EvaluationRequest.__name__,
        requests={"Every environment": {"num_episodes": 64}},
        status=200,
        answer=EvaluationLine,
        example={"num_episodes": {"calculator": 64}},
        media_type=JSON_LINES,
        refusals={
            **_UNKNOWN,
            422: "only environments with evaluation_tasks can be evaluated; guess has none",
        },
    ),
    ("get", "/rollout"): Operation(
        tag="rollout",
        summary="How far generation may run ahead",
        description="α, B and what they bound, as admission and the trainer read them now.",
        status=200,
        answer=RolloutDescription,
        example=ROLLOUT,
        refusals=_REDIS_AWAY,
    ),
    ("patch", "/rollout"): Operation(
        tag="rollout",
        summary="Change the asynchronous ratio",
        description="For all processes of the run at once, trainer included. More opens places at once; less lets none start until "
        "enough were trained, and groups over the new bound are stale.",
        request=RolloutChanges.__name__,
        requests={
            "Fully asynchronous": {"async_generation_ratio": 2},
            "Exactly on-policy": {"async_generation_ratio": 0},
        },
        status=200,
        answer=RolloutDescription,
        example=ROLLOUT,
        refusals={422: "PATCH /rollout: async_generation_ratio: Expected `float` >= 0.0, got -1", **_REDIS_AWAY},
    ),
    ("get", "/health"): Operation(
        tag="process",
        summary="Whether the process serves",
        description="200 as long as it does, whatever Redis and the hub do.",
        status=200,
        answer=Health,
        example={"status": "ok"},
    ),
    ("get", "/status"): Operation(
        tag="process",
        summary="The run's books and processes",
        description="The ledger's counts at one instant, the agent processes that live, and the episodes that each plays.",
        status=200,
        answer=Status,
        example=STATUS,
        refusals=_REDIS_AWAY,
    ),
    ("get", "/metrics"): Operation(
        tag="process",
        summary="Metrics of this process",
        description="Prometheus's text format.",
        status=200,
        answer=str,
        example="# HELP headrace_agents_episodes_in_flight Episodes that run in this process\n"
        "# TYPE headrace_agents_episodes_in_flight gauge\nheadrace_agents_episodes_in_flight 72.0\n",
    ),
}
