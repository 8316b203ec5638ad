import io
from pathlib import Path

import pytest
from rich.console import Console

from services.standalone.command_line import main
from services.standalone.evaluate import choose, evaluating, longest_silence_s
from services.standalone.evaluated_model import EvaluatedModel
from services.standalone.evaluation_display import EvaluationDisplay
from services.standalone.observer import State
from shared import strict_yaml
from shared.configuration import Configuration
from shared.environment_spec import EnvironmentLimits, EnvironmentSpec, FunctionReward, RewardRetries, SeedTasks
from shared.errors import ConfigurationError
from tests.services.standalone.test_evaluated_model import make_checkpoint
from tests.shared.episodes import admitted_group, finished_episode

HELD_OUT = SeedTasks(start=1_000, count=8)


def spec(name: str, **fields) -> EnvironmentSpec:
    return EnvironmentSpec(name=name, import_path="examples.calculator:Calculator", **fields)


def configuration(**sections) -> Configuration:
    raw = {
        "run": {"id": "x", "directory": "runs/x", "model_path": "models/Qwen3-8B"},
        "engines": {"count": 1, "urls": ["http://node1:30000"], "discovery": ["http://engine:30000"]},
        "inference_hub": {"host": "0.0.0.0", "url": "http://control:8800"},
        "env_agents": {"host": "0.0.0.0", "url": "http://control:8801", "renderer": "auto"},
        "trainer": {"num_updates": 1},
        **sections,
    }
    return strict_yaml.decode(raw, Configuration, source="test")


def test_environments_with_held_out_tasks_are_chosen_unless_named():
    having, lacking = spec("a", evaluation_tasks=HELD_OUT), spec("b")
    assert choose([having, lacking], []) == [having]
    assert choose([having, lacking], ["a", "a"]) == [having]
    with pytest.raises(ConfigurationError, match="must have evaluation_tasks to be evaluated, and b has none; give it some"):
        choose([having, lacking], ["a", "b"])
    with pytest.raises(ConfigurationError, match=r"--environment must be one of .*, got 'aa'"):
        choose([having, lacking], ["aa"])


@pytest.mark.parametrize(("specs", "found"), [([], "env_agents.environments is empty"), ([spec("b")], "b has none")])
def test_nothing_to_evaluate_is_a_sentence(specs, found):
    with pytest.raises(ConfigurationError, match=f"must have evaluation_tasks to be evaluated, and {found}; give it some"):
        choose(specs, [])


def test_processes_of_an_evaluation_are_apart_from_the_runs(tmp_path):
    environment = spec("a", evaluation_tasks=HELD_OUT, weight=3.0, min_share=0.5)
    model = EvaluatedModel(tmp_path / "v00025" / "model", "v00025", 25)
    found = evaluating(configuration(), model, [environment], tmp_path / "out")
    assert (found.run.model_path, found.run.directory) == (str(model.directory), str(tmp_path / "out"))
    assert (found.engines.count, found.engines.urls, found.engines.discovery) == (1, (), ())
    for section in (found.inference_hub, found.env_agents):
        assert (section.host, section.port, section.url) == ("127.0.0.1", 0, None)
    assert found.redis.url == "redis://127.0.0.1:0/0"
    [played] = found.env_agents.environments
    assert played.is_paused, "no rollouts"
    assert played.tasks == played.evaluation_tasks == HELD_OUT
    assert played.sampling == environment.sampling


@pytest.mark.parametrize(("version", "renderer"), [(25, "qwen3"), (None, "auto")])
def test_chat_format_of_a_checkpoint_is_that_of_the_model_it_began_as(tmp_path, version, renderer):
    found = evaluating(configuration(), EvaluatedModel(tmp_path, "m", version), [spec("a", evaluation_tasks=HELD_OUT)], tmp_path)
    assert found.env_agents.renderer == renderer


def test_without_an_engine_to_start_there_is_no_evaluation(tmp_path):
    run = configuration(engines={"count": 0, "urls": ["http://node1:30000"]})
    with pytest.raises(ConfigurationError, match=r"engines\.count must be >= 1, .*--set engines\.count=1"):
        evaluating(run, EvaluatedModel(tmp_path, "m", None), [spec("a", evaluation_tasks=HELD_OUT)], tmp_path)


def test_longest_silence_is_that_of_an_episode_and_every_try_of_its_reward():
    retries = RewardRetries(timeout=2, unreachable=0, error=0, unusable=0)
    rewarded = spec("a", reward=FunctionReward(import_path="a:b", timeout_s=10.0, retries=retries))
    short = spec("b", limits=EnvironmentLimits(episode_timeout_s=5.0))
    assert longest_silence_s([rewarded, short]) == 3600.0 + 30.0 + 60.0


def test_progress_without_a_terminal_is_a_line_for_each_tenth():
    shown = io.StringIO()
    group = admitted_group("a", size=20)
    with EvaluationDisplay(Console(file=shown, width=120)) as display:
        display.state_changed("redis", State.STARTING, 0.0)
        display.state_changed("redis", State.READY, 0.25)
        display.planned({"a": 20})
        for index in range(20):
            display.ended(finished_episode(group, index))
    first, *lines = shown.getvalue().splitlines()
    assert first == "redis is ready after 0.2 s"
    assert len(lines) == 10
    assert lines[-1].startswith("a: 20 of 20 episodes, success ")


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    path = tmp_path / "mine.yaml"
    path.write_text(
        f"run: {{id: x, directory: {tmp_path}/out, model_path: {tmp_path}/gone}}\ntrainer: {{num_updates: 1}}\n"
        "env_agents:\n  environments:\n    - {name: a, import_path: 'examples.calculator:Calculator', "
        "evaluation_tasks: {kind: seeds}}\n"
    )
    return path


def test_bad_input_is_one_sentence_and_status_2(run_file, tmp_path, capsys):
    checkpoint = str(make_checkpoint(tmp_path / "v00025"))
    command = ["evaluate", "--config", str(run_file), "--checkpoint"]
    for arguments, sentence in (
        ([str(tmp_path / "v1")], "--checkpoint must be a checkpoint of a run or a Hugging Face model directory, got"),
        ([checkpoint], "the number of episodes must be given, because trainer.evaluation.num_episodes is 0"),
        ([checkpoint, "--environment", "b"], "--environment must be one of env_agents.environments, got 'b'"),
        ([checkpoint, "--episodes", "1", "--output", str(tmp_path)], "--output must be a new or an empty directory, got"),
        ([checkpoint, "--episodes", "1", "--set", "engines.count=0"], "engines.count must be >= 1"),
    ):
        assert main([*command, *arguments]) == 2
        error = capsys.readouterr().err
        assert sentence in error
        assert error.count("\n") == 1


def test_number_of_episodes_must_be_one(run_file, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["evaluate", "--config", str(run_file), "--checkpoint", "v1", "--episodes", "0"])
    assert "must be a whole number >= 1, got '0'" in capsys.readouterr().err
