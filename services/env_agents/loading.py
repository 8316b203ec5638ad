"""From what a user says about an environment to something that makes one for each episode."""

import asyncio
import functools
import importlib
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp

from services.env_agents.datasets import DatasetCounts, TaskOpener
from services.env_agents.environment import Environment
from services.env_agents.environment_threads import EnvironmentThreads, ThreadedEnvironment
from services.env_agents.generation import GenerationClient
from services.env_agents.openenv import OpenEnvServer
from services.env_agents.rendering import ChatRenderer
from services.env_agents.reward_sources import FunctionSource, HttpSource, JudgeSource
from services.env_agents.rewards import DeclaredReward, RewardSource
from services.env_agents.tasks import TaskSource
from shared.environment_spec import DatasetTasks, EnvironmentSpec, HttpReward, JudgeReward, Reward
from shared.errors import ConfigurationError
from shared.import_paths import is_inside

EnvironmentFactory = Callable[[], Environment]

_ALWAYS_ALLOWED = ("services.env_agents.dataset_environment", "services.env_agents.reward_functions")


class NotAllowedError(ConfigurationError):
    """An import path that env_agents.import_allowlist does not cover."""


@dataclass(frozen=True)
class LoadedEnvironment:
    """An environment that episodes can be made of."""

    spec: EnvironmentSpec
    create: EnvironmentFactory
    tasks: TaskSource
    evaluation_tasks: TaskSource | None
    dataset: DatasetCounts | None
    """Of the rows that `tasks` come from."""
    reward: DeclaredReward | None
    """Added to what the environment scores."""


class EnvironmentLoader:
    """Imports classes, reaches servers and opens datasets."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        renderer: ChatRenderer,
        client: GenerationClient,
        *,
        import_allowlist: Sequence[str],
        seed: int,
    ) -> None:
        """Args: session: for remote environments and rewards, from `remote_session`. renderer, client: the run's chat format and
        hub, for the lengths of prompts and for judges.
        """
        self._session = session
        self._renderer = renderer
        self._client = client
        self._import_allowlist = import_allowlist
        self._tasks = TaskOpener(renderer.prompt, seed=seed)
        self._threads = EnvironmentThreads()

    async def load(self, spec: EnvironmentSpec) -> LoadedEnvironment:
        """Raises: ConfigurationError with a sentence if any part of the spec cannot be used."""
        create: EnvironmentFactory
        if spec.url is not None:
            create = (await OpenEnvServer.find(self._session, spec.url, spec.arguments)).create_environment
        else:
            assert spec.import_path is not None
            check_allowed(spec.import_path, self._import_allowlist)
            create = await asyncio.to_thread(import_environment, spec.import_path, spec.arguments, self._import_allowlist)
        reward = None if spec.reward is None else DeclaredReward(spec.reward, await self._reward_source(spec.reward))
        tasks, evaluation_tasks = await asyncio.to_thread(self._open_tasks, spec, describe_prompts(create, spec))
        if spec.execution == "thread":
            create = functools.partial(ThreadedEnvironment, create, self._threads)
        return LoadedEnvironment(spec, create, tasks, evaluation_tasks, self._tasks.counts(tasks), reward)

    async def _reward_source(self, spec: Reward) -> RewardSource:
        if isinstance(spec, HttpReward):
            return HttpSource(self._session, spec)
        if isinstance(spec, JudgeReward):
            return JudgeSource(self._renderer, self._client, spec)
        check_allowed(spec.import_path, self._import_allowlist)
        function = await asyncio.to_thread(import_reward, spec.import_path, spec.arguments, self._import_allowlist)
        return FunctionSource(function, spec.arguments)

    def _open_tasks(self, spec: EnvironmentSpec, prompts: "Prompts") -> tuple[TaskSource, TaskSource | None]:
        open_ = functools.partial(self._tasks.open, tools=prompts.tools, needs_prompts=prompts.are_from_rows)
        tasks = open_(spec.tasks)
        return tasks, None if spec.evaluation_tasks is None else open_(spec.evaluation_tasks, in_file_order=True)


@dataclass(frozen=True)
class Prompts:
    """What an environment's prompts are made of besides the rows of its dataset."""

    tools: Sequence[Mapping[str, Any]]
    are_from_rows: bool


