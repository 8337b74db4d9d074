"""The policies as a real kernel's rules: every arrow connects, every other pair is refused."""

import asyncio
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import pytest

from glowplug.runtime.tasks import end as end_tasks
from tests.k8s.arrows import End, Ports, expand, fleet_ends, outside_ends, table
from tests.k8s.namespaces import Network, ruleset, why_not
from tests.k8s.rendering import OVERLAYS, all_containers, render

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not() or "-")
Probe = tuple[str, str, str, int]  # from, to, protocol, port
ELSEWHERE = (22, 80, 443, 2379, 6443, 9222, 10250, 65535)  # ports an intruder would try
WITHIN_S = 10.0


def ports_to_try(overlay: str) -> set[tuple[str, int]]:
    drawn = {ports for spans in expand(table(overlay)).values() for ports in spans}
    tried = {(p.protocol, port) for p in drawn for port in (p.first - 1, p.first, p.last, p.last + 1)}
    tried |= {("TCP", p["containerPort"]) for _, c in all_containers(render(overlay)) for p in c["ports"]}
    return tried | {("TCP", port) for port in ELSEWHERE}


@pytest.fixture
def network() -> Iterator[Network]:
    made = Network()
    try:
        yield made
    finally:
        made.close()


def build(network: Network, overlay: str) -> dict[str, End]:
    manifests = render(overlay)
    ends = fleet_ends(manifests) | outside_ends()
    for name, end in ends.items():
        network.add(name, end.address)
    addresses = {name: [address] for name, address in network.addresses.items()}
    for name in fleet_ends(manifests):
        addresses[name].append(network.add(twin(name)))
    for name, end in ends.items():
        for pod in (name, twin(name))[: len(addresses[name])]:
            network.enforce(pod, ruleset(manifests, end, ends, addresses))
    return ends


def twin(name: str) -> str:
    return f"{name}-2"


def listen(network: Network, pod: str, ports: set[tuple[str, int]]) -> list[socket.socket]:
    def body() -> list[socket.socket]:
        made = []
        for protocol, port in sorted(ports):
            kind = socket.SOCK_STREAM if protocol == "TCP" else socket.SOCK_DGRAM
            sock = socket.socket(socket.AF_INET, kind)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(("0.0.0.0", port))
            if protocol == "TCP":
                sock.listen(512)
            sock.setblocking(False)
            made.append(sock)
        return made

    return network.inside(pod, body)


async def answer(sock: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    while True:
        if sock.type == socket.SOCK_DGRAM:
            _, sender = await loop.sock_recvfrom(sock, 64)
            await loop.sock_sendto(sock, b"y", sender)
            continue
        connection, _ = await loop.sock_accept(sock)
        with connection:
            await loop.sock_sendall(connection, b"y")


@asynccontextmanager
async def answering(listeners: list[socket.socket]) -> AsyncIterator[None]:
    tasks = [asyncio.create_task(answer(sock)) for sock in listeners]
    try:
        yield
    finally:
        await end_tasks(tasks)
        for sock in listeners:
            sock.close()


async def is_reached(sock: socket.socket, address: str, port: int) -> bool:
    loop = asyncio.get_running_loop()
    with sock:
        sock.setblocking(False)
        try:
            async with asyncio.timeout(WITHIN_S):
                await loop.sock_connect(sock, (address, port))
                if sock.type == socket.SOCK_DGRAM:
                    await loop.sock_sendall(sock, b"?")
                return await loop.sock_recv(sock, 1) == b"y"
        except OSError:
            return False


async def probe(network: Network, source: str, targets: list[str], ports: set[tuple[str, int]]) -> set[Probe]:
    wanted = [(target, protocol, port) for target in targets for protocol, port in sorted(ports)]
    kinds = {"TCP": socket.SOCK_STREAM, "UDP": socket.SOCK_DGRAM}
    sockets = network.inside(source, lambda: [socket.socket(socket.AF_INET, kinds[p]) for _, p, _ in wanted])
    reached = await asyncio.gather(
        *(is_reached(s, network.addresses[target], port) for s, (target, _, port) in zip(sockets, wanted, strict=True))
    )
    return {(source, *w) for w, hit in zip(wanted, reached, strict=True) if hit}


@pytest.mark.parametrize("overlay", OVERLAYS)
async def test_only_the_arrows_connect(network: Network, overlay: str) -> None:
    ends, ports = build(network, overlay), ports_to_try(overlay)
    listeners = [sock for name in network.addresses for sock in listen(network, name, ports)]
    ours = {name for name, end in ends.items() if end.is_ours}
    reached: set[Probe] = set()
    async with answering(listeners):
        for source in ends:
            assert len(await probe(network, source, [source], ports)) == len(ports), f"{source}: listeners are deaf"
            targets = [name for name in ends if name != source and (source in ours or name in ours)]
            reached |= await probe(network, source, targets, ports)
            if source in ours:
                to_twin = await probe(network, source, [twin(source)], ports)
                reached |= {(source, source, protocol, port) for _, _, protocol, port in to_twin}
    drawn = {
        (source, target, protocol, port)
        for (source, target), spans in expand(table(overlay)).items()
        for protocol, port in ports
        if any((protocol, port) in span for span in spans)
    }
    assert reached - drawn == set(), "reached without an arrow"
    assert drawn - reached == set(), "drawn, and refused"


async def test_without_rules_everything_connects(network: Network) -> None:
    """The rules refuse, not a missing route."""
    ends = build(network, "sim")
    for name in ends:
        network.enforce(name, "")
    async with answering(listen(network, "nats", {("TCP", 4222)})):
        for source in ("stranger", "internet", "valkey", "console"):
            assert await probe(network, source, ["nats"], {("TCP", 4222)}), source


def test_a_range_is_both_its_ends() -> None:
    assert all(("TCP", port) in Ports("TCP", 20000, 20199) for port in (20000, 20199))
    assert not any(("TCP", port) in Ports("TCP", 20000, 20199) for port in (19999, 20200))
