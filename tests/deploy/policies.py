"""Network policies, as a cluster would apply them to two of our own pods."""

from collections.abc import Iterable

from tests.deploy.manifests import Manifest, of_kind, selects


def may_connect(manifests: Iterable[Manifest], source: Manifest, target: Manifest, port: int) -> bool:
    """Whether pods with the labels `source` reach `port` of pods with the labels `target`: both sides must allow it."""
    manifests = list(manifests)
    return _allows(manifests, "Egress", source, target, port) and _allows(manifests, "Ingress", target, source, port)


def _allows(manifests: Iterable[Manifest], direction: str, labels: Manifest, peer_labels: Manifest, port: int) -> bool:
    policies = [
        policy["spec"]
        for policy in of_kind(manifests, "NetworkPolicy")
        if direction in policy["spec"]["policyTypes"] and selects(policy["spec"]["podSelector"], labels)
    ]
    assert policies, f"no policy denies {direction} by default for {labels}"
    peers = "to" if direction == "Egress" else "from"
    rules = [rule for policy in policies for rule in policy.get(direction.lower(), [])]
    return any(_has(rule, port) and any(_is_peer(peer, peer_labels) for peer in rule[peers]) for rule in rules)


def _has(rule: Manifest, port: int) -> bool:
    return any(entry["port"] <= port <= entry.get("endPort", entry["port"]) for entry in rule["ports"])


def _is_peer(peer: Manifest, labels: Manifest) -> bool:
    """A peer in another namespace or outside the cluster is none of our pods."""
    return "podSelector" in peer and "namespaceSelector" not in peer and selects(peer["podSelector"], labels)
