"""A made-up fleet of any size that lives: beats, loads, cold starts with their fetches, stops, requests, decisions.

Seeded, so that a run can be repeated. `second(now_s)` yields the events of one second.
"""

import heapq
import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from glowplug.domain.decision import DecisionRecord
from glowplug.domain.hardware import CachedWeights, Gpu, GpuRole, Grant, GrantOwner, Link, Node
from glowplug.domain.instance import Instance, InstanceState, Phase, PhaseName, Worker
from glowplug.domain.model import Model, WeightsRef
from glowplug.domain.snapshot import ModelLoad
from glowplug.events import Event
from glowplug.events.facts import (
    DecisionMade,
    InstanceDraining,
    InstanceLoading,
    InstanceReady,
    InstanceStarting,
    InstanceStopped,
    NodeBeat,
    RequestFinished,
    RouterLoadReported,
    WeightsFetched,
    WeightsProgressed,
)

GIB = 1 << 30
GPU_BYTES = 80 * GIB
LINK_BYTES_PER_S = 12.5e9  # 100 Gbit/s
FACTS = {
    InstanceState.STARTING: InstanceStarting,
    InstanceState.LOADING: InstanceLoading,
    InstanceState.READY: InstanceReady,
    InstanceState.DRAINING: InstanceDraining,
    InstanceState.STOPPED: InstanceStopped,
}
START_S = {
    PhaseName.DECIDE: 0.02,
    PhaseName.FETCH: 3.0,
    PhaseName.LAUNCH: 3.0,
    PhaseName.LOAD: 1.2,
    PhaseName.WARMUP: 0.8,
}


@dataclass(frozen=True)
class Rates:
    """Per second of the fleet's life."""

    starts: int = 2
    requests: int = 50
    load_reports: int = 2  # of each router
    routers: int = 2


