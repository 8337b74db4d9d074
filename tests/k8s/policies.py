"""What the NetworkPolicies of a rendered overlay allow, by the rules of Kubernetes.

A policy isolates the pods it selects, in the directions it names; an isolated pod may do what any policy that selects
it allows. A connection needs both ends: out of the one, into the other. What no policy selects may do anything.
"""

import ipaddress
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from tests.k8s.rendering import WORKLOADS, Manifest, matches, of_kind, pod_labels

Direction = Literal["Ingress", "Egress"]
FLEET = "glowplug"


@dataclass(frozen=True)
class End:
    """One end of a connection: a pod with its namespace, or with `labels` None an address outside the cluster."""

    name: str
    labels: Mapping[str, str] | None = None
    namespace: Mapping[str, str] = field(default_factory=dict)
    address: str = ""

    @property
    def is_ours(self) -> bool:
        return self.namespace.get("kubernetes.io/metadata.name") == FLEET


@dataclass(frozen=True, order=True)
class Ports:
    """A range of one protocol, both ends in it."""

    protocol: str
    first: int
    last: int

    def __contains__(self, port: tuple[str, int]) -> bool:
        return port[0] == self.protocol and self.first <= port[1] <= self.last

    def __str__(self) -> str:
        span = str(self.first) if self.first == self.last else f"{self.first}-{self.last}"
        return span if self.protocol == "TCP" else f"{span} {self.protocol.lower()}"


ANY_PORT = tuple(Ports(protocol, 1, 65535) for protocol in ("TCP", "UDP", "SCTP"))


def fleet_ends(manifests: list[Manifest]) -> dict[str, End]:
    """One end per kind of pod that the manifests make."""
    namespace = {"kubernetes.io/metadata.name": FLEET}
    return {
        w["metadata"]["name"]: End(w["metadata"]["name"], pod_labels(w), namespace)
        for w in of_kind(manifests, *WORKLOADS)
    }


def selecting(manifests: list[Manifest], end: End, direction: Direction) -> list[Manifest]:
    """The policies that isolate this end in that direction."""
    if end.labels is None or not end.is_ours:
        return []
    return [
        policy
        for policy in of_kind(manifests, "NetworkPolicy")
        if direction in policy["spec"]["policyTypes"] and matches(policy["spec"]["podSelector"], end.labels)
    ]


def rules(policy: Manifest, direction: Direction) -> Iterator[tuple[list[dict[str, Any]] | None, tuple[Ports, ...]]]:
    """(peers or None for everybody, ports) of each rule."""
    key, peers = ("ingress", "from") if direction == "Ingress" else ("egress", "to")
    for rule in policy["spec"].get(key, ()):
        ports = tuple(
            Ports(p.get("protocol", "TCP"), p["port"], p.get("endPort", p["port"])) for p in rule.get("ports", ())
        )
        yield rule.get(peers) or None, ports or ANY_PORT


def is_peer(peer: Mapping[str, Any], other: End) -> bool:
    """Whether `other` is one that this peer of a rule (of our namespace) names."""
    if "ipBlock" in peer:
        if not other.address:
            return False
        address, block = ipaddress.ip_address(other.address), peer["ipBlock"]
        return address in ipaddress.ip_network(block["cidr"]) and not any(
            address in ipaddress.ip_network(part) for part in block.get("except", ())
        )
    if other.labels is None:
        return False
    if "namespaceSelector" in peer:
        if not matches(peer["namespaceSelector"], other.namespace):
            return False
    elif not other.is_ours:
        return False
    return matches(peer.get("podSelector", {}), other.labels)


def allowed(manifests: list[Manifest], end: End, other: End, direction: Direction) -> tuple[Ports, ...]:
    """What `end` may open to (Egress), or take from (Ingress), `other`."""
    policies = selecting(manifests, end, direction)
    if not policies:
        return ANY_PORT
    return tuple(
        ports
        for policy in policies
        for peers, spans in rules(policy, direction)
        if peers is None or any(is_peer(peer, other) for peer in peers)
        for ports in spans
    )


def connections(manifests: list[Manifest], source: End, target: End) -> set[Ports]:
    """Every port of `target` that `source` can reach: allowed out of the one and into the other."""
    out, into = allowed(manifests, source, target, "Egress"), allowed(manifests, target, source, "Ingress")
    return {
        Ports(a.protocol, max(a.first, b.first), min(a.last, b.last))
        for a in out
        for b in into
        if a.protocol == b.protocol and max(a.first, b.first) <= min(a.last, b.last)
    }
