"""Renders deploy/kubernetes as `kubectl apply -k` would, and finds its way in what comes out."""

import shutil
import subprocess
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

Manifest = dict[str, Any]

SOURCE = Path(__file__).parents[2] / "deploy" / "kubernetes"
PASSWORD = "a-password-of-this-test"
WORKLOADS = ("Deployment", "StatefulSet", "Job", "JobSet", "Pod")
LAYOUTS = {
    "cpu": ("cpu", ()),
    "gpu": ("gpu", ("redis",)),
    "gpu-agents-by-demand": ("gpu", ("redis", "agents-by-demand")),
    "gpu-trainer-nodes": ("gpu", ("redis", "trainer-nodes")),
    "gpu-redis-elsewhere": ("gpu", ("redis-elsewhere",)),
}
"""Name → overlay, and the components that it has instead of its own, if any."""


def render(folder: Path, name: str) -> list[Manifest]:
    """Every object of a layout, in a copy of deploy/kubernetes in which the user has made the password."""
    overlay, components = LAYOUTS[name]
    shutil.copytree(SOURCE, folder, dirs_exist_ok=True)
    path = folder / "overlays" / overlay
    (path / "redis-password.txt").write_text(PASSWORD)
    if components:
        _choose(path / "kustomization.yaml", components)
    rendered = subprocess.run([*_kustomize(), str(path)], capture_output=True, text=True, check=False, timeout=60)
    assert rendered.returncode == 0, rendered.stderr
    return list(yaml.safe_load_all(rendered.stdout))


def _choose(path: Path, components: Iterable[str]) -> None:
    """What the comments of an overlay tell a user to change with its components."""
    kustomization = yaml.safe_load(path.read_text())
    kustomization["components"] = [f"../../components/{name}" for name in components]
    if "trainer-nodes" in components:
        del kustomization["patches"]
    if "agents-by-demand" in components:
        kustomization["replicas"] = [entry for entry in kustomization["replicas"] if entry["name"] != "env-agents"]
    path.write_text(yaml.safe_dump(kustomization))


def _kustomize() -> list[str]:
    if shutil.which("kubectl"):
        return ["kubectl", "kustomize"]
    if shutil.which("kustomize"):
        return ["kustomize", "build"]
    pytest.skip("NOT TESTED: the manifests; they are rendered by kubectl >= 1.27 or kustomize >= 5, and neither is installed")


def files_pod() -> Manifest:
    return yaml.safe_load((SOURCE / "files.yaml").read_text())


def of_kind(manifests: Iterable[Manifest], *kinds: str) -> list[Manifest]:
    return [manifest for manifest in manifests if manifest["kind"] in kinds]


def named(manifests: Iterable[Manifest], kind: str, name: str) -> Manifest:
    [found] = [manifest for manifest in of_kind(manifests, kind) if manifest["metadata"]["name"].startswith(name)]
    return found


def pod_template(workload: Manifest) -> Manifest:
    """metadata and spec of the pods of a workload."""
    if workload["kind"] == "Pod":
        return workload
    if workload["kind"] == "JobSet":
        [job] = workload["spec"]["replicatedJobs"]
        return job["template"]["spec"]["template"]
    return workload["spec"]["template"]


def containers(manifests: Iterable[Manifest]) -> Iterator[tuple[str, Manifest, Manifest]]:
    """Where it is, the pod's spec and the container."""
    for workload in of_kind(manifests, *WORKLOADS):
        spec = pod_template(workload)["spec"]
        for container in [*spec.get("initContainers", []), *spec["containers"]]:
            yield f"{workload['kind']} {workload['metadata']['name']}/{container['name']}", spec, container


def selects(selector: Manifest, labels: Manifest) -> bool:
    """Whether a label selector, as far as our manifests use one, takes in a pod with `labels`."""
    expressions = selector.get("matchExpressions", [])
    assert all(expression["operator"] == "In" for expression in expressions)
    has_labels = all(labels.get(key) == value for key, value in selector.get("matchLabels", {}).items())
    return has_labels and all(labels.get(expression["key"]) in expression["values"] for expression in expressions)
