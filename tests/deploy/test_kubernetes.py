"""The manifests of deploy/kubernetes: what the schemas of Kubernetes say of them, and what our own rules do.

No cluster is started. Objects of Kubernetes itself are validated strictly against its schemas; the two custom resources against
the fields that we use of them (custom_resources.py). The trainer's command runs in the shell, the policies in policies.py.
"""

import base64
import json
import re
import subprocess
from dataclasses import fields

import kubernetes_validate
import pytest
import yaml
from jsonschema import Draft202012Validator

from shared import configuration, strict_yaml
from shared.agents_token import VARIABLE as AGENTS_VARIABLE
from shared.configuration import ADDRESS_VARIABLES, Configuration
from shared.hub_tokens import CLIENT_VARIABLE, CONTROL_VARIABLE
from shared.ledger import Books
from shared.redis_address import PASSWORD_FILE_VARIABLE, PASSWORD_VARIABLE, connection_url
from tests.deploy.custom_resources import JOB_SET, SCALED_OBJECT
from tests.deploy.manifests import (
    LAYOUTS,
    PASSWORD,
    SOURCE,
    WORKLOADS,
    containers,
    files_pod,
    named,
    of_kind,
    pod_template,
    render,
    selects,
)
from tests.deploy.policies import may_connect

KUBERNETES_VERSIONS = ("1.31", "1.37")
"""The oldest that has all we use, and the newest whose schemas the package brings."""
PINNED = re.compile(r"^(headrace/(inference-hub|env-agents|engine|trainer):\d+\.\d+\.\d+(-gpu)?|redis:\d+\.\d+\.\d+-alpine)$")
OURS_WITHOUT_VALUE = {"WORLD", "MASTER", "HOME", "DS_ACCELERATOR", "OMP_NUM_THREADS"}
EPHEMERAL = (32768, 60999)


@pytest.fixture(scope="module", params=LAYOUTS)
def layout(request, tmp_path_factory):
    """The name and the objects of one layout."""
    return request.param, render(tmp_path_factory.mktemp("kubernetes"), request.param)


@pytest.fixture
def manifests(layout):
    return layout[1]


def run_file(manifests) -> Configuration:
    """The run file that the pods mount, as the processes read it."""
    raw = named(manifests, "ConfigMap", "run-file")["data"]["run.yaml"]
    return strict_yaml.decode(yaml.safe_load(raw), Configuration, source="run.yaml")


def validate_builtin(manifest, version):
    kubernetes_validate.validate(manifest, version, strict=True)


@pytest.mark.parametrize("version", KUBERNETES_VERSIONS)
def test_objects_of_kubernetes_are_valid(manifests, version):
    for manifest in [*manifests, files_pod()]:
        if manifest["kind"] not in ("ScaledObject", "JobSet"):
            validate_builtin(manifest, version)


def test_validation_is_strict():
    pod = files_pod()
    pod["spec"]["containers"][0]["imagePullPolice"] = "Always"
    with pytest.raises(kubernetes_validate.ValidationError, match="imagePullPolice"):
        validate_builtin(pod, KUBERNETES_VERSIONS[0])


def test_custom_resources_have_only_fields_that_exist(manifests):
    for scaled in of_kind(manifests, "ScaledObject"):
        assert scaled["apiVersion"] == "keda.sh/v1alpha1"
        Draft202012Validator(SCALED_OBJECT).validate(scaled["spec"])
        autoscaler = {
            "apiVersion": "autoscaling/v2",
            "kind": "HorizontalPodAutoscaler",
            "spec": {
                "scaleTargetRef": {"apiVersion": "apps/v1", "kind": "Deployment", "name": "env-agents"},
                "maxReplicas": scaled["spec"]["maxReplicaCount"],
                "behavior": scaled["spec"]["advanced"]["horizontalPodAutoscalerConfig"]["behavior"],
            },
        }
        validate_builtin(autoscaler, KUBERNETES_VERSIONS[0])
    for job_set in of_kind(manifests, "JobSet"):
        assert job_set["apiVersion"] == "jobset.x-k8s.io/v1alpha2"
        Draft202012Validator(JOB_SET).validate(job_set["spec"])
        [job] = job_set["spec"]["replicatedJobs"]
        validate_builtin({"apiVersion": "batch/v1", "kind": "Job", **job["template"]}, KUBERNETES_VERSIONS[0])


