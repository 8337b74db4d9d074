"""Network namespaces as pods on one isolated bridge; NetworkPolicies become nftables rules, as in a network plug-in."""

import ctypes
import json
import os
import shutil
import socket
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from tests.k8s.arrows import ANY_PORT, Direction, End, Ports, is_peer, rules, selecting
from tests.k8s.rendering import Manifest

Addresses = Mapping[str, Sequence[str]]  # name of an end -> addresses of its pods
HOOKS: dict[Direction, tuple[str, str]] = {"Ingress": ("input", "saddr"), "Egress": ("output", "daddr")}
REFUSED = "refused"
T = TypeVar("T")
CLONE_NEWNET = 0x40000000
_libc = ctypes.CDLL(None, use_errno=True)


def ruleset(manifests: list[Manifest], end: End, ends: Mapping[str, End], addresses: Addresses) -> str:
    """Refusals are immediate (a reset). All packets are counted under a comment that names the other end."""
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
    found: dict[tuple[str, str], int] = {}
    for entry in json.loads(listing)["nftables"]:
        rule = entry.get("rule")
        if rule is not None and "comment" in rule:
            packets = sum(e["counter"]["packets"] for e in rule["expr"] if "counter" in e)
            key = (rule["chain"], rule["comment"])
            found[key] = found.get(key, 0) + packets
    return found


@cache
def why_not() -> str:
    """ "" if namespaces work here."""
    if os.geteuid() != 0:
        return "only root may make network namespaces"
    if missing := [tool for tool in ("ip", "nft") if shutil.which(tool) is None]:
        return f"not installed: {' and '.join(missing)} (Debian: iproute2, nftables)"
    name = f"gp{os.getpid()}-try"
    tries = [
        ["ip", "netns", "add", name],
        ["ip", "-n", name, "link", "add", "name", "b", "type", "bridge"],
        ["ip", "netns", "exec", name, "nft", "add table inet t { chain c { ct state established accept; }; }"],
    ]
    try:
        for command in tries:
            made = subprocess.run(command, capture_output=True, text=True, check=False)
            if made.returncode:
                return f"this kernel does not allow it: {' '.join(command[:4])}: {made.stderr.strip()[:200]}"
    finally:
        subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
    return ""


class Network:
    """Close it: namespaces outlive processes."""

    def __init__(self) -> None:
        self._prefix = f"gp{os.getpid()}-"
        self.addresses: dict[str, str] = {}
        self._switch = f"{self._prefix}switch"
        _run("ip", "netns", "add", self._switch)
        _run("ip", "-n", self._switch, "link", "add", "name", "bridge0", "type", "bridge")
        _run("ip", "-n", self._switch, "link", "set", "bridge0", "up")

    def namespace(self, pod: str) -> str:
        return f"{self._prefix}{pod}"

    def add(self, pod: str, address: str = "") -> str:
        """Returns its address: the given one, or the next of 10.77.0.0/24."""
        address = address or f"10.77.0.{len(self.addresses) + 10}"
        own, cable = self.namespace(pod), f"p{len(self.addresses)}"
        self.addresses[pod] = address
        link = f"link add eth0 netns {own} type veth peer name {cable} netns {self._switch}"
        _run("ip", "-batch", "-", text=f"netns add {own}\n{link}\n")
        _run("ip", "-n", self._switch, "link", "set", cable, "master", "bridge0", "up")
        self.inside(pod, lambda: Path("/proc/sys/net/ipv6/conf/all/disable_ipv6").write_text("1"))
        everybody = "route add default dev eth0"  # no router: all are neighbours
        up = f"link set lo up\naddress add {address}/32 dev eth0\nlink set eth0 up\n{everybody}\n"
        _run("ip", "-n", own, "-batch", "-", text=up)
        return address

    def enforce(self, pod: str, ruleset: str) -> None:
        _run("ip", "netns", "exec", self.namespace(pod), "nft", "-f", "-", text=f"flush ruleset\n{ruleset}")

    def counters(self, pod: str) -> str:
        return _run("ip", "netns", "exec", self.namespace(pod), "nft", "-j", "list", "ruleset")

    def inside(self, pod: str, call: Callable[[], T]) -> T:
        """Run `call` there, in its own thread. Sockets made there stay there."""

        def body() -> T:
            with Path(f"/run/netns/{self.namespace(pod)}").open() as handle:
                if _libc.setns(handle.fileno(), CLONE_NEWNET) != 0:
                    raise OSError(ctypes.get_errno(), f"cannot enter the namespace of {pod}")
            return call()

        with ThreadPoolExecutor(1) as own_thread:
            return own_thread.submit(body).result()

    def socket(self, pod: str, kind: int = socket.SOCK_STREAM) -> socket.socket:
        return self.inside(pod, lambda: socket.socket(socket.AF_INET, kind))

    def command(self, pod: str, hosts: Path, argv: list[str]) -> list[str]:
        """Use `hosts` for /etc/hosts and no name server: torch looks up each peer's name, and a silent server would
        cost ten seconds."""
        seen = 'mount --bind "$0" /etc/hosts && mount --bind /dev/null /etc/resolv.conf && exec "$@"'
        return ["ip", "netns", "exec", self.namespace(pod), "sh", "-c", seen, str(hosts), *argv]

    def close(self) -> None:
        for pod in self.addresses:
            subprocess.run(["ip", "netns", "del", self.namespace(pod)], capture_output=True, check=False)
        subprocess.run(["ip", "netns", "del", self._switch], capture_output=True, check=False)


def _run(*argv: str, text: str = "") -> str:
    made = subprocess.run(argv, input=text, capture_output=True, text=True, check=False)
    if made.returncode:
        raise RuntimeError(f"{' '.join(argv)}: {made.stderr.strip()}\n{text}")
    return made.stdout
