"""`headrace evaluate`: held-out tasks on a checkpoint, with a Redis, engines, a hub and agents of its own."""

import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import IO, Final

import httpx
import msgspec

from services.standalone import deployment, printing
from services.standalone.evaluated_model import EvaluatedModel, find_model, require_tokenizer
from services.standalone.evaluation_display import EvaluationDisplay
from services.standalone.evaluation_report import Evaluation, environment_result, overview
from services.standalone.rollout import rollout
from services.standalone.stream_reader import Entry
from services.standalone.supervisor import StopRequested
from services.standalone.token_text import Decoder, decoder_for
from services.standalone.up import SIGNAL_STATUS
from shared import strict_yaml
from shared import trajectory as trajectories
from shared.agents_token import agents_access
from shared.configuration import Configuration, RedisSection, read
from shared.decoding import UNDECODABLE
from shared.environment_spec import EnvironmentSpec, RewardSpec
from shared.errors import ConfigurationError, EpisodeError
from shared.evaluation import EvaluationLine, EvaluationRequest
from shared.trajectory import Trajectory

RESULT_FILE: Final = "evaluation.json"
TRAJECTORIES_FILE: Final = "trajectories.jsonl"
LOOPBACK: Final = "127.0.0.1"
NOT_SCORED: Final = 1
CONNECT_TIMEOUT_S: Final = 10.0
MARGIN_S: Final = 60.0
"""For what an episode does beside waiting."""


@dataclass
class _Played:
    """Filled in while episodes end."""

    num_planned: dict[str, int] = field(default_factory=dict)
    episodes: dict[str, list[Trajectory]] = field(default_factory=dict)
    seconds: float = 0.0


def run(
    run_file: Path,
    overrides: Sequence[str],
    *,
    checkpoint: Path,
    num_episodes: int | None,
    is_greedy: bool,
    environments: Sequence[str],
    output: Path | None,
    as_json: bool,
) -> int:
    """Returns the exit status: 0, or 1 if an environment had no episode that could be scored.

    Raises: HeadraceError with the sentence to show.
    """
    configuration = read(run_file, overrides=overrides)
    model = find_model(checkpoint)
    require_tokenizer(model, Path(configuration.run.model_path))
    chosen = choose(configuration.env_agents.environments, environments)
    request = EvaluationRequest(num_episodes=num_episodes or _num_episodes(configuration), greedy=is_greedy)
    directory = output or Path(configuration.run.directory) / "evaluations" / f"{model.name}-{datetime.now():%Y%m%d-%H%M%S}"
    resolved = evaluating(configuration, model, chosen, directory)
    _make(directory)
    planned = deployment.plan(resolved, has_external_redis=False)

    played, decoder = _Played(), decoder_for(model.directory)
    with (
        EvaluationDisplay(printing.console(sys.stderr)) as display,
        (directory / TRAJECTORIES_FILE).open("wb") as file,
    ):

        async def play() -> None:
            await _play(planned.configuration, request, played, display, file, decoder)

        try:
            deployment.serve(planned, display, source=run_file, work=play)
        except StopRequested as stop:
            return SIGNAL_STATUS + stop.signal_number
    evaluation = Evaluation(
        model=str(model.directory),
        version=model.version,
        greedy=is_greedy,
        seconds=round(played.seconds, 1),
        trajectories=str(directory / TRAJECTORIES_FILE),
        results={name: environment_result(episodes) for name, episodes in played.episodes.items()},
    )
    (directory / RESULT_FILE).write_bytes(msgspec.json.format(msgspec.json.encode(evaluation)) + b"\n")
    _show(evaluation, directory, as_json=as_json)
    return 0 if evaluation.is_scored else NOT_SCORED


def choose(specs: Iterable[EnvironmentSpec], names: Sequence[str]) -> list[EnvironmentSpec]:
    """The environments to evaluate: those named, else all with evaluation_tasks.

    Raises: ConfigurationError if one is not in the run file or has no evaluation_tasks, or none has.
    """
    spec_by_name = {spec.name: spec for spec in specs}
    for name in names:
        if name not in spec_by_name:
            hint = strict_yaml.hint(name, spec_by_name, otherwise="in the run file")
            raise ConfigurationError(f"--environment must be one of env_agents.environments, got {name!r}; {hint}")
    chosen = [spec_by_name[name] for name in dict.fromkeys(names)] or list(spec_by_name.values())
    having = [spec for spec in chosen if spec.evaluation_tasks is not None]
    lacking = ", ".join(spec.name for spec in chosen if spec.evaluation_tasks is None)
    if not having or (names and lacking):
        found = f"{lacking} has none" if lacking else "env_agents.environments is empty"
        raise ConfigurationError(
            f"an environment must have evaluation_tasks to be evaluated, and {found}; give it some in the run file, such as "
            "evaluation_tasks: {kind: seeds, start: 1000000, count: 256}"
        )
    return having


