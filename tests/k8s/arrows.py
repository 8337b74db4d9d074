"""The arrows as docs/network.md tells them, for people and for the tests: its table, its picture, its words."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from tests.k8s.policies import End, Ports
from tests.k8s.rendering import ROOT

PAGE = ROOT / "docs/network.md"
SERVICES = ("router", "predictor", "placer", "autoscaler", "node", "console")
FLEET = (*SERVICES, "nats", "valkey")


def outside_ends() -> dict[str, End]:
    """Those that are no pods of ours. `stranger` stands for a pod of another namespace with no labels that matter,
    `internet` and `private` for addresses outside the cluster."""

    def namespace(name: str, **more: str) -> dict[str, str]:
        return {"kubernetes.io/metadata.name": name, **more}

    shop = End("stranger", {"app.kubernetes.io/name": "shop"}, namespace("shop"))
    door = namespace("ingress", **{"glowplug/reaches-console": "true"})
    impostor = {"app.kubernetes.io/name": "glowplug", "app.kubernetes.io/component": "router"}
    return {
        "stranger": shop,
        "impostor": End("impostor", impostor, namespace("shop")),  # our labels in a namespace that is not ours
        "operators": End("operators", {"app.kubernetes.io/name": "ingress"}, door),
        "prometheus": End("prometheus", {"app.kubernetes.io/name": "prometheus"}, namespace("monitoring")),
        "neighbour": End("neighbour", {"app.kubernetes.io/name": "grafana"}, namespace("monitoring")),
        "dns": End("dns", {"k8s-app": "kube-dns"}, namespace("kube-system")),
        "internet": End("internet", address="203.0.113.7"),
        "private": End("private", address="10.20.30.40"),
        "metadata": End("metadata", address="169.254.169.254"),  # where clouds hand out credentials
    }


WORDS: Mapping[str, tuple[str, ...]] = {
    "services": SERVICES,
    "fleet": FLEET,
    "outside": tuple(outside_ends()),
    "weights": ("internet",),
}


@dataclass(frozen=True, order=True)
class Arrow:
    """One line of the table, its words as written."""

    source: str
    target: str
    ports: tuple[Ports, ...]


def parse_ports(text: str) -> tuple[Ports, ...]:
    """ "53 udp 53" -> 53 over UDP and 53 over TCP; "20000-20199" -> a range."""
    found = re.findall(r"(\d+)(?:-(\d+))?( udp)?", text)
    return tuple(sorted(Ports("UDP" if udp else "TCP", int(a), int(b or a)) for a, b, udp in found))


def table(overlay: str) -> set[Arrow]:
    """The rows that hold for an overlay."""
    rows = re.findall(r"^\| (\w+) \| (\w+) \| ([^|]+) \| (\w+) \|[^|]*\|$", PAGE.read_text(), re.MULTILINE)
    assert rows
    return {Arrow(source, target, parse_ports(ports)) for source, target, ports, who in rows if who in ("all", overlay)}


def picture() -> set[Arrow]:
    """The edges of the mermaid picture."""
    edges = re.findall(r"^ +(\w+) -->\|([^|]+)\| (\w+)$", PAGE.read_text(), re.MULTILINE)
    return {Arrow(source, target, parse_ports(ports)) for source, ports, target in edges}


def expand(arrows: set[Arrow]) -> dict[tuple[str, str], set[Ports]]:
    """(from, to) -> ports, the words spelled out. A word never draws an arrow from a pod kind to itself."""
    drawn: dict[tuple[str, str], set[Ports]] = {}
    for arrow in arrows:
        for source in WORDS.get(arrow.source, (arrow.source,)):
            for target in WORDS.get(arrow.target, (arrow.target,)):
                if source != target or arrow.source == arrow.target:
                    drawn.setdefault((source, target), set()).update(arrow.ports)
    return drawn
