import json

import pytest

from services.standalone.doctor import model, renderer_probe, run_directory
from services.standalone.doctor.finding import Severity
from services.standalone.doctor.model import Model
from services.standalone.doctor.programs import Reply
from services.standalone.doctor.run_directory import RunDirectory
from shared.configuration import EnvAgentsSection

FINE = Reply(0, "", "")


def rows(*, has_configuration=True, num_weight_files=1, has_tokenizer=True, renderer: Reply | None = FINE) -> dict[str, Severity]:
    facts = Model("models/x", has_configuration, num_weight_files, has_tokenizer, renderer)
    return {one.check: one.severity for one in model.check(facts, "qwen3")}


def test_whole_model_has_nothing_to_do():
    assert rows() == dict.fromkeys(["model", "tokenizer", "chat format"], Severity.OK)


def test_directory_without_a_model_is_one_problem():
    assert rows(has_configuration=False, renderer=None) == {"model": Severity.PROBLEM}


@pytest.mark.parametrize(
    ("change", "check", "severity"),
    [
        ({"num_weight_files": 0}, "model", Severity.WARNING),
        ({"has_tokenizer": False}, "tokenizer", Severity.WARNING),
        ({"renderer": Reply(2, "", "env_agents.renderer 'qwen' cannot be used")}, "chat format", Severity.PROBLEM),
        ({"renderer": Reply(3, "", "No module named 'renderers'")}, "chat format", Severity.WARNING),
        ({"renderer": Reply(None, "", "it did not answer within 120 s")}, "chat format", Severity.PROBLEM),
    ],
)
def test_what_is_missing_is_a_row(change, check, severity):
    assert {name: found for name, found in rows(**change).items() if found is not Severity.OK} == {check: severity}


def test_missing_packages_name_the_extra():
    facts = Model("x", True, 1, True, Reply(renderer_probe.PACKAGE_MISSING, "", "No module named 'renderers'"))
    assert ".[agents]" in model.check(facts, "auto")[-1].remedy


def test_real_models_chat_format_is_tried(tiny_model):
    assert model.look(tiny_model, EnvAgentsSection(renderer="qwen3")).renderer.is_success
    refused = model.look(tiny_model, EnvAgentsSection(renderer="qwen3", renderer_options={"no_such": 1})).renderer
    assert refused.status == renderer_probe.UNUSABLE
    assert "env_agents.renderer_options must suit the renderer 'qwen3'" in refused.last_error


def test_directory_is_looked_at_without_a_model(tmp_path):
    (tmp_path / "model.safetensors").write_text(json.dumps({}))
    assert model.look(tmp_path, EnvAgentsSection()) == Model(str(tmp_path), False, 1, False, None)


def test_run_directory_that_will_be_made_is_fine(tmp_path):
    facts = run_directory.look(tmp_path / "runs" / "first")
    assert facts == RunDirectory(str(tmp_path / "runs" / "first"), tmp_path, is_writable=True)
    assert run_directory.check(facts).severity is Severity.OK
    assert not (tmp_path / "runs").exists()


def test_run_directory_below_a_file_or_without_permission_is_a_problem(tmp_path):
    (tmp_path / "file").write_text("")
    below_a_file = run_directory.look(tmp_path / "file")
    for facts in (below_a_file, RunDirectory("/proc/x", tmp_path, is_writable=False)):
        assert run_directory.check(facts).severity is Severity.PROBLEM


def test_run_directory_that_is_only_read_need_not_be_writable(tmp_path):
    facts = RunDirectory("/app/runs", tmp_path, is_writable=False, has_trainer=False)
    assert run_directory.check(facts).severity is Severity.OK