def evaluating(
    configuration: Configuration, model: EvaluatedModel, environments: Sequence[EnvironmentSpec], directory: Path
) -> Configuration:
    """The run file of the evaluation's own processes, apart from those of the run: its model, its ports, no rollouts.

    Raises: ConfigurationError if no engine is to be started.
    """
    replace = msgspec.structs.replace
    if configuration.engines.count < 1:
        raise ConfigurationError(
            "engines.count must be >= 1, because those at engines.urls serve other weights, got 0; start one here with "
            "--set engines.count=1"
        )
    agents = replace(
        configuration.env_agents,
        host=LOOPBACK,
        port=0,
        url=None,
        renderer=_renderer(configuration, model),
        # Paused, they start no rollouts; the tasks of training need not be here.
        environments=tuple(replace(spec, is_paused=True, min_share=0.0, tasks=spec.evaluation_tasks) for spec in environments),
    )
    return replace(
        configuration,
        run=replace(configuration.run, directory=str(directory), model_path=str(model.directory)),
        redis=RedisSection(f"redis://{LOOPBACK}:0/0"),
        engines=replace(configuration.engines, urls=(), discovery=()),
        inference_hub=replace(configuration.inference_hub, host=LOOPBACK, port=0, url=None),
        env_agents=agents,
    )


def longest_silence_s(environments: Iterable[EnvironmentSpec]) -> float:
    """Within which another episode ends, while any plays: an episode's deadline and then its reward's."""
    return MARGIN_S + max(spec.limits.episode_timeout_s + _reward_s(spec.reward) for spec in environments)


def _reward_s(reward: RewardSpec | None) -> float:
    if reward is None:
        return 0.0
    retries = reward.retries
    return reward.timeout_s * (1 + retries.timeout + retries.unreachable + retries.error + retries.unusable)


def _renderer(configuration: Configuration, model: EvaluatedModel) -> str:
    """`auto` goes by the name of the model's directory, and a checkpoint's is not called after its model."""
    section = configuration.env_agents
    if section.renderer != "auto" or model.version is None:
        return section.renderer
    import renderers

    from services.env_agents.tokenizer import published_name

    name = published_name(Path(configuration.run.model_path))
    return str(renderers.base.MODEL_RENDERER_MAP.get(name, section.renderer))


def _num_episodes(configuration: Configuration) -> int:
    if configuration.trainer.evaluation.num_episodes < 1:
        raise ConfigurationError(
            "the number of episodes must be given, because trainer.evaluation.num_episodes is 0 in the run file; add --episodes"
        )
    return configuration.trainer.evaluation.num_episodes


def _make(directory: Path) -> None:
    try:
        directory.mkdir(parents=True, exist_ok=True)
        is_empty = not any(directory.iterdir())
    except OSError as error:
        raise ConfigurationError(f"--output must be a directory that can be made, got {directory}: {error.strerror}") from error
    if not is_empty:
        raise ConfigurationError(f"--output must be a new or an empty directory, got {directory}; give another one")


async def _play(
    configuration: Configuration,
    request: EvaluationRequest,
    played: _Played,
    display: EvaluationDisplay,
    file: IO[bytes],
    decoder: Decoder,
) -> None:
    """Raises: EpisodeError if the agents do not answer to the end."""
    section = configuration.env_agents
    timeout = httpx.Timeout(CONNECT_TIMEOUT_S, read=longest_silence_s(section.environments))
    headers = {"Content-Type": "application/json", **agents_access()}
    started = time.monotonic()
    try:
        async with (
            httpx.AsyncClient(base_url=section.address, timeout=timeout, trust_env=False) as agents,
            agents.stream("POST", "/evaluations/episodes", content=msgspec.json.encode(request), headers=headers) as response,
        ):
            if response.is_error:
                raise EpisodeError(f"the agents must take the evaluation, and do not: {(await response.aread()).decode()}")
            async for text in response.aiter_lines():
                line = msgspec.json.decode(text, type=EvaluationLine)
                if line.num_episodes:
                    played.num_planned = dict(line.num_episodes)
                    display.planned(played.num_planned)
                    continue
                trajectory = trajectories.decode(line.trajectory)
                played.episodes.setdefault(trajectory.environment, []).append(trajectory)
                file.write(msgspec.json.encode(rollout(Entry("", trajectory), decoder)) + b"\n")
                display.ended(trajectory)
    except (httpx.HTTPError, *UNDECODABLE) as error:
        raise EpisodeError(f"the agents must answer until the last episode has ended, and did not: {error!r}; see logs/") from error
    played.seconds = time.monotonic() - started
    num_ended = {name: len(episodes) for name, episodes in played.episodes.items()}
    if not num_ended or num_ended != played.num_planned:
        raise EpisodeError(
            f"the agents must play {played.num_planned} episodes, and answered with {num_ended}; see logs/agents.log"
        )


def _show(evaluation: Evaluation, directory: Path, *, as_json: bool) -> None:
    if as_json:
        printing.as_json(evaluation)
        return
    console = printing.console()
    console.print(overview(console, evaluation))
    console.print(f"everything else: {directory}", soft_wrap=True)
