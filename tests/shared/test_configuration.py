from pathlib import Path

import pytest

from shared import configuration, strict_yaml
from shared.configuration import Configuration
from shared.environment_spec import ParquetTasks
from shared.errors import ConfigurationError


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    path = tmp_path / "run.yaml"
    path.write_text(
        f"""
run: {{id: demo, directory: {tmp_path}/run, model_path: {tmp_path}/model}}
trainer: {{num_updates: 3, learning_rate: 1e-6}}
env_agents:
  environments:
    - name: calculator
      import_path: examples.calculator:Calculator
      tasks: {{kind: parquet, path: train.parquet}}
"""
    )
    return path


def load(path: Path, *overrides: str) -> Configuration:
    return configuration.load(path, overrides=overrides, environment_variables={})


def test_a_run_file_is_read_as_written(run_file: Path) -> None:
    loaded = load(run_file)
    assert loaded.trainer.learning_rate == 1e-6
    assert loaded.env_agents.environments[0].tasks == ParquetTasks(path="train.parquet")
    assert loaded.inference_hub.address == "http://127.0.0.1:8800"


def test_what_is_dumped_loads_to_the_same_configuration(run_file: Path, tmp_path: Path) -> None:
    loaded = load(run_file)
    copy = tmp_path / "copy.yaml"
    copy.write_text(configuration.dump(loaded))
    assert load(copy) == loaded


def test_what_is_dumped_has_no_password(run_file: Path) -> None:
    loaded = load(run_file, "redis.url=redis://user:s3cret@control:6379/0")
    dumped = configuration.dump(loaded)
    assert "redis://user@control:6379/0" in dumped
    assert "s3cret" not in dumped


def test_overrides_win_over_environment_variables_and_those_over_the_file(run_file: Path) -> None:
    variables = {"HEADRACE_REDIS_URL": "redis://elsewhere:1", "HEADRACE_HUB_URL": "http://hub:1"}
    loaded = configuration.load(run_file, overrides=["redis.url=redis://override:1"], environment_variables=variables)
    assert loaded.redis.url == "redis://override:1"
    assert loaded.inference_hub.address == "http://hub:1"


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("trainer.learningrate=1", "unknown key 'trainer.learningrate'; did you mean 'learning_rate'?"),
        ("trianer.num_updates=1", "unknown key 'trianer'; did you mean 'trainer'?"),
        ("trainer.xyz=1", "unknown key 'trainer.xyz'; known keys: adam_betas, adv_estimator"),
        ("trainer.num_updates=0", "trainer.num_updates: Expected `int` >= 1, got 0"),
        ("trainer.num_updates=many", "trainer.num_updates: Expected `int`, got 'many'"),
        (
            "trainer.pg_variant=pop",
            "pg_variant must be one of 'ppo', 'tis', 'vanilla', 'cispo', 'topr', 'kimi15', 'decoupled_ppo', ",
        ),
        ("trainer.pg_variant=pop", "'clamped_is', or package.module:function, got 'pop'"),
        (
            "trainer.correction={action: truncate}",
            "correction.action must be 'mask' or 'none' with pg_variant 'ppo', which weighs by",
        ),
        ("trainer.correction={low: 3}", "low must be <= high=2, got 3"),
        ("trainer.policy_loss={dual_clip: 0.5}", "trainer.policy_loss.dual_clip: Expected `float` > 1.0, got 0.5"),
        ("trainer.policy_loss={clip_low: 2}", "clip_low must be <= 1, got 2; a ratio is never below 0"),
        ("trainer.loss_norm_tokens=100", "must be given with loss_agg_mode 'seq-mean-token-sum-norm' and with no other, got 100"),
        ("trainer.loss_norm_tokens=100", "run.yaml: trainer: loss_norm_tokens must be given"),
        ("trainer.loss_agg_mode=seq-mean-token-sum-norm", "'seq-mean-token-sum-norm' and with no other, got None with 'seq-mean"),
        ("trainer.kl={coefficient: 0.1, place: reward}", "trainer.kl.place must be 'loss' with trainer.adv_estimator 'grpo', got"),
        ("rollout.async_generation_ratio=-0.5", "rollout.async_generation_ratio: Expected `float` >= 0.0, got -0.5"),
        ("rollout.min_group_size=1", "rollout.min_group_size must be >= 2 with the group-relative estimator 'grpo', got 1"),
        ("rollout.min_group_size=9", "rollout.min_group_size must be <= rollout.num_return_sequences_in_group=8, got 9"),
        ("rollout.async_generation_ratio=.inf", "async_generation_ratio must be a finite number >= 0, got inf"),
        (
            "env_agents.environments=[{name: a, import_path: 'a:B', limits: {truncation_reward: -.inf}}]",
            "limits.truncation_reward must be a finite number, got -inf",
        ),
        ("rollout.num_return_sequences_in_group=1", "must be >= 2 with the group-relative estimator 'grpo', got 1"),
        (
            "trainer.weight_push.transport=pigeon",
            "trainer.weight_push.transport: must be one of 'broadcast', 'disk', 'tensor', got 'pigeon'",
        ),
        (
            "trainer.weight_push.transport=disk",
            "directory must be given with transport: disk and only then, got None with transport",
        ),
        (
            "trainer.weight_push.directory=/shared",
            "got '/shared' with transport: broadcast; give a folder that trainer and engines share",
        ),
        ("run.model_path=nowhere", "run.model_path must be a directory with a Hugging Face model, got 'nowhere'"),
        ("redis=redis://:s3cret@h", "redis: Expected `object`, got 'redis://:***@h'"),
        ("no equals sign", "an override must look like section.key=value, got 'no equals sign'"),
        ("trainer.num_updates.deeper=1", "cannot set trainer.num_updates.deeper: num_updates is a value, not a section"),
    ],
)
def test_a_mistake_is_a_sentence_with_key_rule_and_value(run_file: Path, override: str, sentence: str) -> None:
    with pytest.raises(ConfigurationError) as error:
        load(run_file, override)
    assert sentence in str(error.value)


