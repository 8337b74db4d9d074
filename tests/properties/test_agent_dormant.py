"""Replicas, sleepers, pipelines and shrinking KV caches, in whatever order: bytes are conserved and nobody's are lost.

A seeded walk sends commands (twice, late, for things that are gone) and is the engines: it knows which processes really
run, under which id, and what each has in its KV cache. The walks are biased: a state machine of hypothesis hardly ever
reaches a pipeline that consolidates or a replica that hands over its start.
"""

from collections import Counter
from dataclasses import replace
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from glowplug.controllers.agent import messages as aw
from glowplug.controllers.agent.controller import AgentController
from glowplug.controllers.effects import Save, Tick
from glowplug.domain.hardware import Gpu, GrantOwner
from glowplug.domain.instance import Instance, InstanceState, Worker
from glowplug.events.commands import ConsolidateInstance, JoinStages, ResumeInstance, StartInstance, StopInstance
from glowplug.memory.ledger import ByteLedger
from tests.agent_steps import CheckedAgent
from tests.fleet_builder import MIB, a_model, an_event

NODE, NUM_GPUS, GPU_BYTES, NUM_STEPS = "node-1", 2, 400 * MIB, 250
PARAMS = aw.AgentParams(
    start_deadline_s=20,
    keep_gone_s=60,
    stop_retry_s=2,
    max_tick_gap_s=1000,
    reservation="paper",
    reservation_step_bytes=1,
    swap_host_bytes=200 * MIB,
    consolidate_deadline_s=1,
    consolidate_retry_s=1,
)
ABILITIES = frozenset({"prewarm", "swap", "stages"})
ENGINES = {"emulated": aw.EngineKind(name="emulated", emulated=True, abilities=ABILITIES)}
ONE = a_model("one", weights_bytes=60 * MIB, kv_bytes=100 * MIB, max_concurrency=8)
PAIR = replace(a_model("pair", weights_bytes=130 * MIB, kv_bytes=201 * MIB, max_concurrency=4), num_gpus=2)
BECOMES = ("stopped", "prewarmed", "prewarmed", "swapped_out", "swapped_out")
LEGAL = {
    "starting": {"starting", "loading", "draining", "stopped", "failed"},
    "loading": {"loading", "starting", "ready", "prewarmed", "draining", "stopped", "failed"},
    "ready": {"ready", "draining", "failed"},
    "draining": {"draining", "ready", "prewarmed", "swapped_out", "stopped", "failed"},
    "prewarmed": {"prewarmed", "stopped", "failed"},
    "swapped_out": {"swapped_out", "stopped", "failed"},
    "stopped": {"stopped"},
    "failed": {"failed"},
}


