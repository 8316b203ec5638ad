import pytest

from examples.calculator import Calculator
from services.env_agents.environment import Environment
from services.env_agents.environment_threads import ThreadedEnvironment
from services.env_agents.gymnasium_adapter import GymnasiumEnvironment
from services.env_agents.loading import EnvironmentLoader, NotAllowedError, check_allowed, import_environment, import_reward
from services.env_agents.openenv import UnreachableEnvironmentError
from shared.environment_spec import EnvironmentSpec, JsonlTasks, ParquetTasks
from shared.errors import ConfigurationError

ALLOWED = ("examples", "gymnasium", "raises_on_import")


def test_classes_of_the_interface_are_made_with_their_arguments():
    assert isinstance(import_environment("examples.calculator:Calculator", {}, ALLOWED)(), Calculator)
    assert import_environment("examples.lookup_chain:LookupChain", {"max_links": 2}, ALLOWED)().max_links == 2


@pytest.mark.parametrize(
    ("import_path", "arguments"),
    [("gymnasium:make", {"id": "FrozenLake-v1"}), ("gymnasium.envs.toy_text.frozen_lake:FrozenLakeEnv", {"is_slippery": False})],
)
def test_gymnasium_environments_are_adapted(import_path, arguments):
    assert isinstance(import_environment(import_path, arguments, ALLOWED)(), GymnasiumEnvironment)


@pytest.mark.parametrize(
    ("import_path", "arguments", "message"),
    [
        ("examples.nothing:Here", {}, "failed to import: ModuleNotFoundError"),
        ("examples.calculator:Calc", {}, "examples.calculator has no 'Calc'"),
        ("examples.calculator:MAX_EXPRESSION_CHARACTERS", {}, "must name an Environment or gymnasium.Env"),
        ("examples.calculator:Calculator", {"digits": 3}, "arguments must suit examples.calculator:Calculator"),
    ],
)
def test_what_cannot_be_imported_is_a_sentence(import_path, arguments, message):
    with pytest.raises(ConfigurationError, match=message):
        import_environment(import_path, arguments, ALLOWED)


def test_module_that_raises_on_import_is_a_sentence(tmp_path, monkeypatch):
    (tmp_path / "raises_on_import.py").write_text("raise RuntimeError('no licence')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigurationError, match="failed to import: RuntimeError: no licence"):
        import_environment("raises_on_import:Environment", {}, ALLOWED)


@pytest.mark.parametrize("kind", ["environment", "reward"])
@pytest.mark.parametrize("name", ["run", "system", "Popen"])
def test_what_an_allowed_module_imports_itself_is_not_its_own_to_offer(tmp_path, monkeypatch, kind, name):
    (tmp_path / "offers_others.py").write_text("from os import system\nfrom subprocess import Popen, run\n")
    monkeypatch.syspath_prepend(tmp_path)
    load = {"environment": import_environment, "reward": import_reward}[kind]
    with pytest.raises(NotAllowedError, match=r"must name something defined inside env_agents\.import_allowlist \(offers_others\)"):
        load(f"offers_others:{name}", {}, ["offers_others"])


@pytest.mark.parametrize("import_path", ["os:system", "examples_of_mine:Calculator", "example:Calculator"])
def test_modules_outside_the_allowlist_are_named_with_it(import_path):
    with pytest.raises(NotAllowedError, match=r"inside env_agents\.import_allowlist \(examples, mine\.own\)"):
        check_allowed(import_path, ["examples", "mine.own"])


@pytest.mark.parametrize("import_path", ["examples:Calculator", "examples.deep.inside:Calculator", "mine.own:X"])
def test_allowed_packages_cover_what_is_inside_them(import_path):
    check_allowed(import_path, ["examples", "mine.own"])


async def test_url_without_server_is_a_sentence(http_session, renderer, client, unused_tcp_port):
    loader = EnvironmentLoader(http_session, renderer, client, import_allowlist=(), seed=0)
    url = f"ws://127.0.0.1:{unused_tcp_port}"
    with pytest.raises(UnreachableEnvironmentError, match=f"an OpenEnv server must answer at {url}"):
        await loader.load(EnvironmentSpec(name="remote", url=url))


async def test_missing_dataset_is_a_sentence(http_session, renderer, client):
    loader = EnvironmentLoader(http_session, renderer, client, import_allowlist=("examples",), seed=0)
    spec = EnvironmentSpec(name="c", import_path="examples.calculator:Calculator", tasks=ParquetTasks("none.parquet"))
    with pytest.raises(ConfigurationError, match=r"got 'none\.parquet', and there is no"):
        await loader.load(spec)


@pytest.fixture
def load(http_session, renderer, client, tmp_path, monkeypatch):
    """Loads a class of the test's own, with one row of a dataset as its tasks."""

    async def load(environment_class, **fields):
        (tmp_path / "rows.jsonl").write_text('{"prompt": "why?"}')
        monkeypatch.setattr("services.env_agents.loading.import_environment", lambda *_: environment_class)
        loader = EnvironmentLoader(http_session, renderer, client, import_allowlist=("examples",), seed=0)
        tasks = JsonlTasks(str(tmp_path / "rows.jsonl"), **fields)
        return await loader.load(EnvironmentSpec(name="c", import_path="examples.calculator:Calculator", tasks=tasks))

    return load


async def test_tools_count_towards_the_length_of_prompts(load, renderer):
    longest = len(renderer.prompt([{"role": "user", "content": "why?"}], []))
    assert (await load(Environment, max_prompt_length=longest)).tasks.count == 1
    with pytest.raises(ConfigurationError, match=r"1 over tasks\.max_prompt_length"):
        await load(Calculator, max_prompt_length=longest)


async def test_environment_that_knows_its_tools_after_reset_is_asked_only_for_lengths(load):
    class Late(Environment):
        def tool_specs(self):
            raise AttributeError("no tools before reset")

    assert (await load(Late)).tasks.count == 1
    with pytest.raises(ConfigurationError, match=r"'c' must be made, .* AttributeError: no tools before reset; correct"):
        await load(Late, max_prompt_length=99)


async def test_environment_in_threads_is_made_there(http_session, renderer, client):
    loader = EnvironmentLoader(http_session, renderer, client, import_allowlist=("examples",), seed=0)
    spec = EnvironmentSpec(name="c", import_path="examples.calculator:Calculator", execution="thread")
    assert isinstance((await loader.load(spec)).create(), ThreadedEnvironment)
