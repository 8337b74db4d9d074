"""Whatever arrives, in any order: no GPU is overbooked, no engine runs without its bytes, and every start ends.

A seeded walk sends one agent commands. It is biased: a hypothesis state machine hardly ever reaches a consolidating
pipeline or a replica whose start is taken over. test_agent_table.py adds unexpected outcomes.
"""

from collections import Counter
from typing import Any

import pytest

from glowplug.controllers.agent import messages as msg
from glowplug.controllers.agent.drains import promised
from glowplug.controllers.effects import Remove, Save, Tick
from glowplug.domain.errors import StaleEpoch
from glowplug.domain.hardware import GrantOwner
from glowplug.domain.instance import Instance, InstanceState
from glowplug.events.commands import ConsolidateInstance, JoinStages, ResumeInstance, StartInstance, StopInstance
from tests.agent_steps import NODE, workers
from tests.agent_walk import ONE, PAIR, PARAMS, Walk
from tests.fleet_builder import MIB, an_event

BECOMES = ("stopped", "prewarmed", "prewarmed", "swapped_out", "swapped_out")
LEGAL = {
    "starting": {"starting", "loading", "ready", "prewarmed", "draining", "stopped", "failed"},
    "loading": {"loading", "starting", "ready", "prewarmed", "draining", "stopped", "failed"},
    "ready": {"ready", "draining", "failed"},
    "draining": {"draining", "ready", "prewarmed", "swapped_out", "stopped", "failed"},
    "prewarmed": {"prewarmed", "stopped", "failed"},
    "swapped_out": {"swapped_out", "stopped", "failed"},
    "stopped": {"stopped"},
    "failed": {"failed"},
}

NUM_WALKS = 40
ASKED = (msg.AwaitWeights, msg.ServeStages, msg.SleepEngine, msg.AbandonConsolidation, msg.FinishStages)


