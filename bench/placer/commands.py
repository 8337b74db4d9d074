"""From the placer's decision to the first command on its node, with many nodes on one machine.

    python -m bench.placer.commands [--nodes 64] [--starts 200] [--processes 4]

What runs: NATS, which syncs every message, Valkey, which syncs each second (both as `glowplug up` has them), the placer
in a process of its own, and so many agents as they are: ledger, beats, ticks, tables, and two connections to NATS each,
in `--processes` processes. The prefetchers are stand-ins with a connection each, which put four bytes where a
fetch is asked for. Engines are the emulated one's processes. There is no router, no autoscaler and no console.

Each start is of a model that no node has: one after the other, each asked for once the one before is READY and has been
stopped. The decision is the moment that its record says (`made_at`: when the placer began to handle the request); the
first command is the first of `prefetcher.fetch` and `agent.start` that its node's reader has in hand, decoded. Both are
this machine's clock. Where the time goes: until the placer has recorded and published its decision; until the stream
has stored the commands before this one; and on the bus. Results: results/commands.md.
"""

import argparse
import asyncio
import json
import logging
import os
import statistics
import sys
import tempfile
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import redis
from prometheus_client import CollectorRegistry

from glowplug.bus.nats_bus import NatsBus
from glowplug.bus.port import Handler
from glowplug.domain.model import Model, WeightsRef
from glowplug.engines.drivers import driver
from glowplug.events import Event
from glowplug.events.commands import PlaceInstance, StopInstance
from glowplug.events.facts import DecisionMade, InstanceFailed, InstanceReady, InstanceStopped
from glowplug.events.subjects import commands_to, filters
from glowplug.policies.systems import DEFAULT, SYSTEMS
from glowplug.state.redis_store import RedisStore
from glowplug.telemetry.metrics import ShellMetrics
from glowplug.telemetry.tracing import Tracing
from services.agent.service import AgentService
from services.agent.settings import AgentSettings
from tests.agent_rig import write_weights
from tests.fleet_builder import MIB, a_model
from tests.ha_fleet import Process
from tests.ports import free_port
from tests.servers import NatsProcess, ValkeyProcess
from tests.waiting import until

START_S: Final = 180.0  # for all agents to join
ONE_S: Final = 30.0  # for one start
FIRST: Final = ("prefetcher.fetch", "agent.start")


# one process of several nodes


class NotingBus(NatsBus):
    """Writes a line for each command that concerns an instance, as soon as its reader has it."""

    async def subscribe(self, filters: Sequence[str], handler: Handler, *, durable: str = "") -> None:
        async def noted(event: Event) -> None:
            at = time.time()
            if event.type in FIRST:
                note = {"type": event.type, "instance_id": event.data.instance_id, "at": at, "sent": event.occurred_at}
                print(json.dumps(note), flush=True)
            await handler(event)

        await super().subscribe(filters, noted, durable=durable)


async def run_node(node_id: str, args: argparse.Namespace) -> tuple[AgentService, list[NatsBus]]:
    """An agent of one GPU, and what stands for its prefetcher."""
    folder = Path(args.folder)
    settings = AgentSettings(
        node_id=node_id,
        service_id=f"agent-{node_id}",
        state_dir=folder / "state",
        shm_dir=folder / "shm",
        gpu_budgets="1GiB",
        stage_ports="",
        emulated_time_scale=20.0,
    )
    tracing, registry = Tracing("agent", settings.service_id), CollectorRegistry()
    bus, beside = NotingBus(args.nats, settings.service_id), NotingBus(args.nats, f"prefetcher-{node_id}")
    await beside.connect()
    agent = AgentService(
        settings,
        bus,
        RedisStore(args.valkey),
        tracing,
        tracing,
        ShellMetrics("agent", registry),
        drivers={"emulated": driver("emulated", settings.engine_settings())},
        registry=registry,
        connect=bus.connect,
    )

    async def bring(event: Event) -> None:
        if event.type == "prefetcher.fetch":
            write_weights(settings.shm_dir.absolute(), a_model(weights=event.data.weights), node_id)

    await beside.subscribe([commands_to("prefetcher", node_id)], bring, durable=f"prefetcher-{node_id}-commands")
    await agent.start(f"http://{node_id}.test")
    return agent, [bus, beside]


async def run_nodes(args: argparse.Namespace) -> None:
    """Until nobody reads any more what is written."""
    first, count = args.agents
    nodes = [await run_node(f"node-{number:03d}", args) for number in range(first, first + count)]
    await until(lambda: all(not agent.not_ready() for agent, _ in nodes), "all agents are ready", START_S)
    print(json.dumps({"ready": count}), flush=True)
    await asyncio.get_running_loop().run_in_executor(
        None, sys.stdin.read
    )  # ends with the process that started this one
    for agent, buses in nodes:
        await agent.stop()
        for bus in buses:
            await bus.close()