class Walk:
    """One agent and its engines. `seen` counts the effects and states of the whole walk."""

    def __init__(self, seed: int) -> None:
        self.random, self.now_s, self.num_ids = Random(seed), 1000.0, 0
        self.processes: set[str] = set()
        self.pending: dict[tuple[str, str], Any] = {}  # (kind, engine id) -> the effect that is not answered yet
        self.kv_used: dict[str, int] = {}
        self.last: dict[str, Instance] = {}
        self.memory: aw.AgentMemory | None = None
        self.seen: Counter[str] = Counter()
        self.agent = self.new_agent()

    def new_agent(self) -> AgentController:
        ledger = ByteLedger([Gpu(gpu_id=f"{NODE}/{n}", total_bytes=GPU_BYTES) for n in range(NUM_GPUS)])
        return CheckedAgent(NODE, ledger, ENGINES, params=PARAMS, memory=self.memory)

    def tell(self, stimulus: Any, after_s: float = 0.1) -> None:
        self.now_s += after_s
        for effect in self.agent.handle(stimulus, self.now_s):
            self.seen[type(effect).__name__] += 1
            self.perform(effect)
        check(self)

    def perform(self, effect: Any) -> None:
        match effect:
            case aw.Remember(memory):
                self.memory = memory
            case aw.LaunchEngine(instance_id=i):
                assert i not in self.processes, "launched twice"
                assert i in self.agent.ledger.holders, "launched without a grant"
                self.processes.add(i)
                self.pending["launch", i] = effect
            case aw.ActivateEngine(instance_id=i, source=source):
                assert i in self.agent.ledger.holders, "activated without a grant"
                assert i not in self.processes, "two engines of one id"
                self.forget(source)
                if source in self.processes:
                    self.processes.remove(source)
                    self.processes.add(i)
                self.pending["activate", i] = effect
            case aw.LimitKv(instance_id=i, num_bytes=num_bytes):
                assert num_bytes >= self.kv_used.get(i, 0), "a KV cache was cut below what is used"
            case aw.StopEngine(instance_id=i):
                self.forget(i)
                self.pending["stop", i] = effect
            case aw.ConsolidateEngine(instance_id=i):
                assert ("ConsolidateEngine", i) not in self.pending, "asked anew before the last time has ended"
                self.pending["ConsolidateEngine", i] = effect
            case aw.AwaitWeights() | aw.LoadEngine() | aw.ServeStages() | aw.SleepEngine() | aw.AbandonConsolidation():
                self.pending[type(effect).__name__, effect.instance_id] = effect
            case Save(table="instances", value=instance):
                before = self.last.get(instance.instance_id)
                if before is not None and instance.revision > before.revision:
                    assert instance.state.value in LEGAL[before.state], f"{before.state} -> {instance.state}"
                self.last[instance.instance_id] = instance
                self.seen[instance.state.value] += 1

    def forget(self, i: str) -> None:
        """Give up whatever is under way for one engine."""
        for key in [k for k in self.pending if k[1] == i]:
            del self.pending[key]

    def some_id(self) -> str:
        """One of old, or one that is to come."""
        return f"i-{self.random.randrange(self.num_ids + 2)}"

    def new_id(self) -> str:
        """A fresh one, or now and then one that was started before, or stopped before it came."""
        if self.random.random() < 0.2:
            return self.some_id()
        self.num_ids += 1
        return f"i-{self.num_ids}"

    def some(self, *states: InstanceState) -> str:
        """An instance in one of the states, if there is any, else just some id."""
        there = sorted(i.instance_id for i in self.agent.instances if i.state in states)
        return self.random.choice(there) if there and self.random.random() < 0.9 else self.some_id()

    # what commanders do

    def start(self) -> None:
        kind = self.random.choice(("plain", "replica", "replica", "first", "later", "grow", "grow", "grow"))
        i, source, model = self.new_id(), "", self.random.choice((ONE, ONE, PAIR))
        gpus: tuple[str, ...] = (f"{NODE}/0", f"{NODE}/1") if model is PAIR else (f"{NODE}/{self.random.randrange(2)}",)
        if kind == "grow":
            dormant = (
                InstanceState.PREWARMED,
                InstanceState.SWAPPED_OUT,
                InstanceState.STARTING,
                InstanceState.LOADING,
            )
            source = self.some(*dormant)
            if (found := self.agent.holdings.get(source)) is not None:
                model, gpus = found.model, tuple(w.gpu_id for w in found.instance.workers if w.node_id == NODE)
        own = tuple(
            Worker(worker_id=f"{i}-{n}", node_id=NODE, gpu_id=gpu, num_bytes=0, rank=n) for n, gpu in enumerate(gpus)
        )
        far = tuple(replace(w, node_id="node-2", gpu_id="node-2/0") for w in own) if kind == "first" else ()
        replicas = [*sorted(r.instance_id for r in self.agent.instances if r.replica), self.some_id()]
        self.order(
            StartInstance(
                target=NODE,
                instance_id=i,
                model=model,
                workers=own + far,
                decision_id="d",
                source=source,
                drops=tuple(r for r in replicas if self.random.random() < 0.4),
                replica=kind == "replica",
                part_of="p-1" if kind == "later" else "",
                num_stages=2 if kind in ("first", "later") else 1,
                stage=int(kind == "later"),
            )
        )

    def stop(self) -> None:
        i = self.some(InstanceState.READY, InstanceState.READY, InstanceState.DRAINING, *InstanceState)
        grace_s, becomes = self.random.choice((0.0, 1.0, 30.0, 30.0)), self.random.choice(BECOMES)
        self.order(StopInstance(target=NODE, instance_id=i, reason="r", grace_s=grace_s, becomes=becomes))

    def resume(self) -> None:
        self.order(ResumeInstance(target=NODE, instance_id=self.some(InstanceState.DRAINING), reason="r"))

    def join(self) -> None:
        self.order(JoinStages(target=NODE, instance_id=self.some(InstanceState.STARTING, InstanceState.LOADING)))

    def consolidate(self) -> None:
        staged = sorted(i.instance_id for i in self.agent.instances if not i.is_whole) or [self.some_id()]
        self.order(ConsolidateInstance(target=NODE, instance_id=self.random.choice(staged), reason="r"))

    def order(self, command: Any) -> None:
        event = an_event(command, issuer="placer-1")
        for _ in range(self.random.choice((1, 1, 1, 2))):
            self.tell(event)

    # what engines and time do

    def answer(self) -> None:
        """A consolidation often takes long."""
        keys = [k for k in sorted(self.pending) if k[0] != "ConsolidateEngine" or self.random.random() < 0.15]
        if keys:
            self.settle(self.random.choice(keys), ok=self.random.random() < 0.93)

    def settle(self, key: tuple[str, str], ok: bool) -> None:
        """One thing that was asked comes to its end, well or not."""
        kind, i = key
        del self.pending[key]
        failed = aw.EngineStartFailed(i, "engine_failed", "broken")
        if kind == "stop":
            if ok:
                self.end(i)
            self.tell(aw.EngineGone(i, clean=ok))
        elif kind == "SleepEngine":
            self.kv_used.pop(i, None)
            if not ok:
                self.end(i)
            self.tell(aw.EngineAsleep(i) if ok else aw.EngineGone(i))
        elif kind == "launch":
            self.tell(aw.EngineLaunched(i) if ok else failed)
        elif kind == "AwaitWeights":
            self.tell(aw.WeightsComplete(i, "/w") if ok else aw.WeightsFailed(i, "weights_unavailable", "gone"))
        elif kind == "ConsolidateEngine":
            broken = self.random.choice((aw.EngineExited(i, "killed"), aw.ConsolidationFailed(i, "broken")))
            self.tell(aw.EngineConsolidated(i) if ok else broken)
        elif kind == "AbandonConsolidation":
            self.pending.pop(("ConsolidateEngine", i), None)
            if i in self.processes and not self.last[i].is_whole:
                self.tell(aw.ConsolidationFailed(i, "given up"))
        elif not ok or i not in self.processes:
            self.tell(failed)
        elif kind == "LoadEngine" and self.last[i].replica:
            self.tell(aw.EnginePrewarmed(i))
        else:
            self.tell(aw.EngineReady(i, "http://e"))

    def end(self, i: str) -> None:
        self.processes.discard(i)
        self.kv_used.pop(i, None)

    def die(self) -> None:
        if self.processes and self.random.random() < 0.1:
            i = self.random.choice(sorted(self.processes))
            self.end(i)
            stop = self.pending.get(("stop", i))
            self.forget(i)
            if stop is not None:
                self.pending["stop", i] = stop
            self.tell(aw.EngineExited(i, "killed"))

    def count(self) -> None:
        """An engine fills at most what it holds."""
        i = self.some(InstanceState.DRAINING)
        if i not in self.processes or self.last[i].state not in (InstanceState.READY, InstanceState.DRAINING):
            return
        grants = [g for gpu in self.agent.ledger.gpus for g in gpu.grants if g.holder == i]
        held = sum(g.num_bytes for g in grants if g.owner is GrantOwner.KV)
        num_in_flight = self.random.randrange(6)
        self.kv_used[i] = int(held * self.random.random()) if num_in_flight else 0
        self.tell(aw.InFlight(i, num_in_flight, self.kv_used[i]), 0.4)

    def tick(self) -> None:
        self.tell(Tick(), self.random.choice((0.2, 0.2, 1.0, 5.0, 30.0)))

    def kill_9(self) -> None:
        """The agent dies; so do some of its engines. Everything it had under way is lost."""
        if self.random.random() < 0.1:
            self.processes = {i for i in sorted(self.processes) if self.random.random() < 0.7}
            self.kv_used = {i: n for i, n in self.kv_used.items() if i in self.processes}
            self.pending.clear()
            self.agent = self.new_agent()
            self.tell(aw.Recalled(frozenset(self.processes)))

    def run(self) -> None:
        verbs = [self.start, self.stop, self.resume, self.join, self.consolidate, self.consolidate]
        verbs += [self.answer] * 12 + [self.start] * 3 + [self.count] * 2 + [self.die, self.tick, self.kill_9]
        for _ in range(NUM_STEPS):
            self.random.choice(verbs)()

    def rest(self) -> None:
        """Left alone with engines that answer and stops that work, everything comes to rest."""
        for _ in range(80):
            for key in sorted(k for k in self.pending if k[0] in ("stop", "SleepEngine")):
                if key in self.pending:
                    self.settle(key, ok=True)
            self.tell(Tick(), 1.0)
        for i, holding in self.agent.holdings.items():
            state = holding.instance.state
            assert state is InstanceState.READY or state.is_gone or state.is_dormant, f"{i} is left {state}"
            assert holding.stop is None and not holding.engine_id
        dormant = {i for i, h in self.agent.holdings.items() if not h.instance.state.is_gone}
        assert self.processes == dormant, "engines nobody knows, or instances without an engine"