class EnginesWalk(Walk):
    """The walk also plays the engines. `seen` counts its effects and states."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.epoch = 1
        self.processes: set[str] = set()
        self.pending: dict[tuple[str, str], Any] = {}  # (kind, engine id) -> unanswered effect
        self.kv_used: dict[str, int] = {}
        self.last: dict[str, Instance] = {}
        self.seen: Counter[str] = Counter()

    def tell(self, stimulus: Any, after_s: float = 0.1) -> None:
        self.now_s += after_s
        before = dict(self.agent.holdings), self.agent.ledger.gpus
        try:
            effects = self.agent.handle(stimulus, self.now_s)
        except StaleEpoch:
            assert before == (self.agent.holdings, self.agent.ledger.gpus), "a refused stimulus has changed something"
            self.seen["StaleEpoch"] += 1
            return
        for effect in effects:
            self.seen[type(effect).__name__] += 1
            self.perform(effect)
        self.check()

    def perform(self, effect: Any) -> None:
        match effect:
            case msg.Remember(memory):
                self.memory = memory
            case msg.LaunchEngine(instance_id=i):
                assert i not in self.processes, "launched twice"
                assert i in self.agent.ledger.holders, "launched without a grant"
                self.processes.add(i)
                self.pending["launch", i] = effect
            case msg.ActivateEngine(command=StartInstance(instance_id=i, source=source)):
                assert i in self.agent.ledger.holders, "activated without a grant"
                assert i not in self.processes, "two engines of one id"
                self.forget(source)
                if source in self.processes:
                    self.processes.remove(source)
                    self.processes.add(i)
                self.pending["activate", i] = effect
            case msg.LimitKv(instance_id=i, num_bytes=num_bytes):
                assert num_bytes >= self.kv_used.get(i, 0), "a KV cache was cut below what is used"
            case msg.StopEngine(instance_id=i):
                self.forget(i)
                self.pending["stop", i] = effect
            case msg.ConsolidateEngine(instance_id=i):
                assert ("ConsolidateEngine", i) not in self.pending, "asked anew before the last time has ended"
                self.pending["ConsolidateEngine", i] = effect
            case msg.LoadEngine(instance_id=i):
                assert i in self.processes, "loaded without a process"
                self.pending["LoadEngine", i] = effect
            case _ if isinstance(effect, ASKED):
                self.pending[type(effect).__name__, effect.instance_id] = effect
            case Save(table="instances", value=instance):
                before = self.last.get(instance.instance_id)
                if before is not None:
                    assert instance.revision >= before.revision
                    if instance.revision > before.revision:
                        assert instance.state.value in LEGAL[before.state], f"{before.state} -> {instance.state}"
                self.last[instance.instance_id] = instance
                self.seen[instance.state.value] += 1
            case Remove(table="instances", key=i):
                del self.last[i]

    def forget(self, i: str) -> None:
        for key in [k for k in self.pending if k[1] == i]:
            del self.pending[key]

    def some_id(self) -> str:
        return f"i-{self.random.randrange(self.num_ids + 2)}"

    def new_id(self) -> str:
        """Sometimes one started before, or stopped before it came."""
        if self.random.random() < 0.2:
            return self.some_id()
        self.num_ids += 1
        return f"i-{self.num_ids}"

    def some(self, *states: InstanceState) -> str:
        """Otherwise any id."""
        there = sorted(i.instance_id for i in self.agent.instances if i.state in states)
        return self.random.choice(there) if there and self.random.random() < 0.9 else self.some_id()

    # what commanders do

    def start(self) -> None:
        kind = self.random.choice(("plain", "replica", "replica", "first", "later", "grow", "grow", "grow"))
        i, source, model = self.new_id(), "", self.random.choice((ONE, ONE, PAIR))
        gpus = (0, 1) if model is PAIR else (self.random.randrange(2),)
        if kind == "grow":
            dormant = (InstanceState.PREWARMED, InstanceState.SWAPPED_OUT)
            source = self.some(*dormant, InstanceState.STARTING, InstanceState.LOADING)
            if (found := self.agent.holdings.get(source)) is not None:
                here = (w.gpu_id for w in found.instance.workers if w.node_id == NODE)
                model, gpus = found.model, tuple(int(gpu_id.rpartition("/")[2]) for gpu_id in here)
        replicas = [*sorted(r.instance_id for r in self.agent.instances if r.replica), self.some_id()]
        fields: dict[str, Any] = {"drops": tuple(r for r in replicas if self.random.random() < 0.4)}
        if kind == "plain":
            fields["workers"] = workers(i, *gpus, mib=self.random.choice((0, 50, 150, self.mib, self.mib + 1)))
        self.send(self.start_of(kind, i, model, gpus, source=source, **fields).data)

    def stop(self) -> None:
        i = self.some(InstanceState.READY, InstanceState.READY, InstanceState.DRAINING, *InstanceState)
        grace_s, becomes = self.random.choice((0.0, 1.0, 30.0, 30.0)), self.random.choice(BECOMES)
        self.send(StopInstance(target=NODE, instance_id=i, reason="r", grace_s=grace_s, becomes=becomes))

    def resume(self) -> None:
        self.send(ResumeInstance(target=NODE, instance_id=self.some(InstanceState.DRAINING), reason="r"))

    def join(self) -> None:
        self.send(JoinStages(target=NODE, instance_id=self.some(InstanceState.STARTING, InstanceState.LOADING)))

    def consolidate(self) -> None:
        staged = sorted(i.instance_id for i in self.agent.instances if not i.is_whole) or [self.some_id()]
        self.send(ConsolidateInstance(target=NODE, instance_id=self.random.choice(staged), reason="r"))

    def send(self, command: Any) -> None:
        """Once or twice, sometimes after the commander was replaced."""
        self.epoch += self.random.random() < 0.02
        issuer = "placer-1" if isinstance(command, StartInstance | JoinStages) else "autoscaler-1"
        event = an_event(command, issuer=issuer, epoch=self.epoch - (self.random.random() < 0.05))
        for _ in range(self.random.choice((1, 1, 1, 2))):
            self.tell(event)

    # what engines and time do

    def answer(self) -> None:
        """A consolidation often takes long."""
        keys = [k for k in sorted(self.pending) if k[0] != "ConsolidateEngine" or self.random.random() < 0.15]
        if keys:
            self.settle(self.random.choice(keys), ok=self.random.random() < 0.93)

    def settle(self, key: tuple[str, str], ok: bool) -> None:
        kind, i = key
        effect = self.pending.pop(key)
        failed = msg.EngineStartFailed(i, self.random.choice(("weights_dropped", "engine_failed")), "broken")
        if kind == "stop":
            if ok:
                self.end(i)
            self.tell(msg.EngineGone(i, clean=ok))
        elif kind == "SleepEngine":
            self.kv_used.pop(i, None)
            if self.random.random() < 0.2:
                self.tell(msg.EngineBusy(i, 1))
            elif ok:
                self.tell(msg.EngineAsleep(i, self.random.choice((-1, 0, 3, 20 * MIB))))
            elif self.random.random() < 0.5:
                self.tell(msg.SleepFailed(i, "it will not"))
            else:
                self.end(i)
                self.tell(msg.EngineExited(i, "killed"))
        elif kind == "launch":
            self.tell(msg.EngineLaunched(i) if ok else failed)
        elif kind == "AwaitWeights" and effect.streams and self.random.random() < 0.7:
            self.pending[key] = effect  # they are not whole yet
            replaced = msg.WeightsReplaced(i, "its source has changed")
            self.tell(msg.WeightsArriving(i, "/w") if self.random.random() < 0.9 else replaced)
        elif kind == "AwaitWeights":
            self.tell(msg.WeightsComplete(i, "/w") if ok else msg.WeightsFailed(i, "weights_unavailable", "gone"))
        elif kind == "ConsolidateEngine":
            why = self.random.choice(("engine_failed", "weights_corrupt"))
            broken = self.random.choice((msg.EngineExited(i, "killed"), msg.ConsolidationFailed(i, "broken", why)))
            self.tell(
                msg.EngineConsolidated(i, url=self.random.choice(("", "http://whole", "http://whole")))
                if ok
                else broken
            )
        elif kind == "FinishStages":
            self.tell(msg.StagesFinished(i, cut=not ok))
        elif kind == "AbandonConsolidation":
            self.pending.pop(("ConsolidateEngine", i), None)
            if i in self.processes and not self.last[i].is_whole:
                self.tell(msg.ConsolidationFailed(i, "given up"))
        elif not ok or i not in self.processes:
            self.tell(failed)
        elif kind == "LoadEngine" and self.last[i].replica:
            self.tell(msg.EnginePrewarmed(i))
        else:
            self.tell(msg.EngineReady(i, "http://e"))

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
            self.tell(msg.EngineExited(i, "killed"))

    def count(self) -> None:
        i = self.some(InstanceState.DRAINING)
        if i not in self.processes or self.last[i].state not in (InstanceState.READY, InstanceState.DRAINING):
            return
        grants = [g for gpu in self.agent.ledger.gpus for g in gpu.all_grants if g.holder == i]
        held = sum(g.num_bytes for g in grants if g.owner is GrantOwner.KV)
        num_in_flight = self.random.randrange(6)
        self.kv_used[i] = int(held * self.random.random()) if num_in_flight else 0
        self.tell(msg.InFlight(i, num_in_flight, self.kv_used[i]), 0.4)

    def health(self) -> None:
        living = (InstanceState.READY, InstanceState.DRAINING, InstanceState.PREWARMED, InstanceState.SWAPPED_OUT)
        i = self.some(*living)
        if i in self.processes and self.last[i].state in living:
            for _ in range(self.random.choice((1, 2, 3))):
                self.tell(msg.HealthSeen(i, ok=self.random.random() < 0.3, reason="no answer"))

    def tick(self) -> None:
        self.tell(Tick(), self.random.choice((0.2, 0.2, 1.0, 5.0, 30.0)))

    def kill_9(self) -> None:
        """Some of its engines die too, and all work in progress."""
        if self.random.random() < 0.1:
            self.processes = {i for i in sorted(self.processes) if self.random.random() < 0.7}
            self.kv_used = {i: n for i, n in self.kv_used.items() if i in self.processes}
            self.pending.clear()
            self.agent = self.new_agent()
            self.tell(msg.Recalled(frozenset(self.processes)))

    def run(self) -> None:
        verbs = [self.start, self.stop, self.resume, self.join, self.consolidate, self.consolidate]
        verbs += [self.answer] * 12 + [self.start] * 3 + [self.count] * 2
        verbs += [self.die, self.health, self.tick, self.kill_9]
        for _ in range(250):
            self.random.choice(verbs)()

    def rest(self) -> None:
        """Engines answer and stops work, so everything settles."""
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

    def check(self) -> None:
        agent, holdings = self.agent, self.agent.holdings
        for gpu in agent.ledger.gpus:
            assert 0 <= gpu.used_bytes <= gpu.total_bytes
            held = {(g.holder, g.owner) for g in gpu.all_grants}
            for holder, owner in held:
                state = holdings[holder].instance.state
                assert not state.is_gone or (state is InstanceState.FAILED and holdings[holder].stop is not None)
                assert (state is InstanceState.SWAPPED_OUT) is (owner is GrantOwner.SLEEPER)
                assert (owner is GrantOwner.PREWARM) == holdings[holder].instance.replica
        for (kind, i), effect in self.pending.items():
            if kind == "ConsolidateEngine" and i in self.processes and i in holdings:
                held_bytes = sum(g.num_bytes for gpu in agent.ledger.gpus for g in gpu.all_grants if g.holder == i)
                assert held_bytes >= effect.model.memory_bytes, "an engine that may become whole has not got the bytes"
        known = {h.engine for h in holdings.values() if h.shares or h.stop is not None}
        known |= {i for i, h in holdings.items() if h.instance.state is InstanceState.SWAPPED_OUT}
        assert self.processes <= known, "an engine has neither bytes nor an end"
        for holding in holdings.values():
            if not holding.is_over and holding.engine in self.processes and not holding.instance.replica:
                assert holding.shares or holding.snapshot_bytes, (
                    "an engine that has served gives up its bytes before its end"
                )
        assert promised(holdings.values()) <= PARAMS.swap_host_bytes
        assert not {i for i, h in holdings.items() if h.instance.state.is_gone and not h.instance.reason}, "ends unsaid"


@pytest.mark.timeout(300)
def test_bytes_are_conserved_whatever_comes_in_whatever_order() -> None:
    seen: Counter[str] = Counter()
    for seed in range(NUM_WALKS):
        walk = EnginesWalk(seed)
        walk.run()
        seen += walk.seen
        walk.rest()
        assert not walk.agent.violations(), seed
        walk.check()
    names = ("ActivateEngine", "SleepEngine", "LimitKv", "ServeStages", "prewarmed", "swapped_out")
    names += ("ConsolidateEngine", "AbandonConsolidation", "FinishStages", "StaleEpoch", "failed")
    assert not {name: seen[name] for name in names if seen[name] < 5}, "the walks go everywhere, or nothing is shown"
