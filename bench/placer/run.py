"""What a placement costs: every policy over a large fleet, and the placer's controller event by event.

`python -m bench.placer.run [--nodes 200 ...] [--gpus 8] [--models 500] [--events 12000] [--policy NAME ...]`

Two tables for each size, in milliseconds of this machine's CPU. First the policies alone, over a fleet that is empty,
that holds an instance and replicas on every second GPU, and that is full. Then the controller with agents that answer
as the emulated ones do (grant, ready, stopped, a beat each time): bursts of placements onto a full fleet, evictions,
forecasts of every model, plans of what to prewarm. Wall time is what a service would wait; the fleet is made up.

`--against PATH` runs another tree's own script with the same arguments beside this one's, one after the other, and
prints its figures as "before". Results: results/placer.md.
"""

import argparse
import gc
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from glowplug.controllers.effects import Publish, Tick
from glowplug.controllers.placer.controller import PlacerController, PlacerParams
from glowplug.domain.hardware import Gpu, Grant, GrantOwner, Node
from glowplug.domain.instance import Instance, InstanceState, Worker
from glowplug.domain.model import Model, Slo, WeightsRef
from glowplug.domain.snapshot import Forecast, ModelLoad
from glowplug.events import Event
from glowplug.events import facts as fact
from glowplug.events.commands import PlaceInstance, StartInstance, StopInstance
from glowplug.fleet.capacity import Capacity
from glowplug.policies.placement.hydraserve_allocation import StageSeconds
from glowplug.policies.placement.port import PlacementView, PlaceRequest
from glowplug.policies.placement.shape import bytes_per_gpu
from glowplug.policies.registry import KINDS, choose

GB = 10**9
GPU_BYTES = 80 * GB
SIZES = ((1, 12.5), (1, 24.2), (2, 24.2), (4, 128.5))  # GPUs, GB of weights
STAGES = StageSeconds(container_s=1.0, cuda_s=0.5, library_s=0.5, hop_s=0.001, prefill_s=1.5, decode_s=0.042)
ABILITIES = ("emulated:prewarm", "emulated:stages", "emulated:swap")


def models_of(count: int) -> list[Model]:
    """Sizes in turn; an instance takes its GPUs whole."""
    made = []
    for number in range(count):
        num_gpus, gigabytes = SIZES[number % len(SIZES)]
        weights = int(gigabytes * GB)
        made.append(
            Model(
                name=f"m{number}",
                key=f"m{number}",
                engine="emulated",
                weights=WeightsRef(uri=f"file:/m{number}", num_bytes=weights),
                weights_bytes=weights,
                kv_bytes=num_gpus * GPU_BYTES - weights,
                max_concurrency=32,
                max_instances=8,
                num_gpus=num_gpus,
                slo=Slo(ttft_s=7.5, tpot_s=0.2),
                revision=1,
            )
        )
    return made


