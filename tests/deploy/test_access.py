"""What Compose and Kubernetes give each process: the tokens of those it asks, and of Redis what a run needs."""

import subprocess

import pytest
import redis
import yaml

from services.standalone.redis_server import CLIENT_RULES
from shared import agents_token, hub_tokens
from shared.redis_address import PASSWORD_FILE_VARIABLE
from tests.deploy.manifests import LAYOUTS, WORKLOADS, containers, of_kind, pod_template, render

TOKENS_OF = {
    "inference-hub": {hub_tokens.CLIENT_VARIABLE, hub_tokens.CONTROL_VARIABLE},
    "env-agents": {hub_tokens.CLIENT_VARIABLE, agents_token.VARIABLE},
    "trainer": {hub_tokens.CONTROL_VARIABLE, agents_token.VARIABLE},
}
TOKENS = set().union(*TOKENS_OF.values())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_pod_has_the_tokens_that_it_asks_for_or_sends_and_no_others(tmp_path, layout):
    manifests = render(tmp_path, layout)
    for workload in of_kind(manifests, *WORKLOADS):
        name = pod_template(workload)["metadata"]["labels"]["app.kubernetes.io/name"]
        for where, _, container in containers([workload]):
            variables = {variable["name"]: variable for variable in container.get("env", [])}
            assert variables.keys() & TOKENS == TOKENS_OF.get(name, set()), where
            for variable in variables.keys() & TOKENS:
                assert variables[variable]["valueFrom"]["secretKeyRef"]["optional"], where


def test_compose_gives_each_process_the_tokens_that_it_asks_for_or_sends_and_no_others(repository):
    services = yaml.safe_load((repository / "docker-compose.yml").read_text())["services"]
    for name, service in services.items():
        variables = service.get("environment", {})
        if name in TOKENS_OF:
            assert variables.keys() & TOKENS == TOKENS_OF[name], name
            assert PASSWORD_FILE_VARIABLE in variables, name
        else:
            assert not TOKENS & variables.keys(), name
    written = (repository / ".env.example").read_text()
    assert all(f"#{token}=" in written for token in TOKENS)


def test_every_redis_lets_its_clients_do_the_same(repository):
    rules = f"user default on #$hash {CLIENT_RULES}\n"
    assert rules in (repository / "deploy/compose/redis.sh").read_text()
    assert rules in (repository / "deploy/kubernetes/components/redis/redis.yaml").read_text()


def test_the_password_that_compose_makes_opens_its_redis_for_a_run_and_no_more(repository, tmp_path, serve_redis):
    """The script itself runs, with the paths of this test and without the server."""
    script = (repository / "deploy/compose/redis.sh").read_text().replace("/secrets", str(tmp_path))
    subprocess.run(["sh", "-c", script.replace("exec docker-entrypoint.sh", "echo")], check=True, env={"PATH": "/usr/bin:/bin"})
    rules = next(line for line in (tmp_path / "redis.conf").read_text().splitlines() if line.startswith("user "))
    (tmp_path / "rules.conf").write_text(f"{rules}\n")
    password = (tmp_path / "redis_password").read_text()
    assert len(password) == 48
    assert password not in rules
    url = serve_redis("--include", str(tmp_path / "rules.conf"), password=password)
    with redis.Redis.from_url(url, password=password) as client:
        assert client.hset("headrace:{run}:ledger", "version", 1) == 1
        with pytest.raises(redis.exceptions.NoPermissionError):
            client.flushall()
    with redis.Redis.from_url(url) as client, pytest.raises(redis.AuthenticationError):
        client.ping()
