"""The arrows of docs/network.md, and the connections that rendered NetworkPolicies allow."""

import ipaddress
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from tests.k8s.rendering import ROOT, WORKLOADS, Manifest, matches, of_kind, pod_labels

Direction = Literal["Ingress", "Egress"]
NAMESPACE = "glowplug"
PAGE = ROOT / "docs/network.md"
SERVICES = ("router", "predictor", "placer", "autoscaler", "node", "console")
FLEET = (*SERVICES, "nats", "valkey")


@dataclass(frozen=True)
class End:
    """A pod or, with `labels` None, an address outside the cluster."""

    name: str
    labels: Mapping[str, str] | None = None
    namespace: Mapping[str, str] = field(default_factory=dict)
    address: str = ""

    @property
    def is_ours(self) -> bool:
        return self.namespace.get("kubernetes.io/metadata.name") == NAMESPACE


@dataclass(frozen=True, order=True)
class Ports:
    """A range, both ends included."""

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
    namespace = {"kubernetes.io/metadata.name": NAMESPACE}
    return {
        w["metadata"]["name"]: End(w["metadata"]["name"], pod_labels(w), namespace)
        for w in of_kind(manifests, *WORKLOADS)
    }


def selecting(manifests: list[Manifest], end: End, direction: Direction) -> list[Manifest]:
    if end.labels is None or not end.is_ours:
        return []
    return [
        policy
        for policy in of_kind(manifests, "NetworkPolicy")
        if direction in policy["spec"]["policyTypes"] and matches(policy["spec"]["podSelector"], end.labels)
    ]


def rules(policy: Manifest, direction: Direction) -> Iterator[tuple[list[dict[str, Any]] | None, tuple[Ports, ...]]]:
    key, peers = ("ingress", "from") if direction == "Ingress" else ("egress", "to")
    for rule in policy["spec"].get(key, ()):
        ports = tuple(
            Ports(p.get("protocol", "TCP"), p["port"], p.get("endPort", p["port"])) for p in rule.get("ports", ())
        )
        yield rule.get(peers) or None, ports or ANY_PORT


def is_peer(peer: Mapping[str, Any], other: End) -> bool:
    """`peer` belongs to a rule of our namespace."""
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
    """Ports that `end` may open to (Egress), or accept from (Ingress), `other`."""
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
    out, into = allowed(manifests, source, target, "Egress"), allowed(manifests, target, source, "Ingress")
    return {
        Ports(a.protocol, max(a.first, b.first), min(a.last, b.last))
        for a in out
        for b in into
        if a.protocol == b.protocol and max(a.first, b.first) <= min(a.last, b.last)
    }


def outside_ends() -> dict[str, End]:
    """`stranger` is a pod of another namespace; `internet` and `private` are addresses outside the cluster."""

    def namespace(name: str, **more: str) -> dict[str, str]:
        return {"kubernetes.io/metadata.name": name, **more}

    shop = End("stranger", {"app.kubernetes.io/name": "shop"}, namespace("shop"))
    door = namespace("ingress", **{"glowplug/reaches-console": "true"})
    impostor = {"app.kubernetes.io/name": "glowplug", "app.kubernetes.io/component": "router"}
    return {
        "stranger": shop,
        "impostor": End("impostor", impostor, namespace("shop")),  # our labels in a foreign namespace
        "operators": End("operators", {"app.kubernetes.io/name": "ingress"}, door),
        "prometheus": End("prometheus", {"app.kubernetes.io/name": "prometheus"}, namespace("monitoring")),
        "neighbour": End("neighbour", {"app.kubernetes.io/name": "grafana"}, namespace("monitoring")),
        "dns": End("dns", {"k8s-app": "kube-dns"}, namespace("kube-system")),
        "internet": End("internet", address="203.0.113.7"),
        "private": End("private", address="10.20.30.40"),
        "metadata": End("metadata", address="169.254.169.254"),  # clouds serve credentials here
    }


WORDS: Mapping[str, tuple[str, ...]] = {
    "services": SERVICES,
    "fleet": FLEET,
    "outside": tuple(outside_ends()),
    "weights": ("internet",),
}


@dataclass(frozen=True, order=True)
class Arrow:
    source: str
    target: str
    ports: tuple[Ports, ...]


def parse_ports(text: str) -> tuple[Ports, ...]:
    """ "53 udp 53" -> 53 over UDP and 53 over TCP; "20000-20199" -> a range."""
    found = re.findall(r"(\d+)(?:-(\d+))?( udp)?", text)
    return tuple(sorted(Ports("UDP" if udp else "TCP", int(a), int(b or a)) for a, b, udp in found))


def table(overlay: str) -> set[Arrow]:
    rows = re.findall(r"^\| (\w+) \| (\w+) \| ([^|]+) \| (\w+) \|[^|]*\|$", PAGE.read_text(), re.MULTILINE)
    assert rows
    return {Arrow(source, target, parse_ports(ports)) for source, target, ports, who in rows if who in ("all", overlay)}


def expand(arrows: set[Arrow]) -> dict[tuple[str, str], set[Ports]]:
    """(from, to) -> ports. A word never draws an arrow from a pod kind to itself."""
    drawn: dict[tuple[str, str], set[Ports]] = {}
    for arrow in arrows:
        for source in WORDS.get(arrow.source, (arrow.source,)):
            for target in WORDS.get(arrow.target, (arrow.target,)):
                if source != target or arrow.source == arrow.target:
                    drawn.setdefault((source, target), set()).update(arrow.ports)
    return drawn