def test_every_image_is_one_of_ours_or_pinned(manifests):
    for where, _, container in containers([*manifests, files_pod()]):
        assert PINNED.match(container["image"]), f"{where} has {container['image']}"


def test_every_container_is_restricted(manifests):
    for where, pod, container in containers([*manifests, files_pod()]):
        assert pod["securityContext"]["runAsNonRoot"], where
        assert pod["securityContext"]["runAsUser"] == 10001, where
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}, where
        assert pod["automountServiceAccountToken"] is False, where
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }, where


def test_every_container_has_requests_a_memory_limit_and_what_runs_for_ever_has_probes(manifests):
    for where, _, container in containers([*manifests, files_pod()]):
        assert container["resources"]["requests"].keys() >= {"cpu", "memory"}, where
        assert "memory" in container["resources"]["limits"], where
        if where.startswith(("Deployment", "StatefulSet")):
            assert {"livenessProbe", "readinessProbe"} <= container.keys(), where


def test_every_name_that_a_pod_uses_exists(manifests):
    """Kustomize gives ConfigMaps and Secrets a hash; a reference that it does not know keeps the bare name."""
    there = {(manifest["kind"], manifest["metadata"]["name"]) for manifest in manifests}
    for where, pod, container in containers(manifests):
        used = {("ConfigMap", source["configMapRef"]["name"]) for source in container.get("envFrom", [])}
        for volume in pod.get("volumes", []):
            used |= {("ConfigMap", volume["configMap"]["name"])} if "configMap" in volume else set()
            used |= {("Secret", volume["secret"]["secretName"])} if "secret" in volume else set()
            if "persistentVolumeClaim" in volume:
                used.add(("PersistentVolumeClaim", volume["persistentVolumeClaim"]["claimName"]))
        assert used <= there, where


def test_every_service_leads_to_a_port_of_its_pods(manifests):
    templates = [pod_template(workload) for workload in of_kind(manifests, *WORKLOADS)]
    for service in of_kind(manifests, "Service"):
        selector = {"matchLabels": service["spec"]["selector"]}
        [pods] = [template for template in templates if selects(selector, template["metadata"]["labels"])]
        ports = {port["name"]: port["containerPort"] for container in pods["spec"]["containers"] for port in container["ports"]}
        for port in service["spec"]["ports"]:
            assert ports[port["targetPort"]] == port["port"], service["metadata"]["name"]


def test_every_address_names_a_service_and_its_port(manifests, layout):
    services = {service["metadata"]["name"]: service["spec"]["ports"][0]["port"] for service in of_kind(manifests, "Service")}
    for variable, address in named(manifests, "ConfigMap", "addresses")["data"].items():
        host, port = re.fullmatch(r"\w+://([^:/]+):(\d+)(/0)?", address).groups()[:2]
        if variable != "HEADRACE_REDIS_URL" or layout[0] != "gpu-redis-elsewhere":
            assert services[host] == int(port)
    for where, _, container in containers(manifests):
        for setting in re.findall(r"engines\.discovery=(.*)", "\n".join(container.get("args", []))):
            assert [f"http://{host}:{port}" for host, port in services.items() if host == "engine"] == json.loads(setting), where


def test_every_variable_is_one_that_a_process_reads(manifests):
    ours = {*ADDRESS_VARIABLES, PASSWORD_VARIABLE, PASSWORD_FILE_VARIABLE, CLIENT_VARIABLE, CONTROL_VARIABLE, AGENTS_VARIABLE}
    assert named(manifests, "ConfigMap", "addresses")["data"].keys() == ADDRESS_VARIABLES.keys()
    for where, _, container in containers([*manifests, files_pod()]):
        assert {variable["name"] for variable in container.get("env", [])} <= ours | OURS_WITHOUT_VALUE, where