# the process that asks


@dataclass
class Start:
    """What is known of one: epoch seconds, 0 for not yet. `sent` and `got` by type of command."""

    decided_at: float = 0.0
    recorded_at: float = 0.0
    sent: dict[str, float] = field(default_factory=dict)
    got: dict[str, float] = field(default_factory=dict)
    node_id: str = ""
    ended: str = ""

    @property
    def is_complete(self) -> bool:
        return bool(self.decided_at and self.node_id and len(self.got) == len(FIRST))

    @property
    def first(self) -> str:
        return min(self.got, key=lambda kind: self.got[kind])


class Seen:
    """All starts by instance id, from the facts on the bus and the lines of the agents' processes."""

    def __init__(self) -> None:
        self.starts: dict[str, Start] = {}
        self.num_ready = 0

    async def on_fact(self, event: Event) -> None:
        if isinstance(event.data, DecisionMade):
            decision = event.data.decision
            start = self.starts.get(decision.instance_id)
            if start is not None and decision.kind == "place":
                start.decided_at, start.recorded_at = decision.made_at, event.occurred_at
            return
        instance = event.data.instance
        if (known := self.starts.get(instance.instance_id)) is not None:
            known.node_id, known.ended = instance.node_id, instance.state.value

    def on_line(self, line: dict[str, Any]) -> None:
        if "ready" in line:
            self.num_ready += line["ready"]
        elif (start := self.starts.get(line["instance_id"])) is not None and line["type"] not in start.got:
            start.got[line["type"]], start.sent[line["type"]] = line["at"], line["sent"]


def an_event(payload: Any) -> Event:
    return Event(
        event_id=uuid.uuid4().hex,
        type=payload.TYPE,
        occurred_at=time.time(),
        issuer="autoscaler-1",
        data=payload,
        epoch=1,
    )


def a_cold_model(number: int) -> Model:
    name = f"m-{number}"
    return a_model(name, mib=200, weights=WeightsRef(uri=f"file:///weights/{name}", num_bytes=4), kv_bytes=100 * MIB)


async def one_start(number: int, bus: NatsBus, seen: Seen) -> Start:
    """Ask for it, wait until it is READY, and stop it."""
    name = f"i-{number}"
    start = seen.starts[name] = Start()
    model = a_cold_model(number)
    await bus.publish(an_event(PlaceInstance(instance_id=name, model=model, reason="bench", wanted_at=time.time())))
    await until(lambda: start.ended in ("ready", "failed") and start.is_complete, f"{name} is ready", ONE_S)
    if start.ended != "ready":
        raise SystemExit(f"{name} has failed: see the placer's and the agents' logs")
    await bus.publish(an_event(StopInstance(target=start.node_id, instance_id=name, reason="bench", grace_s=0.0)))
    await until(lambda: start.ended == "stopped", f"{name} has stopped", ONE_S)
    return start


async def read_lines(process: asyncio.subprocess.Process, seen: Seen) -> None:
    assert process.stdout is not None
    async for line in process.stdout:
        seen.on_line(json.loads(line))


