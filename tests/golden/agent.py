"""Words of the agent's scripts.

gpus COUNT BYTES [KIND]                   of the node
engine NAME FIELD=VALUE ...               of EngineKind
agent.start ID MODEL [on=GPU:BYTES,...]   on GPU 0 with the model's bytes, unless it says where
restart [ID ...]                          the agent is killed; these engines live on
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

from glowplug.controllers.agent import messages
from glowplug.controllers.agent.controller import AgentController
from glowplug.controllers.agent.params import AgentParams, EngineKind
from glowplug.domain.hardware import Gpu
from glowplug.domain.instance import Worker
from glowplug.memory.ledger import ByteLedger
from tests.golden import one
from tests.golden.one import NODE


class Script(one.Script):
    begin_s: ClassVar[float] = 100.0
    stimuli: ClassVar[Sequence[Any]] = (messages,)
    GIVEN: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "StartInstance": {"target": NODE, "decision_id": "d", "workers": ()},
        "StopInstance": {"target": NODE, "reason": "idle"},
        "ResumeInstance": {"target": NODE, "reason": "wanted"},
        "JoinStages": {"target": NODE},
        "ConsolidateInstance": {"target": NODE, "reason": "load"},
    }

    def declare_gpus(self, count: str, num_bytes: str, kind: str = "host") -> None:
        self.gpus = [Gpu(gpu_id=f"{NODE}/{n}", total_bytes=int(num_bytes), kind=kind) for n in range(int(count))]

    def declare_engine(self, name: str, *words: str) -> None:
        self.engines = getattr(self, "engines", {}) | {name: self.built(EngineKind, words, {"name": name})}

    def make(self, memory: messages.AgentMemory | None = None) -> AgentController:
        params = self.built(AgentParams, self.params)
        return AgentController(
            NODE, ByteLedger(self.gpus), self.engines, params=params, memory=memory, agent_url="http://agent"
        )

    def built(self, cls: type[Any], words: Sequence[str], given: Any = None) -> Any:
        if cls.__name__ == "StartInstance":
            words = [word.replace("on=", "workers=", 1) if word.startswith("on=") else word for word in words]
            command = super().built(cls, words, given)
            workers = command.workers or self.workers(command.instance_id, "0")
            return replace(command, workers=tuple(_sized(one, command.model.memory_bytes) for one in workers))
        return super().built(cls, words, given)

    def do_restart(self, *living: str) -> None:
        """The next process has the last memory that was stored, and the store."""
        self.plane.replaced_by(self.make(self.plane.last[messages.Remember].memory))
        self.plane.give(messages.Recalled(frozenset(living)))


def _sized(worker: Worker, num_bytes: int) -> Worker:
    return worker if worker.num_bytes or worker.node_id != NODE else replace(worker, num_bytes=num_bytes)