def test_every_setting_in_arguments_is_a_key_of_the_run_file(manifests, tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(named(manifests, "ConfigMap", "run-file")["data"]["run.yaml"])
    for _, _, container in containers(manifests):
        overrides = [argument.removeprefix("--set=") for argument in container.get("args", []) if argument.startswith("--set=")]
        configuration.read(path, overrides=overrides, environment_variables={})


def test_run_file_keeps_everything_on_the_shared_volume(manifests):
    run = run_file(manifests)
    paths = [run.run.directory, run.run.model_path]
    for environment in run.env_agents.environments:
        paths += [tasks.path for tasks in (environment.tasks, environment.evaluation_tasks) if hasattr(tasks, "path")]
    assert all(path.startswith("/app/runs/") for path in paths)
    for where, _, container in containers(manifests):
        mounts = {mount["mountPath"]: mount.get("readOnly", False) for mount in container.get("volumeMounts", [])}
        if "/app/runs" in mounts:
            assert mounts["/app/runs"] is not where.endswith("/trainer"), f"{where}: only the trainer writes"


def test_run_file_fits_the_devices(manifests):
    device = run_file(manifests).engines.device
    for where, _, container in containers(manifests):
        num_gpus = int(container["resources"]["limits"].get("nvidia.com/gpu", 0))
        variables = {variable["name"]: variable.get("value") for variable in container.get("env", [])}
        if where.endswith("/trainer"):
            slots = list(json.loads(variables["WORLD"]).values())
            assert all(len(node) == max(1, num_gpus) for node in slots), where
        if where.endswith(("/trainer", "/engine")):
            assert (num_gpus > 0) == (device == "cuda"), where
            assert container["image"].endswith("-gpu") == (device == "cuda" and where.endswith("/engine")), where


def test_trainer_nodes_are_the_trainer_but_for_the_number_of_gpus(tmp_path):
    [job] = of_kind(render(tmp_path / "one", "gpu"), "Job")
    [job_set] = of_kind(render(tmp_path / "more", "gpu-trainer-nodes"), "JobSet")
    one, more = pod_template(job), pod_template(job_set)
    world_of_one, world_of_more = (_variables(template).pop("WORLD") for template in (one, more))
    assert len(json.loads(world_of_one)) == 1
    assert len(json.loads(world_of_more)) == job_set["spec"]["replicatedJobs"][0]["template"]["spec"]["completions"]
    assert _variables(more)["MASTER"] == "trainer-node-0-0.trainer"
    for template in (one, more):
        for variable in template["spec"]["containers"][0]["env"]:
            if variable["name"] in ("WORLD", "MASTER"):
                variable["value"] = ""
        for names in (template["spec"]["containers"][0]["env"], template["spec"]["volumes"]):
            names.sort(key=lambda entry: entry["name"])
    assert one == more


def _variables(template):
    """Those with a value; the others' are secrets."""
    return {variable["name"]: variable["value"] for variable in template["spec"]["containers"][0]["env"] if "value" in variable}


def test_trainer_command_gives_deepspeed_the_world(tmp_path):
    """The shell line itself runs, with `python` replaced by a script that shows its arguments."""
    [job] = of_kind(render(tmp_path / "kubernetes", "gpu"), "Job")
    [container] = pod_template(job)["spec"]["containers"]
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    python.chmod(0o755)
    environment = {**_variables(pod_template(job)), "PATH": f"{tmp_path}:/usr/bin:/bin"}
    command = [*container["command"], *container["args"]]
    shown = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.splitlines()
    world = next(argument.removeprefix("--world_info=") for argument in shown if argument.startswith("--world_info="))
    assert json.loads(base64.urlsafe_b64decode(world)) == {"trainer": list(range(8))}
    assert shown[-3:] == ["trainer/train.py", "--config", "/etc/headrace/run.yaml"]
    assert "--node_rank=0" in shown


def test_pods_may_talk_along_the_arrows_and_no_others(manifests, layout):
    """Every pair of pods and every port; a connection needs both the egress of one and the ingress of the other."""
    pods = {}
    for workload in of_kind(manifests, *WORKLOADS):
        labels = pod_template(workload)["metadata"]["labels"]
        pods[labels["app.kubernetes.io/name"]] = labels
    ports = (53, 443, 6379, 8800, 8801, 29500, 30000, EPHEMERAL[0], EPHEMERAL[1])
    found = {
        (source, target, port)
        for source in pods
        for target in pods
        for port in ports
        if may_connect(manifests, pods[source], pods[target], port)
    }
    calls = {
        ("inference-hub", "engine", 30000),
        ("env-agents", "inference-hub", 8800),
        ("trainer", "inference-hub", 8800),
        ("trainer", "env-agents", 8801),
        ("trainer", "trainer", 29500),
    }
    weights = {(source, target, port) for source in ("engine", "trainer") for target in ("engine", "trainer") for port in EPHEMERAL}
    weights |= {("inference-hub", "trainer", port) for port in EPHEMERAL}
    to_redis = {(source, "redis", 6379) for source in ("inference-hub", "env-agents", "trainer")}
    assert found == calls | weights | (set() if layout[0] == "gpu-redis-elsewhere" else to_redis)


def test_more_than_one_pod_has_a_disruption_budget(manifests):
    budgets = [budget["spec"]["selector"] for budget in of_kind(manifests, "PodDisruptionBudget")]
    for deployment in of_kind(manifests, "Deployment"):
        if deployment["spec"].get("replicas", 2) > 1:
            assert any(selects(budget, pod_template(deployment)["metadata"]["labels"]) for budget in budgets)


def test_agents_are_scaled_by_books_that_they_show(tmp_path):
    """The formula uses the triggers, the triggers read fields of GET /status, and its target is what one process can run."""
    manifests = render(tmp_path, "gpu-agents-by-demand")
    [scaled] = of_kind(manifests, "ScaledObject")
    modifiers, triggers = scaled["spec"]["advanced"]["scalingModifiers"], scaled["spec"]["triggers"]
    assert set(re.findall(r"[a-z_]+", modifiers["formula"])) == {trigger["name"] for trigger in triggers}
    locations = {trigger["metadata"]["valueLocation"] for trigger in triggers}
    assert locations <= {f"books.{field.name}" for field in fields(Books)}
    run = run_file(manifests)
    [environment] = run.env_agents.environments
    assert int(modifiers["target"]) * run.rollout.num_return_sequences_in_group == environment.limits.max_concurrent_episodes
    assert "replicas" not in named(manifests, "Deployment", "env-agents")["spec"]


def test_demand_does_not_depend_on_how_many_processes_run():
    """KEDA's formula equals the groups that run plus the places that are free, whoever runs them."""
    manifest = yaml.safe_load_all((SOURCE / "components" / "agents-by-demand" / "scaled-object.yaml").read_text())
    formula = next(manifest)["spec"]["advanced"]["scalingModifiers"]["formula"]
    for running in (0, 5, 20):  # 3 updates of 10 groups trained, 4 groups ready, 2 discarded, ratio 1.
        books = {"version": 3, "ratio": 1.0, "batch_groups": 10, "trained": 30, "ready": 4}
        started, discarded = running + 4 + 30 + 2, 2
        free = (3 + 1 + 1.0) * 10 - (started - discarded)
        assert eval(formula, {}, books) == running + free == 16


def test_password_is_made_by_the_user_and_reaches_redis(manifests):
    secret = named(manifests, "Secret", "redis-password")
    assert base64.b64decode(secret["data"]["password"]).decode() == PASSWORD
    assert PASSWORD not in json.dumps([manifest for manifest in manifests if manifest["kind"] != "Secret"])
    assert not list(SOURCE.rglob("*.pem")) + list(SOURCE.rglob("*.key"))
    assert "redis-password.txt" in (SOURCE / ".gitignore").read_text()
    for path in SOURCE.rglob("*.yaml"):
        for manifest in yaml.safe_load_all(path.read_text()):
            assert not isinstance(manifest, dict) or manifest.get("kind") != "Secret", path


def test_processes_take_the_mounted_password(manifests, tmp_path):
    for where, _, container in containers(manifests):
        variables = {variable["name"]: variable.get("value") for variable in container.get("env", [])}
        mounts = {mount["name"]: mount["mountPath"] for mount in container.get("volumeMounts", [])}
        if "redis-password" in mounts and not where.startswith("StatefulSet"):
            assert variables[PASSWORD_FILE_VARIABLE] == f"{mounts['redis-password']}/password", where
    (tmp_path / "password").write_text(PASSWORD + "\n")
    url = connection_url("redis://redis:6379/0", {PASSWORD_FILE_VARIABLE: str(tmp_path / "password")})
    assert url == f"redis://:{PASSWORD}@redis:6379/0"
