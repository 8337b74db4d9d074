"""Replicas, sleepers and draining engines of one agent's controller, in short words."""

from dataclasses import replace
from typing import Any

from glowplug.controllers.agent.controller import AgentController
from glowplug.controllers.agent.messages import (
    EnginePrewarmed,
    EngineReady,
    InFlight,
    Recalled,
)
from tests.agent_steps import PARAMS, halves, instance, make, start, stop
from tests.fleet_builder import MIB, a_model

MODEL = a_model(weights_bytes=60 * MIB, kv_bytes=180 * MIB)  # 240 of a GPU's 300
ALL = ("prewarm", "swap")
EQ1 = replace(PARAMS, reservation="paper", reservation_step_bytes=1)
WIDE = replace(MODEL, kv_bytes=160 * MIB, max_concurrency=32)  # M = 160 MiB, M/C = 5 MiB


def start_of(instance_id: str, **fields: Any) -> Any:
    """A start on GPU 0 whose worker names no bytes."""
    (worker,) = start(instance_id).data.workers
    given: dict[str, Any] = {"model": MODEL, "workers": (replace(worker, num_bytes=0),)}
    return start(instance_id, **(given | fields))


def replica(agent: AgentController, instance_id: str, now_s: float = 10.0, **fields: Any) -> AgentController:
    """A replica through its whole start."""
    agent.handle(start_of(instance_id, replica=True, **fields), now_s)
    halves(agent, instance_id, now_s)
    agent.handle(EnginePrewarmed(instance_id), now_s + 1)
    return agent


def serving(agent: AgentController, instance_id: str = "i-1", now_s: float = 10.0, model: Any = MODEL) -> Any:
    """An instance of `model`, READY a second after `now_s`."""
    agent.handle(start_of(instance_id, model=model), now_s)
    halves(agent, instance_id, now_s)
    agent.handle(EngineReady(instance_id, "http://e"), now_s + 1)
    return agent


def state(agent: AgentController, instance_id: str) -> str:
    return instance(agent, instance_id).state.value


def on_gpu(gpu: int) -> Any:
    """The worker of i-1, on that GPU."""
    (worker,) = start("i-1").data.workers
    return (replace(worker, gpu_id=worker.gpu_id.replace("/0", f"/{gpu}"), num_bytes=0),)


def drained(agent: AgentController, becomes: str, now_s: float = 20.0) -> list[Any]:
    """i-1 has nothing left to run."""
    agent.handle(stop(becomes=becomes), now_s)
    return agent.handle(InFlight("i-1", 0), now_s + 1)


def draining(agent: AgentController) -> AgentController:
    """i-1 of WIDE has been told to drain."""
    serving(agent, model=WIDE)
    agent.handle(stop(becomes="prewarmed"), 20.0)
    return agent


def again(agent: AgentController, living: set[str], **fields: Any) -> tuple[AgentController, list[Any]]:
    reborn = make(agent.memory(), abilities=ALL, **fields)
    return reborn, reborn.handle(Recalled(frozenset(living)), 50.0)
