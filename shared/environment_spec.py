"""What a user says about an environment: in the run file, or in the body of `POST /environments`."""

import math
import re
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from shared.names import Name

PositiveInt = Annotated[int, Meta(ge=1)]
NonNegativeInt = Annotated[int, Meta(ge=0)]
PositiveFloat = Annotated[float, Meta(gt=0)]
Retries = Annotated[int, Meta(ge=0)]


class SeedTasks(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="seeds"):
    """Tasks are the seeds start, start + 1, … start + count - 1, over and over. The environment makes each from its seed."""

    start: Annotated[int, Meta(ge=0)] = 0
    count: PositiveInt = 1_000_000


class DatasetColumns(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where a row keeps what it is about; a dot leads into a nested column. The defaults are verl's."""

    prompt: str = "prompt"
    """Chat messages, the JSON of chat messages, or text, which becomes one message of the user. Rows may lack it where the
    environment writes the prompt itself."""
    answer: str = "reward_model.ground_truth"
    """The ground truth that rewards compare with; null where a row has none."""


class DatasetTasks(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind"):
    """Tasks are the rows of a file, in an order shuffled anew each epoch. The environment gets the whole row as a dict."""

    path: str
    shuffle: bool = True
    columns: DatasetColumns = DatasetColumns()
    max_prompt_length: PositiveInt | None = None
    """Tokens that a row's prompt may have, in the run's chat format and with the environment's tools; null sets no limit."""
    filter_overlong_prompts: bool = True
    """Leaves out rows whose prompt is longer; false refuses a dataset that has any."""
    max_bad_rows: NonNegativeInt = 10
    """Rows that cannot be read are left out and counted; a dataset with more of them is refused."""


class ParquetTasks(DatasetTasks, frozen=True, forbid_unknown_fields=True, tag="parquet"):
    """Tasks are the rows of a Parquet file, in an order shuffled anew each epoch."""


class JsonlTasks(DatasetTasks, frozen=True, forbid_unknown_fields=True, tag="jsonl"):
    """Tasks are the lines of a file, each a JSON object, in an order shuffled anew each epoch."""


Tasks = SeedTasks | ParquetTasks | JsonlTasks


class SamplingParameters(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How the policy samples in this environment. The trainer applies the same temperature."""

    temperature: PositiveFloat = 1.0
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Meta(ge=-1)] = -1
    """-1 keeps the whole vocabulary."""
    max_new_tokens: PositiveInt = 1024
    """Tokens a single turn may sample."""


class StartRetries(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How often an environment that did not start is made anew, by what went wrong before the policy's first turn."""

    timeout: Retries = 1
    """`open` or `reset` passed its deadline."""
    unreachable: Retries = 4
    """A connection was refused or lost. A server that is full is waited for, and spends none."""
    error: Retries = 0
    """It raised anything else."""


class EnvironmentLimits(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where an episode ends by force. Passing a token or turn limit truncates it; passing a deadline is a timeout."""

    max_turns: PositiveInt = 8
    max_tokens: PositiveInt = 4096
    """Prompt, sampled and observation tokens of the whole episode."""
    open_timeout_s: PositiveFloat = 600.0
    """Deadline of the wait for what an episode needs before its reset, such as a free place on a server."""
    reset_timeout_s: PositiveFloat = 60.0
    step_timeout_s: PositiveFloat = 60.0
    """Deadline of the answer to one turn: its tool calls, or the environment's own step."""
    score_timeout_s: PositiveFloat = 60.0
    """Deadline of `score`, where the environment has no step of its own."""
    episode_timeout_s: PositiveFloat = 3600.0
    """Deadline from the start to the end, but for the declared reward."""
    start_retries: StartRetries = StartRetries()
    max_concurrent_episodes: PositiveInt = 1024
    """Over all episodes of this environment in one agent process."""
    truncation_reward: float = 0.0
    """Added to what the environment gave an episode up to the token or turn limit that ended it: neither `score` nor the declared
    reward is asked for it. Where a wrong answer costs something, being cut has to cost as much, or the policy learns to ramble."""
    timeout_reward: float | None = None
    """The whole reward of an episode whose turn the environment did not answer in time, where the policy's own action may be why;
    null takes it out of training, as all other deadlines and errors do."""

    def __post_init__(self) -> None:
        for name in ("truncation_reward", "timeout_reward"):
            value = getattr(self, name)
            if value is not None and not math.isfinite(value):
                raise ValueError(f"limits.{name} must be a finite number, got {value}")


class RewardRetries(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How often a reward is asked for again, by what went wrong. When that is used up the episode is an environment error."""

    timeout: Retries = 1
    """There was no answer within timeout_s."""
    unreachable: Retries = 4
    """The service could not be connected to, or answered 429, 502, 503 or 504."""
    error: Retries = 0
    """The function raised, or the service or the hub refused."""
    unusable: Retries = 1
    """The answer is no reward: not a finite number, or the judge named none in range."""


class RewardSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag_field="kind"):
    """A reward that is added to what the environment itself gave, once an episode has completed."""

    part: Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]{0,63}$")] = "reward"
    """Its name in the trajectory's reward_parts; parts of its own are named part.name."""
    weight: float = 1.0
    """Factor of it and of its parts."""
    timeout_s: PositiveFloat = 60.0
    """Deadline of each try."""
    retries: RewardRetries = RewardRetries()


class FunctionReward(RewardSpec, frozen=True, forbid_unknown_fields=True, kw_only=True, tag="function"):
    """A Python function of the finished episode (`task`, `messages`, `answer`); it returns a number, or {reward, parts}.

    An `async def` runs on the event loop, a plain `def` in a worker thread.
    """

    import_path: str
    """`package.module:function`, allowed by `env_agents.import_allowlist`."""
    arguments: dict[str, Any] = {}
    """More keyword arguments of the function."""

    def __post_init__(self) -> None:
        if self.import_path.count(":") != 1:
            raise ValueError(f"import_path must look like package.module:function, got {self.import_path!r}")


class HttpReward(RewardSpec, frozen=True, forbid_unknown_fields=True, kw_only=True, tag="http"):
    """A service that takes the finished episode by POST, as JSON {task, messages, answer}, and answers {reward, parts}."""

    url: str
    """Redirects are not followed."""

    def __post_init__(self) -> None:
        if not self.url.startswith(("http://", "https://")):
            raise ValueError(f"a reward's url must start with http:// or https://, got {self.url!r}")


class JudgeReward(RewardSpec, frozen=True, forbid_unknown_fields=True, kw_only=True, tag="judge"):
    """The model behind the hub reads a prompt about the finished episode; the last number that it names is the reward."""

    prompt: str
    """What the judge reads as the user's message; {prompt}, {answer}, {ground_truth} and {transcript} are filled in."""
    pattern: str = r"(-?\d+(?:\.\d+)?)"
    """Regular expression whose first group is the number."""
    lowest: float = 0.0
    """The number that stands for a reward of 0."""
    highest: float = 10.0
    """The number that stands for a reward of 1. Numbers outside the two are unusable."""
    sampling: SamplingParameters = SamplingParameters(max_new_tokens=512)
    greedy: bool = True
    """At the most likely token instead of sampling."""

    def __post_init__(self) -> None:
        if "{answer}" not in self.prompt and "{transcript}" not in self.prompt:
            raise ValueError("a judge's prompt must contain {answer} or {transcript}; without one it judges nothing")
        try:
            num_groups = re.compile(self.pattern).groups
        except re.error as error:
            raise ValueError(f"a judge's pattern must be a regular expression, got {self.pattern!r}: {error}") from error
        if num_groups < 1:
            raise ValueError(f"a judge's pattern must have a group for the number, got {self.pattern!r}; write it in parentheses")
        if self.lowest >= self.highest:
            raise ValueError(f"a judge's lowest must be < highest, got {self.lowest:g} and {self.highest:g}")


Reward = FunctionReward | HttpReward | JudgeReward


class EnvironmentSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One registered environment: where it is, its share of the rollouts, its tasks, sampling and limits.

    Exactly one of `import_path` (`package.module:Class`, allowed by `env_agents.import_allowlist`) and `url` (an OpenEnv
    server's `ws://` or `http://` address) says where it is.
    """

    name: Name
    import_path: str | None = None
    url: str | None = None
    arguments: dict[str, Any] = {}
    """Keyword arguments of the class, or data of every remote reset."""
    execution: Literal["inline", "thread"] = "inline"
    """Where a class's methods run: on the event loop that all episodes share, or in threads, for one that blocks or computes."""
    weight: Annotated[float, Meta(ge=0)] = 1.0
    """Share of new groups, relative to the other environments' weights."""
    min_share: Annotated[float, Meta(ge=0, le=1)] = 0.0
    """Part of all new groups that it gets at least, whatever the weights; made up for, up to a bound, once it had no place free."""
    is_paused: bool = False
    tasks: Tasks = SeedTasks()
    evaluation_tasks: Tasks | None = None
    """Held-out tasks; None means the environment is left out of evaluations."""
    reward: Reward | None = None
    """Added to what the environment itself scores; None adds nothing."""
    sampling: SamplingParameters = SamplingParameters()
    limits: EnvironmentLimits = EnvironmentLimits()

    def __post_init__(self) -> None:
        if (self.import_path is None) == (self.url is None):
            raise ValueError(f"environment {self.name!r} must have exactly one of import_path and url")
        if self.import_path is not None and self.import_path.count(":") != 1:
            raise ValueError(f"import_path must look like package.module:Class, got {self.import_path!r}")
        if self.url is not None and self.execution != "inline":
            raise ValueError(f"execution {self.execution!r} is for import_path, and {self.name!r} has a url; leave execution out")
        if self.url is not None and not self.url.startswith(("ws://", "wss://", "http://", "https://")):
            raise ValueError(f"url must start with ws://, wss://, http:// or https://, got {self.url!r}")