@pytest.mark.parametrize(
    ("environment", "sentence"),
    [
        ({"name": "a"}, "environment 'a' must have exactly one of import_path and url"),
        ({"name": "a b", "url": "ws://x"}, "name: must be 1 to 64 letters, digits, '.', '_' and '-', and begin with"),
        ({"name": "a", "import_path": "module"}, "import_path must look like package.module:Class, got 'module'"),
        ({"name": "a", "url": "ftp://x"}, "url must start with ws://, wss://, http:// or https://, got 'ftp://x'"),
        ({"name": "a", "url": "ws://x", "limits": {"max_turn": 1}}, "limits.max_turn'; did you mean 'max_turns'?"),
        ({"name": "a", "url": "ws://x", "tasks": {"kind": "csv"}}, "tasks.kind: must be one of 'jsonl', 'parquet', 'seeds', got"),
    ],
)
def test_a_wrong_environment_is_a_sentence(run_file: Path, environment: dict[str, object], sentence: str) -> None:
    raw = strict_yaml.load_yaml(run_file)
    raw["env_agents"]["environments"] = [environment]
    with pytest.raises(ConfigurationError) as error:
        strict_yaml.decode(raw, Configuration, source="run.yaml")
    assert sentence in str(error.value)


def test_two_environments_of_one_name_are_refused(run_file: Path) -> None:
    raw = strict_yaml.load_yaml(run_file)
    raw["env_agents"]["environments"] *= 2
    with pytest.raises(ConfigurationError, match="names must differ, got calculator more than once"):
        strict_yaml.decode(raw, Configuration, source="run.yaml")


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"- a list", "must hold a mapping of sections, got list"),
        (b"a: [", "is not YAML"),
        (b"a: \xff", "is not YAML"),
        (b'redis: {url: "redis://:s3cret@control:6379"\nrun: x', r"is not YAML: .*redis://:\*\*\*@control"),
    ],
)
def test_a_file_that_is_no_run_file_is_refused(tmp_path: Path, content: bytes, sentence: str) -> None:
    path = tmp_path / "run.yaml"
    path.write_bytes(content)
    with pytest.raises(ConfigurationError, match=sentence) as refusal:
        load(path)
    assert "s3cret" not in str(refusal.value)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="No such file"):
        load(tmp_path / "absent.yaml")
