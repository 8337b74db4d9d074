"""Runs golden scripts: commands, `----`, and all that autoscaler and placer do about them, line by line.

    python -m tests.golden.control      writes what the scripts now give; read the diff before you commit it

Commands of a script (times are seconds, sizes MiB):
    model NAME MIB [FIELD=VALUE ...]   a deployed model        node NAME MIB [MIB ...]    a node and its GPUs beat
    waiting MODEL COUNT                a router holds requests load MODEL WAITING RUNNING what routers hold and run
    state INSTANCE STATE               its agent says so       after SECONDS              time passes, tick by tick
    operator load|unload|drain|pin|unpin|remove MODEL          node_drain NODE, node_undrain NODE
"""

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from glowplug.controllers import operator
from glowplug.controllers.autoscaler.controller import AutoscalerController
from glowplug.controllers.effects import Effect, Publish, Record, Tick
from glowplug.controllers.placer.controller import Cordon, PlacerController
from glowplug.domain.hardware import Gpu, Grant, GrantOwner, Node
from glowplug.domain.instance import Instance, InstanceState
from glowplug.domain.model import Model
from glowplug.domain.snapshot import ModelLoad
from glowplug.events.commands import PlaceInstance, StartInstance
from glowplug.events.envelope import Event
from glowplug.events.facts import (
    InstanceDraining,
    InstanceFailed,
    InstanceLoading,
    InstanceReady,
    InstanceStarting,
    InstanceStopped,
    NodeBeat,
    RequestWaiting,
    RouterLoadReported,
)
from glowplug.policies.eviction.lru import evict
from glowplug.policies.placement.first_fit import place
from glowplug.policies.scaling.baselines import reactive as scale
from tests.fleet_builder import MIB, a_model, a_node

SCRIPTS = Path(__file__).parent / "scripts"
TICK_S = 0.5
FACTS = {
    InstanceState.STARTING: InstanceStarting,
    InstanceState.LOADING: InstanceLoading,
    InstanceState.READY: InstanceReady,
    InstanceState.DRAINING: InstanceDraining,
    InstanceState.STOPPED: InstanceStopped,
    InstanceState.FAILED: InstanceFailed,
}
SHOWN = ("target", "instance_id", "model_key", "gpu_id", "num_bytes", "grace_s", "reason")


