"""Which settings win: what the user says now, then what `headrace up` wrote down, then the run file."""

import pytest

from services.standalone import deployment
from services.standalone.run_location import locate
from shared.configuration import dump, read
from shared.errors import ConfigurationError


@pytest.fixture
def run_file(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text(
        f"run: {{id: x, directory: {tmp_path}/out, model_path: nowhere}}\ntrainer: {{num_updates: 1}}\n"
        "redis: {url: 'redis://127.0.0.1:0/3'}\ninference_hub: {port: 0}\nenv_agents: {port: 0}\nengines: {count: 1, device: cpu}\n"
    )
    return path


@pytest.fixture
def started(run_file, tmp_path):
    """The run as `headrace up` wrote it down."""
    planned = deployment.plan(read(run_file, environment_variables={}), has_external_redis=False)
    (tmp_path / "out").mkdir()
    planned.run_file.write_text(dump(planned.configuration))
    return planned.configuration


def test_run_that_never_started_is_the_run_files(run_file):
    assert locate(run_file, [], {}) == read(run_file, environment_variables={})


def test_model_need_not_be_on_this_machine(run_file):
    assert locate(run_file, [], {}).run.model_path == "nowhere"


def test_ports_are_those_that_were_decided_at_start(run_file, started):
    assert locate(run_file, [], {}) == started


def test_addresses_of_the_environment_win_over_what_was_written_down(run_file, started):
    found = locate(run_file, [], {"HEADRACE_HUB_URL": "http://hub:8800", "HEADRACE_REDIS_URL": "redis://redis:6379/0"})
    assert found.inference_hub.address == "http://hub:8800"
    assert found.redis.url == "redis://redis:6379/0"
    assert found.env_agents == started.env_agents


def test_overrides_win_over_both(run_file, started):
    variables = {"HEADRACE_AGENTS_URL": "http://agents:8801"}
    found = locate(run_file, ["env_agents.url=http://mine:1", "run.id=other"], variables)
    assert found.env_agents.address == "http://mine:1"
    assert found.run.id == "other"
    assert found.inference_hub == started.inference_hub


def test_port_0_in_an_override_is_the_port_that_was_chosen_for_it(run_file, started):
    """Whoever gave these to `headrace up` gives them to the other commands too."""
    asked = ["redis.url=redis://127.0.0.1:0/3", "inference_hub.port=0", "env_agents.port=0"]
    assert locate(run_file, asked, {}) == started


def test_password_in_the_address_still_counts_although_it_is_not_written_down(run_file, started):
    port = started.redis.url.rpartition(":")[2]
    assert locate(run_file, ["redis.url=redis://:s3cret@127.0.0.1:0/3"], {}).redis.url == f"redis://:s3cret@127.0.0.1:{port}"
    run_file.write_text(run_file.read_text().replace("redis://127", "redis://:s3cret@127"))
    assert locate(run_file, [], {}).redis.url == f"redis://:s3cret@127.0.0.1:{port}"
    assert locate(run_file, ["redis.url=redis://db/0"], {}).redis.url == "redis://db/0"


def test_other_directory_is_another_run(run_file, started, tmp_path):
    assert locate(run_file, [f"run.directory={tmp_path}/second"], {}).inference_hub.port == 0


def test_mistake_names_the_file_it_is_in(run_file, started, tmp_path):
    (tmp_path / "out" / "run.yaml").write_text("run: {}\n")
    with pytest.raises(ConfigurationError, match=r"out/run\.yaml"):
        locate(run_file, [], {})