def check(walk: Walk) -> None:
    """What holds after every stimulus."""
    agent, holdings = walk.agent, walk.agent.holdings
    for gpu in agent.ledger.gpus:
        assert 0 <= gpu.used_bytes <= gpu.total_bytes
        held = {(g.holder, g.owner) for g in gpu.grants}
        for holder, owner in held:
            state = holdings[holder].instance.state
            assert not state.is_gone or (state is InstanceState.FAILED and holdings[holder].stop is not None)
            assert state is not InstanceState.SWAPPED_OUT
            assert (owner is GrantOwner.PREWARM) == holdings[holder].instance.replica
    for (kind, i), effect in walk.pending.items():
        if kind == "ConsolidateEngine" and i in walk.processes and i in holdings:
            held_bytes = sum(g.num_bytes for gpu in agent.ledger.gpus for g in gpu.grants if g.holder == i)
            assert held_bytes >= effect.model.memory_bytes, "an engine that may become whole has not got the bytes"
    known = {h.engine for h in holdings.values() if h.shares or h.stop is not None}
    known |= {i for i, h in holdings.items() if h.instance.state is InstanceState.SWAPPED_OUT}
    assert walk.processes <= known, "an engine has neither bytes nor an end"
    assert sum(h.snapshot_bytes for h in holdings.values()) <= PARAMS.swap_host_bytes


@pytest.mark.timeout(300)
@settings(max_examples=120)
@given(seed=st.integers(0, 1 << 32))
def test_bytes_are_conserved_whatever_comes_in_whatever_order(seed: int) -> None:
    walk = Walk(seed)
    walk.run()
    walk.rest()
    check(walk)


def test_the_walks_go_everywhere() -> None:
    """Else the property above would hold of nothing."""
    seen: Counter[str] = Counter()
    for seed in range(80):
        walk = Walk(seed)
        walk.run()
        seen += walk.seen
    names = ("ActivateEngine", "SleepEngine", "LimitKv", "ServeStages", "prewarmed", "swapped_out")
    names += ("ConsolidateEngine", "AbandonConsolidation")
    assert not {name: seen[name] for name in names if seen[name] < 15}
