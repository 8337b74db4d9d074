"""Runs golden scripts: commands, `----`, and the actions of autoscaler and placer, line by line.

    python -m tests.golden.control      rewrites the traces; read the diff before the commit

Commands of a script (times are seconds, sizes MiB):
    model NAME MIB [FIELD=VALUE ...]   a deployed model        node NAME MIB [MIB ...]    a node and its GPUs beat
    waiting MODEL COUNT                a router holds requests load MODEL WAITING RUNNING a router reports load
    state INSTANCE STATE               its agent says so       after SECONDS              time passes, tick by tick
    operator load|unload|drain|pin|unpin|remove MODEL          node_drain NODE, node_undrain NODE
"""

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from glowplug.controllers import operator
from glowplug.controllers.autoscaler.params import AutoscalerParams
from glowplug.controllers.effects import Tick
from glowplug.controllers.placer.controller import Cordon, PlacerParams
from glowplug.domain.hardware import Gpu, Grant, GrantOwner, Node
from glowplug.domain.instance import Instance, InstanceState
from glowplug.domain.snapshot import ModelLoad
from glowplug.events import facts
from glowplug.events.commands import PlaceInstance, StartInstance
from glowplug.events.envelope import Event
from glowplug_lab.simulator.control_plane import ControlPlane
from glowplug_lab.simulator.kernel import Kernel
from glowplug_lab.simulator.setup import Params, PolicyNames
from tests.fleet_builder import MIB, a_model, a_node

SCRIPTS = Path(__file__).parent / "scripts"
TICK_S, BEGAN_S = 0.5, 1000.0
DECIDING = ("autoscaler", "placer")
PARAMS = Params(autoscaler=AutoscalerParams(), placer=PlacerParams())
SHOWN = ("target", "instance_id", "model_key", "gpu_id", "num_bytes", "grace_s", "host_id", "reason")


