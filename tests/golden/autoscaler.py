"""Words of the autoscaler's scripts.

policy NAME                               of the kind `scaling`, where it is not the union
nodes ID[:ABILITY,...] ...                the table of nodes, which is read then; abilities of the engine `emulated`
load ROUTER MODEL=RUNNING[+WAITING][:ID*NUM,...] ...   a report of all models, with the instances that are busy
waits MODEL [NUM] [CLASS=NUM ...] [FIELD=VALUE ...]    requests wait at router-1 from now on
model NAME FIELD=VALUE ...                another declaration, for `Deploy NAME`
late TABLE                                the controller reads a table as it was before the last command
restart, elect                            a new process reads the store; a standby takes over
$ is the instance asked for last. A row is created when it is first named, and READY since it is.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from glowplug.controllers import operator
from glowplug.controllers.autoscaler.controller import AutoscalerController
from glowplug.controllers.autoscaler.params import AutoscalerParams
from glowplug.controllers.autoscaler.reads import READS
from glowplug.domain.access import Priority
from glowplug.domain.hardware import Gpu, Node
from glowplug.domain.instance import Instance, InstanceState
from glowplug.events.facts import RequestWaiting
from glowplug.policies.registry import choose
from glowplug.policies.systems import UNION
from tests.golden import one
from tests.golden.loads import Loads


class Script(Loads, one.Script):
    begin_s: ClassVar[float] = 100.0
    stimuli: ClassVar[Sequence[Any]] = (operator,)
    GIVEN: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "RequestWaiting": {"request_id": "r-1", "router_id": "router-1"},
    }
    policy = UNION.policies["scaling"]
    epoch, placed = 1, ""

    def declare_policy(self, name: str) -> None:
        self.policy = name

    def make(self) -> AutoscalerController:
        params = AutoscalerParams(**UNION.params["autoscaler"])
        return AutoscalerController(
            choose("scaling", self.policy), self.policy, self.epoch, self.built(AutoscalerParams, self.params, params)
        )

    def begin(self) -> None:
        self.plane.restore("models")

    def run(self, command: str) -> list[str]:
        if not command.startswith("late "):
            self.earlier = {table: dict(rows) for table, rows in self.plane.store.items()}
        lines = super().run(command.replace("$", self.placed))
        found = [one[1] for line in lines if (one := re.search(r"placer\.place .*?(\w+-\d+-\w+) '", line))]
        self.placed = found[-1] if found else self.placed
        return lines

    def put(self, instance_id: str, state: InstanceState, words: Sequence[str]) -> Instance:
        now, before = self.plane.now_s, self.plane.store.get("instances", {}).get(instance_id)
        is_first = {
            "created_at": before is None,
            "ready_at": state is InstanceState.READY and (before is None or not before.ready_at),
        }
        given = [f"{name}={now}" for name, first in is_first.items() if first and not any(name in w for w in words)]
        words = [word for word in words if before is None or word != before.model_key]
        return super().put(instance_id, state, [*words, *given])

    def do_nodes(self, *words: str) -> None:
        self.plane.store["nodes"] = {node.node_id: node for node in map(_node, words)}
        self.plane.restore("nodes")

    def do_waits(self, model: str, *words: str) -> None:
        by_class = [word for word in words if word.partition("=")[0] in tuple(Priority)]
        given = self.GIVEN["RequestWaiting"] | {
            "model_key": model, "num_waiting": 1, "waiting_since": self.plane.now_s,
            "deadline_at": self.plane.now_s + 60.0,
            "by_class": {name: int(num) for name, _, num in (word.partition("=") for word in by_class)},
        }  # fmt: skip
        words = tuple(f"num_waiting={word}" if word.isdigit() else word for word in words if word not in by_class)
        fact = self.built(RequestWaiting, words, given)
        self.plane.event(fact, issuer=fact.router_id)

    def do_model(self, name: str, *words: str) -> None:
        self.declare_model(name, *words)

    def do_late(self, table: str) -> None:
        self.plane.restore(table, self.earlier[table])

    def do_restart(self) -> None:
        self.epoch += 1
        self.plane.replaced_by(self.make())
        self._read()

    def do_elect(self) -> None:
        self.epoch += 1
        successor = self.make()
        successor.inherit(self.plane.controller, self.plane.now_s)
        self.plane.replaced_by(successor)
        self._read()

    def _read(self) -> None:
        for table in READS.tables:
            self.plane.restore(table)


def _node(word: str) -> Node:
    node_id, _, abilities = word.partition(":")
    able = tuple(f"emulated:{one}" for one in abilities.split(",") if one)
    gpu = Gpu(gpu_id=f"{node_id}/0", total_bytes=1, kind="cuda")
    return Node(node_id=node_id, gpus=(gpu,), engines=("emulated",), abilities=able, agent_url="http://agent")