class SyntheticFleet:
    """Every node, model and instance is emulated and says so."""

    def __init__(self, nodes: int, gpus: int, models: int, *, seed: int = 1, rates: Rates = Rates()) -> None:
        self.chance, self.rates = random.Random(seed), rates
        self.ids = itertools.count(1)
        self.second_number = 0
        self.beat_every_s = 1
        self.models = [self._model(i) for i in range(models)]
        self.nodes = {f"node-{i:03d}": self._node(f"node-{i:03d}", gpus) for i in range(1, nodes + 1)}
        self.instances: dict[str, Instance] = {}
        self.fetching: dict[str, tuple[str, int]] = {}  # instance id -> (node id, bytes done)
        self._later: list[tuple[int, int, str, InstanceState]] = []
        for _ in range(int(0.7 * nodes * gpus)):
            if (instance := self._place(0.0)) is not None:
                self._set(replace(instance, state=InstanceState.READY, ready_at=1.0, phases=phases(0.0)))

    def _model(self, number: int) -> Model:
        size = self.chance.choice((8, 14, 16, 28, 40)) * GIB
        return Model(
            name=f"org-{number % 20}/model-{number:03d}-{size // GIB}b",
            key=f"org-{number % 20}-model-{number:03d}-{size // GIB}b",
            engine="emulated",
            weights=WeightsRef(uri=f"s3://weights/{number}", num_bytes=size),
            weights_bytes=size,
            kv_bytes=size // 2,
            max_instances=16,
            revision=1,
        )

    def _node(self, node_id: str, gpus: int) -> Node:
        return Node(
            node_id=node_id,
            gpus=tuple(Gpu(gpu_id=f"{node_id}/{i}", total_bytes=GPU_BYTES, kind="emulated") for i in range(gpus)),
            engines=("emulated",),
            agent_url="http://127.0.0.1:1",
            host_cache_bytes=512 * GIB,
            links=(Link(link_id=f"{node_id}/nic", bytes_per_s=LINK_BYTES_PER_S),),
            cached=tuple(self._cached(self.chance.choice(self.models)) for _ in range(6)),
            revision=1,
        )

    def _cached(self, model: Model) -> CachedWeights:
        return CachedWeights(digest=model.weights.digest, num_bytes=model.weights_bytes, model_keys=(model.key,))

    def _place(self, now_s: float) -> Instance | None:
        """Create an instance on a GPU with room, and grant its bytes."""
        model = self.models[int(len(self.models) * self.chance.random() ** 2)]
        for _ in range(20):
            node = self.nodes[self.chance.choice(list(self.nodes))]
            gpu = self.chance.choice(node.gpus)
            if gpu.free_bytes >= model.memory_bytes:
                break
        else:
            return None
        instance_id = f"i-{next(self.ids):06x}"
        worker = Worker(
            worker_id=f"{instance_id}-0", node_id=node.node_id, gpu_id=gpu.gpu_id, num_bytes=model.memory_bytes
        )
        instance = Instance(
            instance_id=instance_id,
            model_key=model.key,
            engine="emulated",
            state=InstanceState.STARTING,
            workers=(worker,),
            created_at=now_s,
            changed_at=now_s,
            emulated=True,
            revision=1,
        )
        self._set(instance)
        grants = (
            Grant(holder=instance_id, owner=GrantOwner.WEIGHTS, num_bytes=model.weights_bytes),
            Grant(holder=instance_id, owner=GrantOwner.KV, num_bytes=model.kv_bytes),
        )
        self._regrant(node.node_id, gpu.gpu_id, (*gpu.grants, *grants))
        return instance

    def _set(self, instance: Instance) -> None:
        self.instances[instance.instance_id] = instance

    def _regrant(self, node_id: str, gpu_id: str, grants: tuple[Grant, ...]) -> None:
        node = self.nodes[node_id]
        role = GpuRole.DEDICATED if grants else GpuRole.IDLE
        gpus = tuple(replace(gpu, grants=grants, role=role) if gpu.gpu_id == gpu_id else gpu for gpu in node.gpus)
        self.nodes[node_id] = replace(node, gpus=gpus, revision=node.revision + 1)

    # ---- a second of its life

    def second(self, now_s: float) -> Iterator[Event]:
        """Yield the events of the next second, as of `now_s`."""
        self.second_number += 1
        while self._later and self._later[0][0] <= self.second_number:
            _, _, instance_id, state = heapq.heappop(self._later)
            yield from self._turn(instance_id, state, now_s)
        for _ in range(self.rates.starts):
            yield from self._start(now_s)
            yield from self._stop(now_s)
        yield from self._fetches(now_s)
        if self.second_number % self.beat_every_s == 0:
            yield from self._beats(now_s)
        for report in range(self.rates.load_reports * self.rates.routers):
            yield fact(
                RouterLoadReported(router_id=f"router-{report % self.rates.routers}", loads=self._loads()), now_s
            )
        for _ in range(self.rates.requests):
            yield self._request(now_s)

    def _at(self, seconds: int, instance_id: str, state: InstanceState) -> None:
        heapq.heappush(self._later, (self.second_number + seconds, next(self.ids), instance_id, state))

    def _start(self, now_s: float) -> Iterator[Event]:
        instance = self._place(now_s)
        if instance is None:
            return
        yield fact(DecisionMade(decision=self._decision("place", instance, now_s)), now_s)
        yield fact(InstanceStarting(instance=instance), now_s)
        self.fetching[instance.instance_id] = (instance.node_id, 0)
        self._at(3, instance.instance_id, InstanceState.LOADING)
        self._at(5, instance.instance_id, InstanceState.READY)

    def _stop(self, now_s: float) -> Iterator[Event]:
        ready = [i for i in itertools.islice(self.instances.values(), 64) if i.state is InstanceState.READY]
        if not ready:
            return
        victim = self.chance.choice(ready)
        yield fact(DecisionMade(decision=self._decision("evict", victim, now_s)), now_s)
        yield from self._turn(victim.instance_id, InstanceState.DRAINING, now_s)
        self._at(2, victim.instance_id, InstanceState.STOPPED)

    def _turn(self, instance_id: str, state: InstanceState, now_s: float) -> Iterator[Event]:
        old = self.instances[instance_id]
        new = replace(old, state=state, changed_at=now_s, revision=old.revision + 1)
        if state is InstanceState.READY:
            new = replace(new, ready_at=now_s, phases=phases(old.created_at))
        self._set(new)
        if state is InstanceState.STOPPED:
            del self.instances[instance_id]
            gpu = next(gpu for gpu in self.nodes[old.node_id].gpus if gpu.gpu_id == old.gpu_id)
            self._regrant(old.node_id, old.gpu_id, tuple(g for g in gpu.grants if g.holder != instance_id))
        yield fact(FACTS[state](instance=new), now_s)

    def _fetches(self, now_s: float) -> Iterator[Event]:
        for instance_id, (node_id, done) in list(self.fetching.items()):
            model = next(m for m in self.models if m.key == self.instances[instance_id].model_key)
            node, total = self.nodes[node_id], model.weights_bytes
            done = min(total, done + total // 3 + 1)
            self.fetching[instance_id] = (node_id, done)
            link = replace(node.links[0], bytes_in_flight=total - done, num_transfers=int(done < total))
            self.nodes[node_id] = replace(node, links=(link,), revision=node.revision + 1)
            told: dict[str, Any] = {"node_id": node_id, "model_key": model.key, "digest": model.weights.digest}
            if done < total:
                yield fact(WeightsProgressed(**told, num_bytes_done=done, num_bytes=total), now_s)
                continue
            del self.fetching[instance_id]
            yield fact(WeightsFetched(**told, num_bytes=total, seconds=3.0, source="s3"), now_s)

    def _beats(self, now_s: float) -> Iterator[Event]:
        for node_id, node in self.nodes.items():
            self.nodes[node_id] = node = replace(node, heartbeat_at=now_s, revision=node.revision + 1)
            yield fact(NodeBeat(node=node), now_s)

    def _loads(self) -> dict[str, ModelLoad]:
        """One router's queues and counts: most models change from report to report."""
        loads: dict[str, dict[str, int]] = {}
        for instance in self.instances.values():
            if instance.state is InstanceState.READY and (num := self.chance.randrange(5)):
                loads.setdefault(instance.model_key, {})[instance.instance_id] = num
        return {
            key: ModelLoad(num_in_flight=sum(by.values()), num_waiting=0, in_flight_by_instance=by)
            for key, by in loads.items()
        }

    def _request(self, now_s: float) -> Event:
        number, instance = next(self.ids), self.chance.choice(list(self.instances.values()))
        ttft_s = self.chance.uniform(0.05, 0.4)
        done = RequestFinished(
            model_key=instance.model_key,
            request_id=f"req-{number:08x}",
            router_id="router-0",
            instance_id=instance.instance_id,
            status=200,
            arrived_at=now_s - 2,
            finished_at=now_s,
            queue_s=0.001,
            ttft_s=ttft_s,
            e2e_s=ttft_s + 1.5,
            prompt_tokens=200,
            response_tokens=120,
            tokens_exact=True,
            cold=False,
            emulated=True,
        )
        return fact(done, now_s, f"00-{number:032x}-{number:016x}-01")

    def _decision(self, kind: str, instance: Instance, now_s: float) -> DecisionRecord:
        return DecisionRecord(
            decision_id=f"d-{next(self.ids):07x}",
            kind=kind,
            policy="first_fit" if kind == "place" else "lru",
            service="placer",
            reason=f"{instance.gpu_id} is the first GPU with room" if kind == "place" else "idle longest on its GPU",
            made_at=now_s,
            model_key=instance.model_key,
            instance_id=instance.instance_id,
            node_id=instance.node_id,
            gpu_id=instance.gpu_id,
            inputs={"free_bytes": 1.0, "nodes": len(self.nodes)},
        )


_events = itertools.count(1)


def fact(data: object, now_s: float, traceparent: str = "") -> Event:
    """Wrap `data` as an event of this fleet."""
    kind: str = data.TYPE  # type: ignore[attr-defined]
    return Event(
        event_id=f"e{next(_events):x}",
        type=kind,
        occurred_at=now_s,
        issuer="synthetic",
        data=data,
        traceparent=traceparent,
    )


def phases(created_at: float) -> tuple[Phase, ...]:
    offset, found = created_at, []
    for name, seconds in START_S.items():
        begins = created_at + 0.02 if name is PhaseName.LAUNCH else offset
        found.append(Phase(name=name, started_at=begins, ended_at=begins + seconds, predicted_s=seconds))
        offset = begins + seconds
    return tuple(found)