class Control(ControlPlane):
    """The simulator's control plane with instant delivery; the script plays agents and routers."""

    def __init__(self) -> None:
        super().__init__(PolicyNames(), PARAMS, Kernel(BEGAN_S))
        self.lines: list[str] = []
        self.loads: dict[str, ModelLoad] = {}
        self.on_decision.append(lambda d: self._say(f"decide {d.kind} ({d.policy}): {d.reason}"))

    @property
    def now_s(self) -> float:
        return self.kernel.now_s

    def run(self, command: str) -> list[str]:
        verb, *words = command.split()
        act: Callable[..., None] = getattr(self, f"do_{verb}")
        self.lines = []
        act(*words)
        return self.lines or ["nothing"]

    def do_model(self, name: str, mib: str, *fields: str) -> None:
        model = a_model(name, mib=int(mib), **{key: _value(value) for key, value in (f.split("=") for f in fields)})
        self.tables["models"][model.key] = model
        for service in DECIDING:
            known = dict(self.tables["models"])
            self.execute(service, self.services[service].restore("models", known, self.now_s), None)

    def do_node(self, name: str, *mib: str) -> None:
        self.tables["nodes"][name] = a_node(name, gpus_mib=tuple(int(m) for m in mib), abilities=("emulated:adapters",))
        self._beat(name)

    def do_waiting(self, model: str, count: str) -> None:
        waiting = facts.RequestWaiting(
            model_key=model, request_id="r-1", router_id="router-1", num_waiting=int(count),
            waiting_since=self.now_s, deadline_at=self.now_s + 60,
        )  # fmt: skip
        self._publish(waiting)

    def do_load(self, model: str, waiting: str, running: str) -> None:
        self.loads[model] = ModelLoad(num_waiting=int(waiting), num_in_flight=int(running), last_active_at=self.now_s)
        self._publish(facts.RouterLoadReported(router_id="router-1", loads=dict(self.loads)))

    def do_state(self, instance_id: str, state: str) -> None:
        instances = self.tables["instances"]
        old = instances.get(instance_id)
        if old is None:
            return self._say(f"there is no {instance_id}, only {', '.join(instances)}")
        new = replace(old, state=InstanceState(state), changed_at=self.now_s, revision=old.revision + 1)
        if new.state is InstanceState.READY:
            new = replace(new, ready_at=self.now_s)
        instances[instance_id] = new
        self._beat(new.node_id)
        self._publish(getattr(facts, f"Instance{new.state.name.title()}")(instance=new))

    def do_after(self, seconds: str) -> None:
        for _ in range(round(float(seconds) / TICK_S)):
            self.kernel.run(self.now_s + TICK_S)
            for name in self.tables["nodes"]:
                self._beat(name)
            self._publish(facts.RouterLoadReported(router_id="router-1", loads=dict(self.loads)))
            for service in DECIDING:
                self.give(service, Tick())

    def do_operator(self, verb: str, key: str) -> None:
        asked = {
            "load": operator.Load(key), "unload": operator.Unload(key), "drain": operator.Suspend(key),
            "pin": operator.Pin(key, True), "unpin": operator.Pin(key, False), "remove": operator.Undeploy(key),
        }  # fmt: skip
        self.give("autoscaler", asked[verb])

    def do_node_drain(self, name: str) -> None:
        self.give("placer", Cordon(name, True))

    def do_node_undrain(self, name: str) -> None:
        self.give("placer", Cordon(name, False))

    def _beat(self, name: str) -> None:
        node: Node = self.tables["nodes"][name]
        gpus = tuple(replace(gpu, grants=self._grants(gpu)) for gpu in node.gpus)
        node = replace(node, gpus=gpus, heartbeat_at=self.now_s, revision=node.revision + 1)
        self.tables["nodes"][name] = node
        self._publish(facts.NodeBeat(node=node))

    def _grants(self, gpu: Gpu) -> tuple[Grant, ...]:
        here = [i for i in self.tables["instances"].values() if i.gpu_id == gpu.gpu_id and not i.state.is_gone]
        return tuple(
            Grant(holder=i.instance_id, owner=GrantOwner.WEIGHTS, num_bytes=i.workers[0].num_bytes) for i in here
        )

    def publish(self, name: str, payload: Any, cause: Event | None) -> None:
        self._say(f"{payload.TYPE} {_words(payload)}")
        self._publish(payload, name)

    def _publish(self, payload: Any, name: str = "script") -> None:
        if isinstance(payload, StartInstance):
            self.tables["instances"][payload.instance_id] = Instance(
                instance_id=payload.instance_id,
                model_key=payload.model.key,
                engine=payload.model.engine,
                state=InstanceState.STARTING,
                workers=payload.workers,
                max_concurrency=payload.model.max_concurrency,
                created_at=self.now_s,
                host_id=payload.host_id,
                adapter_slots=payload.adapter_slots,
                adapter_rank=payload.adapter_rank,
            )
        event = self.event(name, payload, None)
        for reader in self.readers_of(payload):
            if reader in self.services:
                self.give(reader, event)

    def _say(self, line: str) -> None:
        self.lines.append(f"{self.now_s - BEGAN_S:6.1f}  {line}")


def _value(text: str) -> float | int | str:
    if not text.replace(".", "").lstrip("-").isdecimal():
        return text
    return float(text) if "." in text else int(text)


def _words(payload: Any) -> str:
    source = getattr(payload, "instance", payload)
    shown = {name: getattr(source, name) for name in SHOWN if getattr(source, name, "") not in ("", "any")}
    if isinstance(payload, PlaceInstance | StartInstance):
        shown["model"] = payload.model.key
    if isinstance(payload, StartInstance):
        shown |= {"gpu_id": payload.workers[0].gpu_id, "mib": payload.workers[0].num_bytes // MIB}
        shown |= {"adapter_slots": payload.adapter_slots} if payload.adapter_slots else {}
    return " ".join(f"{name}={value!r}" if " " in str(value) else f"{name}={value}" for name, value in shown.items())


def played(script: str) -> str:
    """Return the script with current traces; its blocks are commands, `----`, trace, empty line."""
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
