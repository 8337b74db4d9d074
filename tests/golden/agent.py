"""Words of the agent's scripts.

gpus COUNT BYTES [KIND]                   of the node
engine NAME FIELD=VALUE ...               of EngineKind
agent.start ID MODEL [on=GPU:BYTES,...]   on GPU 0, unless it says where
starting, loading, ready, replica ID MODEL ... [shared=BYTES]
                                          its start, as far as that; its trace is in start.txt
arriving ID MODEL ...                     its engine loads weights that arrive
pipeline ID MODEL ...                     the first of two stages serves; the other is on node-2
asleep ID STATE [BYTES]                   a drain without requests into this; it keeps these bytes of its GPU
living                                    how many are not known to be gone, and if ticks may be rare
restart [ID ...] [gpus=COUNTxBYTES]       the agent is killed; these engines live on
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

from glowplug.controllers.agent import messages as msg
from glowplug.controllers.agent.controller import AgentController
from glowplug.controllers.agent.params import AgentParams, EngineKind
from glowplug.domain.hardware import Gpu
from glowplug.memory.ledger import ByteLedger
from tests.golden import one
from tests.golden.one import NODE


class Script(one.Script):
    begin_s: ClassVar[float] = 100.0
    stimuli: ClassVar[Sequence[Any]] = (msg,)
    GIVEN: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "StartInstance": {"target": NODE, "decision_id": "d"},
        "StopInstance": {"target": NODE, "reason": "idle"},
        "ResumeInstance": {"target": NODE, "reason": "wanted"},
        "JoinStages": {"target": NODE},
        "ConsolidateInstance": {"target": NODE, "reason": "quiet"},
    }

    def __init__(self, declarations: Iterable[str]) -> None:
        self.engines: dict[str, EngineKind] = {}
        super().__init__(declarations)

    def declare_gpus(self, count: str, num_bytes: str, kind: str = "host") -> None:
        self.gpus = [Gpu(gpu_id=f"{NODE}/{n}", total_bytes=int(num_bytes), kind=kind) for n in range(int(count))]

    def declare_engine(self, name: str, *words: str) -> None:
        self.engines[name] = self.built(EngineKind, words, self.engines.get(name, {"name": name}))

    def make(self, memory: msg.AgentMemory | None = None) -> AgentController:
        params = self.built(AgentParams, self.params)
        ledger = ByteLedger(self.gpus)
        return AgentController(NODE, ledger, self.engines, params=params, memory=memory, agent_url="http://agent")

    def built(self, cls: type[Any], words: Sequence[str], given: Any = None) -> Any:
        if cls.__name__ == "StartInstance":
            places = [word.removeprefix("on=") for word in words if word.startswith("on=")]
            words = [*(word for word in words if not word.startswith("on=")), f"workers={[*places, '0'][0]}"]
        return super().built(cls, words, given)

    def do_starting(self, instance_id: str, *words: str) -> None:
        self.event("agent.start", instance_id, *words)
        self._is(instance_id)

    def do_loading(self, instance_id: str, *words: str) -> None:
        self.event("agent.start", instance_id, *words)
        self.plane.give(msg.EngineLaunched(instance_id))
        self.plane.give(msg.WeightsComplete(instance_id, "/w"))
        self._is(instance_id)

    def do_ready(self, instance_id: str, *words: str) -> None:
        shared = self._loading(instance_id, words)
        self.plane.give(self.built(msg.EngineReady, [instance_id, "http://e", *shared]))
        self._is(instance_id)

    def do_replica(self, instance_id: str, *words: str) -> None:
        shared = self._loading(instance_id, [*words, "replica=true"])
        self.plane.give(self.built(msg.EnginePrewarmed, [instance_id, *shared]))
        self._is(instance_id)

    def do_arriving(self, instance_id: str, *words: str) -> None:
        self.event("agent.start", instance_id, *words)
        self.plane.give(msg.EngineLaunched(instance_id))
        self.plane.give(msg.WeightsArriving(instance_id, "/w"))
        self._is(instance_id)

    def do_pipeline(self, instance_id: str, *words: str) -> None:
        self.do_loading(instance_id, *words, "num_stages=2", "on=0:100,node-2/0:100")
        self.plane.give(msg.EngineReady(instance_id, "http://e"))
        self.event("agent.join", instance_id)
        self.plane.give(msg.EngineReady(instance_id, "http://e"))
        self._is(instance_id)

    def do_asleep(self, instance_id: str, becomes: str, num_bytes: str = "-1") -> None:
        self.event("agent.stop", instance_id, f"becomes={becomes}")
        self.plane.now_s += 1
        self.plane.give(msg.InFlight(instance_id, 0))
        self.plane.give(msg.EngineAsleep(instance_id, int(num_bytes)))
        self._is(instance_id)

    def do_living(self) -> None:
        agent = self.plane.controller
        self.plane.say(f"{agent.num_living} living{', quiet' * agent.is_quiet}{', stopping' * agent.is_stopping}")

    def do_restart(self, *words: str) -> None:
        """The next process has the memory that was stored last."""
        gpus = next((word.removeprefix("gpus=").split("x") for word in words if word.startswith("gpus=")), None)
        if gpus is not None:
            self.declare_gpus(*gpus)
        self.plane.replaced_by(self.make(self.plane.last[msg.Remember].memory))
        self.plane.give(msg.Recalled(frozenset(word for word in words if "=" not in word)))

    def _loading(self, instance_id: str, words: Sequence[str]) -> list[str]:
        self.do_loading(instance_id, *(word for word in words if not word.startswith("shared=")))
        return [word.replace("shared=", "figures.shared_bytes=") for word in words if word.startswith("shared=")]

    def _is(self, instance_id: str) -> None:
        """Say how it has ended in place of the trace."""
        gpus = " ".join(map(self.plane.text, self.plane.controller.ledger.gpus))
        self.plane.lines.clear()
        self.plane.say(f"{instance_id} is {self.plane.controller.holdings[instance_id].instance.state}, {gpus}")
