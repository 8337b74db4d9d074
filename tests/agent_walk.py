"""The common part of seeded walks of an agent's controller."""

from dataclasses import replace
from random import Random
from typing import Any, ClassVar

from glowplug.controllers.agent import messages as msg
from glowplug.controllers.agent.controller import AgentController
from glowplug.controllers.agent.params import AgentParams
from glowplug.domain.model import Model
from glowplug.events.envelope import Event
from tests.agent_steps import make, start, workers
from tests.fleet_builder import MIB, a_model

PARAMS = AgentParams(
    start_deadline_s=20,
    keep_gone_s=60,
    stop_retry_s=2,
    reservation="paper",
    reservation_step_bytes=1,
    swap_host_bytes=200 * MIB,
    consolidate_deadline_s=1,
    consolidate_retry_s=1,
)
ONE = a_model("one", weights_bytes=60 * MIB, kv_bytes=100 * MIB, max_concurrency=8)
PAIR = replace(a_model("pair", weights_bytes=130 * MIB, kv_bytes=201 * MIB, max_concurrency=4), num_gpus=2)


class Walk:
    params: ClassVar[AgentParams] = PARAMS
    mib: ClassVar[int] = 400

    def __init__(self, seed: int) -> None:
        self.streams = seed % 3 == 0  # its engines load weights as they arrive
        self.random, self.now_s, self.num_ids = Random(seed), 1000.0, 0
        self.memory: msg.AgentMemory | None = None
        self.agent = self.new_agent()

    def new_agent(self) -> AgentController:
        return make(
            self.memory,
            mib=self.mib,
            gpus=2,
            abilities=("prewarm", "swap", "stages", *(("stream",) if self.streams else ())),
            params=self.params,
            gpu_kind="emulated",
            refuses=True,
        )

    def start_of(self, kind: str, instance_id: str, model: Model, gpus: tuple[int, ...], **fields: Any) -> Event:
        own = workers(instance_id, *gpus)
        far = tuple(replace(w, node_id="node-2", gpu_id="node-2/0") for w in own) if kind == "first" else ()
        return start(
            instance_id,
            model=model,
            workers=fields.pop("workers", own + far),
            replica=kind == "replica",
            part_of="p-1" if kind == "later" else "",
            num_stages=2 if kind in ("first", "later") else 1,
            stage=int(kind == "later"),
            **fields,
        )