class Agents:
    """Every node of the fleet: what its ledger holds, told in beats as agents tell it."""

    def __init__(self, num_nodes: int, num_gpus: int) -> None:
        self.rows: dict[str, Instance] = {}
        self.nodes: dict[str, Node] = {}
        for number in range(num_nodes):
            node_id = f"node-{number:04d}"
            gpus = tuple(Gpu(gpu_id=f"{node_id}/{g}", total_bytes=GPU_BYTES, kind="emulated") for g in range(num_gpus))
            self.nodes[node_id] = Node(
                node_id=node_id, gpus=gpus, engines=("emulated",), agent_url="", abilities=ABILITIES, revision=1
            )

    def grant(self, row: Instance) -> Node:
        owner = GrantOwner.PREWARM if row.replica else GrantOwner.WEIGHTS
        given = {
            w.gpu_id: Grant(holder=row.instance_id, owner=owner, num_bytes=w.num_bytes)
            for w in row.workers
            if w.node_id == row.node_id
        }
        self.rows[row.instance_id] = row
        return self._change(row.node_id, lambda g: (*g.grants, given[g.gpu_id]) if g.gpu_id in given else g.grants)

    def release(self, instance_id: str) -> Node:
        row = self.rows.pop(instance_id)
        return self._change(row.node_id, lambda g: tuple(x for x in g.grants if x.holder != instance_id))

    def _change(self, node_id: str, grants: Callable[[Gpu], tuple[Grant, ...]]) -> Node:
        node = self.nodes[node_id]
        gpus = []
        for gpu in node.gpus:
            now = grants(gpu)
            gpus.append(gpu if now is gpu.grants or now == gpu.grants else replace(gpu, grants=now))
        self.nodes[node_id] = replace(node, gpus=tuple(gpus), revision=node.revision + 1)
        return self.nodes[node_id]

    def fill(self, models: list[Model], share: float) -> None:
        """An instance on that share of the GPUs, two replicas on half of the others."""
        turn = 0
        for node in list(self.nodes.values()):
            for at, gpu in enumerate(node.gpus):
                turn += 1
                if at < share * len(node.gpus):
                    self.grant(a_row(f"i-{turn}", models[turn % len(models)], (gpu.gpu_id,), GPU_BYTES))
                elif at % 2:
                    for n in range(2):
                        model = models[(turn * 2 + n) % len(models)]
                        name, num_bytes = f"r-{turn}-{n}", model.weights_bytes // model.num_gpus // 2
                        self.grant(a_row(name, model, (gpu.gpu_id,), num_bytes, replica=True))


def a_row(
    instance_id: str, model: Model, gpu_ids: tuple[str, ...], num_bytes: int, *, replica: bool = False
) -> Instance:
    node_id = gpu_ids[0].rpartition("/")[0]
    state = InstanceState.PREWARMED if replica else InstanceState.READY
    return Instance(
        instance_id=instance_id,
        model_key=model.key,
        engine=model.engine,
        state=state,
        workers=tuple(
            Worker(worker_id=f"{instance_id}-{r}", node_id=node_id, gpu_id=g, num_bytes=num_bytes, rank=r)
            for r, g in enumerate(gpu_ids)
        ),
        model_revision=model.revision,
        replica=replica,
    )


def timed(call: Callable[[], Any]) -> float:
    began = time.thread_time()
    call()
    return (time.thread_time() - began) * 1e3


def line(*cells: object) -> None:
    print("| " + " | ".join(f"{c:.2f}" if isinstance(c, float) else str(c) for c in cells) + " |")


def policies_alone(args: argparse.Namespace, names: list[str]) -> None:
    models = models_of(args.models)
    line("policy", "fleet", "median ms", "p99 ms", "max ms")
    line("---", "---", "---", "---", "---")
    for name in names:
        place = choose("placement", name)
        for fleet, share in (("empty", None), ("half full", 0.5), ("full", 1.0)):
            agents = Agents(args.nodes, args.gpus)
            if share is not None:
                agents.fill(models, share)
            capacity = Capacity()
            for node in agents.nodes.values():
                capacity.put_node(node)
            for row in agents.rows.values():
                capacity.put_row(row)
            capacity.nodes.score({row.instance_id: 0.5 for row in agents.rows.values() if row.replica})
            view = PlacementView(now_s=100.0, nodes=capacity.nodes, start_stages=STAGES)
            took = []
            for number in range(args.rounds):
                asked = PlaceRequest(instance_id=f"i-{number}", model=models[number % len(models)])
                took.append(timed(partial(place, asked, view)))
            took.sort()
            line(name, fleet, statistics.median(took), took[int(len(took) * 0.99)], took[-1])