def describe_prompts(create: EnvironmentFactory, spec: EnvironmentSpec) -> Prompts:
    """Asks an environment that plays no episode, and so is not opened. Raises: ConfigurationError if it cannot tell."""
    are_measured = any(isinstance(tasks, DatasetTasks) and tasks.max_prompt_length for tasks in (spec.tasks, spec.evaluation_tasks))
    try:
        environment = create()
        return Prompts(environment.tool_specs() if are_measured else (), environment.needs_prompts)
    except Exception as error:  # Somebody's constructor may raise anything.
        raise ConfigurationError(
            f"environment {spec.name!r} must be made, and with tasks.max_prompt_length tell of its tools, before any episode; it "
            f"raised {type(error).__name__}: {error}; correct it or its arguments, and leave what can fail to open or reset"
        ) from error


def check_allowed(import_path: str, allowlist: Sequence[str]) -> None:
    """Raises: NotAllowedError unless the module is one of the allowed packages or inside one."""
    if not is_inside(import_path, (*allowlist, *_ALWAYS_ALLOWED)):
        raise NotAllowedError(
            f"import_path must be inside env_agents.import_allowlist ({', '.join(allowlist) or 'empty'}), got {import_path!r}; "
            "add its package to the allowlist in the run file"
        )


def require_defined_inside(target: object, import_path: str, allowlist: Sequence[str]) -> None:
    """What an allowed module has from another one, as `from subprocess import run`, is not its own to offer.

    Raises: NotAllowedError unless the module that defines `target` is allowed too.
    """
    module = getattr(target, "__module__", None)
    if module is not None and not is_inside(module, (*allowlist, *_ALWAYS_ALLOWED)):
        raise NotAllowedError(
            f"import_path must name something defined inside env_agents.import_allowlist ({', '.join(allowlist) or 'empty'}), and "
            f"{import_path!r} is defined in {module!r}; name it there, and add its package to the allowlist in the run file"
        )


def import_environment(import_path: str, arguments: dict[str, Any], allowlist: Sequence[str]) -> EnvironmentFactory:
    """A maker of environments from `package.module:name`: an Environment, a gymnasium.Env, or a function that returns the latter.

    Raises: ConfigurationError if it cannot be imported, is none of these, is defined elsewhere, or does not take the arguments.
    """
    target = _import(import_path)
    require_defined_inside(target, import_path, allowlist)
    create = _factory(target, import_path, arguments)
    try:
        inspect.signature(target).bind(**arguments)
    except (TypeError, ValueError) as error:
        raise ConfigurationError(f"arguments must suit {import_path}, got {arguments}: {error}") from error
    return create


def import_reward(import_path: str, arguments: dict[str, Any], allowlist: Sequence[str]) -> Callable[..., Any]:
    """The function of a finished episode that `package.module:name` is.

    Raises: ConfigurationError if it cannot be imported, is defined elsewhere, or does not take an episode and the arguments.
    """
    target = _import(import_path)
    require_defined_inside(target, import_path, allowlist)
    if not callable(target):
        raise ConfigurationError(
            f"reward.import_path must name a function, got {import_path!r}, a {type(target).__name__}; correct the name"
        )
    try:
        inspect.signature(target).bind(None, **arguments)
    except (TypeError, ValueError) as error:
        raise ConfigurationError(
            f"reward.arguments must suit {import_path}, which gets the finished episode first, got {arguments}: {error}"
        ) from error
    return target  # type: ignore[no-any-return]


def _import(import_path: str) -> Any:
    module_name, _, name = import_path.partition(":")
    try:
        return getattr(importlib.import_module(module_name), name)
    except AttributeError as error:
        raise ConfigurationError(
            f"import_path must name something that exists, and {module_name} has no {name!r}; correct the name"
        ) from error
    except Exception as error:  # Importing somebody's module may raise anything.
        raise ConfigurationError(
            f"import_path must name a module that imports, and {import_path!r} failed to import: {type(error).__name__}: {error}; "
            "correct it, or install what it needs where the agents run"
        ) from error


def _factory(target: Any, import_path: str, arguments: dict[str, Any]) -> EnvironmentFactory:
    if inspect.isclass(target) and issubclass(target, Environment):
        return lambda: target(**arguments)
    if inspect.isfunction(target) or _is_gymnasium_class(target):
        from services.env_agents.gymnasium_adapter import GymnasiumEnvironment

        return lambda: GymnasiumEnvironment(target, **arguments)
    raise ConfigurationError(
        f"import_path must name an Environment or gymnasium.Env, got {import_path!r}, a {type(target).__name__}; "
        "name a class, or a function that makes a gymnasium.Env"
    )


def _is_gymnasium_class(target: Any) -> bool:
    gymnasium = sys.modules.get("gymnasium")
    return gymnasium is not None and inspect.isclass(target) and issubclass(target, gymnasium.Env)
