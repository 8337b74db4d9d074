"""Words of the autoscaler's scripts, beside a leader's.

policy NAME                               of the kind `scaling`, where it is not the union
nodes ID[:ABILITY,...] ...                the table of nodes, which is read then; abilities of the engine `emulated`
waits MODEL [NUM] [CLASS=NUM ...] [FIELD=VALUE ...]    requests wait at router-1 from now on
$ is the instance asked for last.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from glowplug.controllers import operator
from glowplug.controllers.autoscaler.controller import AutoscalerController
from glowplug.controllers.autoscaler.params import AutoscalerParams
from glowplug.controllers.autoscaler.reads import READS
from glowplug.controllers.reads import Reads
from glowplug.domain.access import Priority
from glowplug.domain.hardware import Gpu, Node
from glowplug.events.facts import RequestWaiting
from glowplug.policies.registry import choose
from glowplug.policies.systems import UNION
from tests.golden import leader


class Script(leader.Script):
    stimuli: ClassVar[Sequence[Any]] = (operator,)
    reads: ClassVar[Reads] = READS
    GIVEN: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "RequestWaiting": {"request_id": "r-1", "router_id": "router-1"},
    }
    policy = UNION.policies["scaling"]
    placed = ""

    def declare_policy(self, name: str) -> None:
        self.policy = name

    def make(self) -> AutoscalerController:
        params = AutoscalerParams(**UNION.params["autoscaler"])
        return AutoscalerController(
            choose("scaling", self.policy), self.policy, self.epoch, self.built(AutoscalerParams, self.params, params)
        )

    def run(self, command: str) -> list[str]:
        lines = super().run(command.replace("$", self.placed))
        found = [one[1] for line in lines if (one := re.search(r"placer\.place .*?(\w+-\d+-\w+) '", line))]
        self.placed = found[-1] if found else self.placed
        return lines

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


def _node(word: str) -> Node:
    node_id, _, abilities = word.partition(":")
    able = tuple(f"emulated:{one}" for one in abilities.split(",") if one)
    gpu = Gpu(gpu_id=f"{node_id}/0", total_bytes=1, kind="cuda")
    return Node(node_id=node_id, gpus=(gpu,), engines=("emulated",), abilities=able, agent_url="http://agent")