class Fleet:
    """A placer and the agents it commands. `took` collects (kind of event, milliseconds)."""

    def __init__(self, args: argparse.Namespace, placement: str) -> None:
        self.random = random.Random(args.seed)
        self.models = models_of(args.models)
        self.agents = Agents(args.nodes, args.gpus)
        names = {"placement": placement, "eviction": "lru", "prewarming": "none"}
        if placement in ("warmserve", "union"):
            names["prewarming"] = "warmserve"
        place, evict, prewarm = (choose(kind, name) for kind, name in names.items())
        params = PlacerParams(settle_s=0.0, start_stages=STAGES, forget_s=1e9)
        self.placer = PlacerController(place, evict, names, 1, params, prewarm=prewarm)
        self.now_s, self.took = 0.0, list[tuple[str, float]]()
        self.num_events = self.num_starts = 0
        self.placer.restore("models", {m.key: m for m in self.models}, 0.0)
        self.placer.restore("nodes", dict(self.agents.nodes), 0.0)

    def give(self, payload: Any) -> None:
        self.num_events += 1
        if isinstance(payload, Tick):
            stimulus, kind = payload, "tick"
        else:
            kind = payload.TYPE
            stimulus = Event(
                event_id=f"e{self.num_events}",
                type=kind,
                occurred_at=self.now_s,
                issuer="autoscaler-1",
                data=payload,
                epoch=1,
            )
        began = time.thread_time()
        effects = self.placer.handle(stimulus, self.now_s)
        self.took.append((kind, (time.thread_time() - began) * 1e3))
        for effect in effects:
            if isinstance(effect, Publish):
                self.carry_out(effect.payload)

    def carry_out(self, command: Any) -> None:
        if isinstance(command, StartInstance):
            self.num_starts += not command.replica
            for gone in (*command.drops, command.source):
                if gone in self.agents.rows:
                    self.stop(gone)
            own = command.workers if command.num_stages == 1 or command.part_of else command.workers[:1]
            row = Instance(
                instance_id=command.instance_id,
                model_key=command.model.key,
                engine="emulated",
                state=InstanceState.STARTING,
                workers=own,
                model_revision=1,
                replica=command.replica,
                part_of=command.part_of,
                num_stages=command.num_stages,
                revision=1,
            )
            self.give(fact.InstanceStarting(instance=row))
            self.give(fact.NodeBeat(node=self.agents.grant(row)))
            if command.replica:
                self.tell(row, fact.InstancePrewarmed, InstanceState.PREWARMED)
            else:
                self.tell(row, fact.InstanceReady, InstanceState.READY)
        elif isinstance(command, StopInstance) and command.instance_id in self.agents.rows:
            self.stop(command.instance_id)

    def tell(self, row: Instance, kind: Callable[..., Any], state: InstanceState) -> None:
        now = replace(row, state=state, revision=row.revision + 1, ready_at=self.now_s, changed_at=self.now_s)
        self.agents.rows[row.instance_id] = now
        self.give(kind(instance=now))

    def stop(self, instance_id: str) -> None:
        row = self.agents.rows[instance_id]
        beat = self.agents.release(instance_id)
        gone = replace(row, state=InstanceState.STOPPED, revision=row.revision + 1, changed_at=self.now_s)
        self.give(fact.InstanceStopped(instance=gone))
        self.give(fact.NodeBeat(node=beat))

    def loads(self) -> None:
        busy = self.random.sample(self.models, len(self.models) // 3)
        loads = {m.key: ModelLoad(last_active_at=self.now_s - 10) for m in self.models}
        loads |= {m.key: ModelLoad(num_waiting=1, last_active_at=self.now_s) for m in busy}
        self.give(fact.RouterLoadReported(router_id="router-1", loads=loads))

    def forecasts(self) -> None:
        for model in self.models:
            mean = self.random.expovariate(0.05)
            ahead = Forecast(
                made_at=self.now_s,
                starts_at=self.now_s,
                window_s=300.0,
                concurrency_mean=mean,
                concurrency_peak=2 * mean,
            )
            self.give(fact.ForecastMade(model_key=model.key, forecasts=(ahead,)))

    def run(self, num_events: int) -> None:
        """Bursts of placements, ten a second, until so many events have been handled."""
        number = 0
        while self.num_events < num_events:
            self.now_s += 0.5
            for node_id in self.random.sample(sorted(self.agents.nodes), len(self.agents.nodes) // 2):
                node = self.agents.nodes[node_id]
                self.agents.nodes[node_id] = beat = replace(node, revision=node.revision + 1, heartbeat_at=self.now_s)
                self.placer.fleet.node(beat, self.now_s)  # most beats say nothing; they would only flatter
            self.loads()
            if number % 500 == 0:
                self.forecasts()
            for _ in range(5):
                number += 1
                command = PlaceInstance(
                    instance_id=f"i-{number}",
                    model=self.random.choice(self.models),
                    reason="bench",
                    wanted_at=self.now_s,
                )
                self.give(command)
            self.give(Tick())


def rows_of(took: list[tuple[str, float]]) -> Iterator[tuple[str, list[float]]]:
    by_kind: dict[str, list[float]] = {}
    for kind, ms in took:
        by_kind.setdefault(kind, []).append(ms)
    yield "all", sorted(ms for _, ms in took)
    yield from ((kind, sorted(found)) for kind, found in sorted(by_kind.items()))


def controller(args: argparse.Namespace, names: list[str]) -> None:
    line("placer with", "event", "number", "median ms", "p99 ms", "max ms")
    line("---", "---", "---", "---", "---", "---")
    for name in names:
        fleet = Fleet(args, name)
        gc.collect()
        fleet.run(args.events)
        for kind, found in rows_of(fleet.took):
            line(name, kind, len(found), statistics.median(found), found[int(len(found) * 0.99)], found[-1])
        line(name, "starts", fleet.num_starts, "", "", f"{len(fleet.placer.placements)} wait")


COMPARED = ("median ms", "p99 ms", "max ms")


def rows_printed(text: str) -> dict[tuple[str, ...], list[str]]:
    """(policy, fleet or event) -> median, p99 and most, of the tables in `text`."""
    found = {}
    for printed in text.splitlines():
        cells = [cell.strip() for cell in printed.strip("|").split("|")]
        if printed.startswith("|") and len(cells) > 4 and cells[-1].replace(".", "").isdigit():
            found[cells[0], cells[1]] = cells[-3:]
    return found


def compare(args: argparse.Namespace, num_nodes: int) -> None:
    """Both trees' scripts, each in a process of its own, and their figures side by side."""
    given = [f"--{name}={getattr(args, name)}" for name in ("gpus", "models", "rounds", "events", "seed")]
    given += [f"--policy={name}" for name in args.policy]
    printed = []
    for tree in (Path(args.against).resolve(), Path(__file__).parents[2]):
        command = [sys.executable, "-m", "bench.placer.run", f"--nodes={num_nodes}", *given]
        environment = {**os.environ, "PYTHONPATH": f"{tree / 'libs'}:{tree}"}
        done = subprocess.run(command, cwd=tree, env=environment, check=True, stdout=subprocess.PIPE, text=True)
        printed.append(rows_printed(done.stdout))
    before, after = printed
    line("policy", "fleet or event", *(f"{name} {when}" for name in COMPARED for when in ("before", "after")))
    line(*["---"] * 8)
    for key, figures in after.items():
        known = before.get(key, [""] * len(figures))
        line(*key, *(cell for pair in zip(known, figures, strict=True) for cell in pair))


def main() -> None:
    parser = argparse.ArgumentParser(description="What a placement costs.")
    parser.add_argument("--nodes", type=int, nargs="+", default=[200])
    parser.add_argument("--gpus", type=int, default=8)
    parser.add_argument("--models", type=int, default=500)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--events", type=int, default=12000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--policy", action="append", default=[], choices=sorted(KINDS["placement"]))
    parser.add_argument("--against", default="", help="another tree, whose figures are printed as before")
    args = parser.parse_args()
    names = args.policy or sorted(KINDS["placement"])
    assert bytes_per_gpu(models_of(1)[0]) == GPU_BYTES
    sizes = args.nodes
    for args.nodes in sizes:
        print(f"{args.nodes} nodes x {args.gpus} GPUs, {args.models} models\n", flush=True)
        if args.against:
            compare(args, args.nodes)
        else:
            policies_alone(args, names)
            print()
            controller(args, names)
        print(flush=True)


if __name__ == "__main__":
    main()