class Control:
    """Autoscaler and placer on one clock; agents and routers are the script."""

    def __init__(self) -> None:
        self.now_s, self.lines = 1000.0, list[str]()
        self.models: dict[str, Model] = {}
        self.nodes: dict[str, Node] = {}
        self.instances: dict[str, Instance] = {}
        self.loads: dict[str, ModelLoad] = {}
        self.num_events = 0
        self.autoscaler = AutoscalerController(scale, "reactive", 1)
        self.placer = PlacerController(place, evict, {"placement": "first_fit", "eviction": "lru"}, 1)

    def run(self, command: str) -> list[str]:
        """One command; returns what followed."""
        verb, *words = command.split()
        act: Callable[..., None] = getattr(self, f"do_{verb}")
        self.lines = []
        act(*words)
        return self.lines or ["nothing"]

    def do_model(self, name: str, mib: str, *fields: str) -> None:
        given = {
            key: float(value) if "." in value else int(value) for key, _, value in (f.partition("=") for f in fields)
        }
        model = a_model(name, mib=int(mib), **given)
        self.models[model.key] = model
        for controller in (self.autoscaler, self.placer):
            self._carry_out(controller.restore("models", dict(self.models), self.now_s))

    def do_node(self, name: str, *mib: str) -> None:
        self.nodes[name] = a_node(name, gpus_mib=tuple(int(m) for m in mib))
        self._beat(name)

    def do_waiting(self, model: str, count: str) -> None:
        waiting = RequestWaiting(
            model_key=model, request_id="r-1", router_id="router-1", num_waiting=int(count),
            waiting_since=self.now_s, deadline_at=self.now_s + 60,
        )  # fmt: skip
        self._tell(waiting)

    def do_load(self, model: str, waiting: str, running: str) -> None:
        self.loads[model] = ModelLoad(num_waiting=int(waiting), num_in_flight=int(running), last_active_at=self.now_s)
        self._tell(RouterLoadReported(router_id="router-1", loads=dict(self.loads)))

    def do_state(self, instance_id: str, state: str) -> None:
        old = self.instances.get(instance_id)
        if old is None:
            return self._say(f"there is no {instance_id}, only {', '.join(self.instances)}")
        new = replace(old, state=InstanceState(state), changed_at=self.now_s, revision=old.revision + 1)
        if new.state is InstanceState.READY:
            new = replace(new, ready_at=self.now_s)
        self.instances[instance_id] = new
        self._beat(new.node_id)
        self._tell(FACTS[new.state](instance=new))

    def do_after(self, seconds: str) -> None:
        for _ in range(round(float(seconds) / TICK_S)):
            self.now_s += TICK_S
            for name in self.nodes:
                self._beat(name)
            self._tell(RouterLoadReported(router_id="router-1", loads=dict(self.loads)))
            for controller in (self.autoscaler, self.placer):
                self._carry_out(controller.handle(Tick(), self.now_s))

    def do_operator(self, verb: str, key: str) -> None:
        asked = {"load": operator.Load, "unload": operator.Unload, "drain": operator.Suspend}
        pins = {"pin": operator.Pin(key, True), "unpin": operator.Pin(key, False), "remove": operator.Undeploy(key)}
        request = asked[verb](key) if verb in asked else pins[verb]
        self._carry_out(self.autoscaler.handle(request, self.now_s))
        self.models = dict(self.autoscaler.models)

    def do_node_drain(self, name: str) -> None:
        self._carry_out(self.placer.handle(Cordon(name, True), self.now_s))

    def do_node_undrain(self, name: str) -> None:
        self._carry_out(self.placer.handle(Cordon(name, False), self.now_s))

    def _beat(self, name: str) -> None:
        node = self.nodes[name]
        gpus = tuple(replace(gpu, grants=self._grants(gpu)) for gpu in node.gpus)
        self.nodes[name] = replace(node, gpus=gpus, heartbeat_at=self.now_s, revision=node.revision + 1)
        self._carry_out(self.placer.handle(self._event(NodeBeat(node=self.nodes[name])), self.now_s))

    def _grants(self, gpu: Gpu) -> tuple[Grant, ...]:
        here = [i for i in self.instances.values() if i.gpu_id == gpu.gpu_id and not i.state.is_gone]
        return tuple(
            Grant(holder=i.instance_id, owner=GrantOwner.WEIGHTS, num_bytes=i.workers[0].num_bytes) for i in here
        )

    def _tell(self, payload: Any, issuer: str = "script") -> None:
        for controller in (self.autoscaler, self.placer):
            self._carry_out(controller.handle(self._event(payload, issuer), self.now_s))

    def _event(self, payload: Any, issuer: str = "script", epoch: int = 0) -> Event:
        self.num_events += 1
        return Event(
            event_id=f"e-{self.num_events}",
            type=payload.TYPE,
            occurred_at=self.now_s,
            issuer=issuer,
            data=payload,
            epoch=epoch,
        )

    def _carry_out(self, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Record):
                self._say(f"decide {effect.decision.kind} ({effect.decision.policy}): {effect.decision.reason}")
            elif isinstance(effect, Publish):
                self._say(f"{effect.payload.TYPE} {_words(effect.payload)}")
                self._deliver(effect.payload)

    def _say(self, line: str) -> None:
        self.lines.append(f"{self.now_s - 1000:6.1f}  {line}")

    def _deliver(self, payload: Any) -> None:
        if isinstance(payload, PlaceInstance):
            self._carry_out(self.placer.handle(self._event(payload, "autoscaler-1", epoch=1), self.now_s))
        elif hasattr(payload, "instance"):  # of an instance the placer had to give up
            self._carry_out(self.autoscaler.handle(self._event(payload, "placer-1"), self.now_s))
        elif isinstance(payload, StartInstance):
            self.instances[payload.instance_id] = Instance(
                instance_id=payload.instance_id,
                model_key=payload.model.key,
                engine=payload.model.engine,
                state=InstanceState.STARTING,
                workers=payload.workers,
                max_concurrency=payload.model.max_concurrency,
                created_at=self.now_s,
            )


def _words(payload: Any) -> str:
    """The fields of a payload worth reading in a trace."""
    source = getattr(payload, "instance", payload)
    shown = {name: getattr(source, name) for name in SHOWN if getattr(source, name, "") not in ("", "any")}
    if isinstance(payload, PlaceInstance | StartInstance):
        shown["model"] = payload.model.key
    if isinstance(payload, StartInstance):
        shown |= {"gpu_id": payload.workers[0].gpu_id, "mib": payload.workers[0].num_bytes // MIB}
    return " ".join(f"{name}={value!r}" if " " in str(value) else f"{name}={value}" for name, value in shown.items())


def played(script: str) -> str:
    """The script with what its commands give now. Blocks: comments and commands, `----`, trace, empty line."""
    control, out = Control(), []
    for block in _blocks(script):
        commands = [line for line in block if line and not line.startswith("#")]
        trace = [line for command in commands for line in control.run(command)]
        trace = [line for line in trace if line != "nothing"] or ["nothing"]
        out.append("\n".join([*block, *(["----", *trace] if commands else [])]))
    return "\n\n".join(out) + "\n"


def _blocks(script: str) -> Iterator[list[str]]:
    for block in script.strip().split("\n\n"):
        yield block.split("\n----")[0].split("\n")


if __name__ == "__main__":
    for path in sorted(SCRIPTS.glob("*.txt")):
        path.write_text(played(path.read_text(encoding="utf-8")), encoding="utf-8")
        sys.stdout.write(f"{path.name}\n")
