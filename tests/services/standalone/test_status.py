import io

from rich.console import Console

from services.standalone import deployment, status
from shared import strict_yaml
from shared.configuration import Configuration

ANSWERS = {
    "run": "demo",
    "version": 7,
    "engines": [
        {"url": "http://10.0.0.7:30000", "state": "syncing", "version": 6, "outstanding_calls": 3, "problem": "it is late"}
    ],
    "books": {"started": 9, "running": 2, "ready": 1, "trained": 5, "discarded": {"stale": 1}},
    "environments": [
        {"name": "calculator", "weight": 1.0, "is_paused": False, "statistics": {"episodes": 256, "success_rate": 0.91}},
        {"name": "lookup", "weight": 0.5, "is_paused": True, "statistics": {"episodes": 0, "success_rate": None}},
    ],
}


def test_tables_show_engines_ledger_and_environments():
    shown = io.StringIO()
    Console(file=shown, width=140).print(status._tables(ANSWERS))
    text = shown.getvalue()
    assert "policy version 7 · groups: 9 started = 2 running + 1 ready + 5 trained + 1 discarded" in text
    for expected in ("http://10.0.0.7:30000", "syncing", "it is late", "calculator", "0.91", "lookup", "yes", "–"):
        assert expected in text


def test_ports_are_those_of_the_resolved_run_file(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    raw = {
        "run": {"id": "x", "directory": str(tmp_path), "model_path": str(tmp_path)},
        "redis": {"url": "redis://127.0.0.1:0/0"},
        "inference_hub": {"port": 0},
        "env_agents": {"port": 0},
        "trainer": {"num_updates": 1},
    }
    given = strict_yaml.decode(raw, Configuration, source="test")
    assert status._resolved(given) == given
    planned = deployment.plan(given, has_external_redis=False)
    planned.run_file.write_text(deployment.dump(planned.configuration))
    assert status._resolved(given).inference_hub.port == planned.configuration.inference_hub.port