async def agents(args: argparse.Namespace, folder: Path, nats: str, valkey: str) -> list[asyncio.subprocess.Process]:
    """The processes of all nodes; each ends when its standard input does."""
    bounds = [args.nodes * number // args.processes for number in range(args.processes + 1)]
    given = ["--nats", nats, "--valkey", valkey, "--folder", str(folder)]
    started = []
    for first, last in pairwise(bounds):
        argv = ["-m", "bench.placer.commands", "--agents", str(first), str(last - first), *given]
        with (folder / f"agents-{first}.log").open("wb") as log:
            started.append(
                await asyncio.create_subprocess_exec(
                    sys.executable,
                    *argv,
                    stdin=asyncio.subprocess.PIPE,
                    stdout=asyncio.subprocess.PIPE,
                    stderr=log,
                    env=environment(),
                )
            )
    return started


def environment() -> dict[str, str]:
    return {k: v for k, v in os.environ.items() if not k.startswith(("GLOWPLUG_", "OTEL_"))}


def placer(folder: Path, nats: str, valkey: str) -> Process:
    policies = SYSTEMS[DEFAULT].policies
    own = {
        "GLOWPLUG_SERVICE_ID": "placer-1",
        "GLOWPLUG_PORT": str(free_port()),
        "GLOWPLUG_STATE_DIR": str(folder / "placer"),
        "GLOWPLUG_NATS_URL": nats,
        "GLOWPLUG_REDIS_URL": valkey,
        **{f"GLOWPLUG_POLICY_{kind.upper()}": policies[kind] for kind in ("placement", "eviction", "prewarming")},
    }
    return Process("placer-1", "services.placer", environment() | own, folder / "placer.log")


async def measure(args: argparse.Namespace, folder: Path, nats: str, valkey: str) -> list[Start]:
    """All starts, after as many as there are nodes that are not counted."""
    seen, bus = Seen(), NatsBus(nats, "bench")
    deciding = placer(folder, nats, valkey).start()
    nodes: list[asyncio.subprocess.Process] = []
    readers: list[asyncio.Task[None]] = []
    try:
        nodes = await agents(args, folder, nats, valkey)
        readers = [asyncio.create_task(read_lines(process, seen)) for process in nodes]
        await bus.connect()
        facts = filters((DecisionMade, InstanceReady, InstanceFailed, InstanceStopped))
        await bus.subscribe(facts, seen.on_fact, durable="bench-facts")
        await until(lambda: seen.num_ready == args.nodes, f"{args.nodes} agents are ready", START_S)
        await until(deciding.ready, "the placer is ready", START_S)
        for number in range(args.warmup):
            await one_start(number, bus, seen)
        print(f"measuring from load {os.getloadavg()[0]:.1f}", file=sys.stderr, flush=True)
        return [await one_start(args.warmup + number, bus, seen) for number in range(args.starts)]
    finally:
        await bus.close()
        deciding.kill()
        for process in nodes:
            assert process.stdin is not None
            process.stdin.close()
        await asyncio.gather(*(asyncio.wait_for(process.wait(), 60) for process in nodes), return_exceptions=True)
        for process in nodes:
            if process.returncode is None:
                process.kill()
        for reader in readers:
            reader.cancel()


def rows(starts: Sequence[Start]) -> dict[str, list[float]]:
    """Seconds of each start, sorted."""
    first = [(start, start.first) for start in starts]
    return {
        "first command in hand": sorted(start.got[kind] - start.decided_at for start, kind in first),
        "... decision recorded and published": sorted(start.recorded_at - start.decided_at for start in starts),
        "... until it was sent": sorted(start.sent[kind] - start.recorded_at for start, kind in first),
        "... on the bus, stored and read": sorted(start.got[kind] - start.sent[kind] for start, kind in first),
        "agent.start in hand": sorted(start.got["agent.start"] - start.decided_at for start in starts),
    }


def show(starts: Sequence[Start]) -> None:
    print("| from the decision, ms | p50 | p90 | p99 | most |")
    print("|---|---|---|---|---|")
    for name, seconds in rows(starts).items():
        if len(seconds) < 2:
            raise SystemExit("at least two starts have to be measured")
        cuts = statistics.quantiles(seconds, n=100, method="inclusive")
        cells = (cuts[49], cuts[89], cuts[98], seconds[-1])
        print(f"| {name} | " + " | ".join(f"{1000 * cell:.1f}" for cell in cells) + " |")
    used = len({start.node_id for start in starts})
    print(f"\n{len(starts)} cold starts, one at a time, on {used} of the nodes")


def main() -> int:
    parser = argparse.ArgumentParser(description="from the placer's decision to the first command on its node")
    parser.add_argument("--nodes", type=int, default=64)
    parser.add_argument("--starts", type=int, default=200)
    parser.add_argument("--warmup", type=int, default=20, help="starts before those that are counted")
    parser.add_argument("--processes", type=int, default=4, help="that the agents are in")
    parser.add_argument("--agents", type=int, nargs=2, help=argparse.SUPPRESS)  # of one process: first, count
    parser.add_argument("--nats", help=argparse.SUPPRESS)
    parser.add_argument("--valkey", help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    args = parser.parse_args()
    logging.basicConfig(level=logging.WARNING)
    if args.agents:
        asyncio.run(run_nodes(args))
        return 0
    with (
        tempfile.TemporaryDirectory(prefix="gp-bench-", ignore_cleanup_errors=True) as folder,
        NatsProcess(Path(folder) / "nats") as nats,
        ValkeyProcess(Path(folder) / "valkey") as valkey,
    ):
        redis.Redis.from_url(valkey.url).config_set("appendfsync", "everysec")
        before = os.getloadavg()[0]
        starts = asyncio.run(measure(args, Path(folder), nats.url, valkey.url))
    print(f"{args.nodes} agents in {args.processes} processes, one placer, NATS, Valkey, emulated engines; ", end="")
    print(f"load {before:.1f} before, {os.getloadavg()[0]:.1f} at the end, {os.cpu_count()} cores\n")
    show(starts)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
