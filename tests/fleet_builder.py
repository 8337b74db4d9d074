"""Builders of models, nodes, instances and events."""

import itertools
from typing import Any

from glowplug.controllers.agent.transaction import fact_of
from glowplug.domain.hardware import Gpu, Grant, GrantOwner, Node
from glowplug.domain.instance import Instance, InstanceState, Worker
from glowplug.domain.model import Model, WeightsRef, model_key
from glowplug.domain.snapshot import ModelLoad
from glowplug.events.commands import StartInstance
from glowplug.events.envelope import Event
from glowplug.events.facts import RouterLoadReported

MIB = 1024**2
_count = itertools.count(1)


def a_model(name: str = "m", *, mib: int = 100, **fields: Any) -> Model:
    given: dict[str, Any] = {
        "name": name,
        "key": model_key(name),
        "engine": "emulated",
        "weights": WeightsRef(uri="file:/weights", num_bytes=mib * MIB),
        "weights_bytes": mib * MIB,
        "kv_bytes": 0,
        "revision": 1,
    }
    return Model(**(given | fields))


def a_node(node_id: str = "node-1", *, gpus_mib: tuple[int, ...] = (300,), revision: int = 1, **fields: Any) -> Node:
    """`grants` maps gpu index to (holder, mib) pairs."""
    grants = fields.pop("grants", {})
    gpus = tuple(
        Gpu(
            gpu_id=f"{node_id}/{i}",
            total_bytes=mib * MIB,
            grants=tuple(
                Grant(holder=holder, owner=GrantOwner.WEIGHTS, num_bytes=size * MIB)
                for holder, size in grants.get(i, ())
            ),
        )
        for i, mib in enumerate(gpus_mib)
    )
    given: dict[str, Any] = {"engines": ("emulated",), "agent_url": "http://agent", "revision": revision}
    return Node(node_id=node_id, gpus=gpus, **(given | fields))


def an_instance(
    instance_id: str = "i-1",
    model: str = "m",
    state: InstanceState = InstanceState.READY,
    *,
    gpu_id: str = "node-1/0",
    mib: int = 100,
    revision: int = 1,
    **fields: Any,
) -> Instance:
    worker = Worker(worker_id=f"{instance_id}-0", node_id=gpu_id.rpartition("/")[0], gpu_id=gpu_id, num_bytes=mib * MIB)
    given: dict[str, Any] = {"engine": "emulated", "workers": (worker,), "revision": revision}
    return Instance(instance_id=instance_id, model_key=model, state=state, **(given | fields))


def a_start(model: Model, instance_id: str = "i-1", **fields: Any) -> StartInstance:
    given: dict[str, Any] = {"target": "node-1", "workers": (), "decision_id": "d-1"}
    return StartInstance(instance_id=instance_id, model=model, **(given | fields))


def an_event(
    payload: Any, *, issuer: str = "router-1", epoch: int = 0, traceparent: str = "", occurred_at: float = 0.0
) -> Event:
    return Event(
        event_id=f"e{next(_count)}",
        type=payload.TYPE,
        occurred_at=occurred_at,
        issuer=issuer,
        data=payload,
        epoch=epoch,
        traceparent=traceparent,
    )


def instance_event(instance: Instance, code: str = "") -> Event:
    """`code`: the error of a FAILED one."""
    return an_event(fact_of(instance, code))


def load_report(router_id: str = "router-1", **loads: ModelLoad) -> Event:
    return an_event(RouterLoadReported(router_id=router_id, loads={k.replace("_", "-"): v for k, v in loads.items()}))
