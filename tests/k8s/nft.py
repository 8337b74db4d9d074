"""NetworkPolicies as nftables rules of the namespace that plays a pod, the way a network plug-in enforces them."""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tests.k8s.policies import ANY_PORT, Direction, End, Ports, is_peer, rules, selecting
from tests.k8s.rendering import Manifest

Addresses = Mapping[str, Sequence[str]]  # name of an end -> its addresses; several for several pods of one kind
HOOKS: dict[Direction, tuple[str, str]] = {"Ingress": ("input", "saddr"), "Egress": ("output", "daddr")}
REFUSED = "refused"


def ruleset(manifests: list[Manifest], end: End, ends: Mapping[str, End], addresses: Addresses) -> str:
    """The whole table of one pod. What is refused is refused at once (a reset) and counted, as is what is let through,
    under a comment that names the other end."""
    chains = "\n".join(_chain(manifests, end, ends, addresses, direction) for direction in HOOKS)
    return f"table inet arrows {{\n{chains}\n}}\n"


def _chain(
    manifests: list[Manifest], end: End, ends: Mapping[str, End], addresses: Addresses, direction: Direction
) -> str:
    hook, _ = HOOKS[direction]
    lines = [f"chain {hook} {{", f"type filter hook {hook} priority 0; policy accept;"]
    policies = selecting(manifests, end, direction)
    if policies:
        device = "iif" if direction == "Ingress" else "oif"
        lines += [f"{device} lo accept", "ct state established,related accept"]
        for policy in policies:
            for peers, ports in rules(policy, direction):
                for name, match in _peers(peers, ends, addresses, direction):
                    lines += [f'{match} {_ports(span)} counter accept comment "{name}"' for span in ports]
        lines += [f'meta l4proto tcp counter reject with tcp reset comment "{REFUSED}"']
        lines += [f'counter reject comment "{REFUSED}"']
    return "\n".join([*lines, "}"])


def _peers(
    peers: list[dict[str, Any]] | None, ends: Mapping[str, End], addresses: Addresses, direction: Direction
) -> Iterator[tuple[str, str]]:
    """(who, the match of their addresses) of one rule."""
    side = HOOKS[direction][1]
    if peers is None:
        yield "anybody", ""
        return
    for peer in peers:
        if "ipBlock" in peer:
            block = peer["ipBlock"]
            but = f" ip {side} != {{ {', '.join(block['except'])} }}" if block.get("except") else ""
            yield "a block", f"ip {side} {block['cidr']}{but}"
            continue
        for name, other in ends.items():
            if other.labels is not None and addresses.get(name) and is_peer(peer, other):
                yield name, f"ip {side} {{ {', '.join(addresses[name])} }}"


def _ports(span: Ports) -> str:
    if span in ANY_PORT:
        return f"meta l4proto {span.protocol.lower()}"
    ports = str(span.first) if span.first == span.last else f"{span.first}-{span.last}"
    return f"{span.protocol.lower()} dport {ports}"


def counted(listing: str) -> dict[tuple[str, str], int]:
    """(hook, comment) -> packets, from `nft -j list ruleset`."""
    found: dict[tuple[str, str], int] = {}
    for entry in json.loads(listing)["nftables"]:
        rule = entry.get("rule")
        if rule is not None and "comment" in rule:
            packets = sum(e["counter"]["packets"] for e in rule["expr"] if "counter" in e)
            key = (rule["chain"], rule["comment"])
            found[key] = found.get(key, 0) + packets
    return found
