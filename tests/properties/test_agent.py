"""Whatever arrives, in whatever order: no GPU is overbooked, no engine runs without its bytes, every start ends.

The machine is both sides of the agent: it sends commands (twice, late, stale) and it is the engines, so it knows which
processes really run.
"""

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from glowplug.controllers.agent import messages as msg
from glowplug.controllers.agent.controller import AgentController
from glowplug.controllers.agent.transaction import InvalidTransition
from glowplug.controllers.effects import Save, Tick
from glowplug.domain.errors import StaleEpoch
from glowplug.domain.hardware import Gpu
from glowplug.domain.instance import Instance, InstanceState, Worker
from glowplug.events.commands import ResumeInstance, StartInstance, StopInstance
from glowplug.memory.ledger import ByteLedger
from tests.agent_steps import CheckedAgent
from tests.fleet_builder import MIB, a_model, an_event

NODE = "node-1"
PARAMS = msg.AgentParams(start_deadline_s=20, keep_gone_s=60, stop_retry_s=2, max_tick_gap_s=1000)
ENGINES = {"emulated": msg.EngineKind(name="emulated", emulated=True)}
ids = st.sampled_from([f"i-{n}" for n in range(6)])
gpus = st.integers(0, 1)
epochs = st.integers(1, 4)
LEGAL = {
    InstanceState.STARTING: {"starting", "loading", "draining", "failed"},
    InstanceState.LOADING: {"starting", "loading", "ready", "draining", "failed"},
    InstanceState.READY: {"ready", "draining", "failed"},
    InstanceState.DRAINING: {"draining", "ready", "stopped", "failed"},
    InstanceState.STOPPED: {"stopped"},
    InstanceState.FAILED: {"failed"},
}


class AgentMachine(RuleBasedStateMachine):
    @initialize()
    def begin(self) -> None:
        self.now_s = 1000.0
        self.processes: set[str] = set()
        self.loading: set[str] = set()
        self.waiting: set[str] = set()
        self.stopping: set[str] = set()
        self.started: set[str] = set()
        self.last: dict[str, Instance] = {}
        self.memory: msg.AgentMemory | None = None
        self.agent = self.new_agent()

    def new_agent(self) -> AgentController:
        ledger = ByteLedger([Gpu(gpu_id=f"{NODE}/{i}", total_bytes=300 * MIB) for i in range(2)])
        return CheckedAgent(NODE, ledger, ENGINES, params=PARAMS, memory=self.memory)

    def tell(self, stimulus: Any, after_s: float = 0.1) -> None:
        self.now_s += after_s
        before = dict(self.agent.holdings), self.agent.ledger.gpus
        try:
            effects = self.agent.handle(stimulus, self.now_s)
        except (StaleEpoch, InvalidTransition):
            assert before == (self.agent.holdings, self.agent.ledger.gpus), "a refused stimulus has changed something"
            return
        for effect in effects:
            self.perform(effect)

    def perform(self, effect: Any) -> None:
        match effect:
            case msg.Remember(memory):
                self.memory = memory
            case msg.LaunchEngine(instance_id=i):
                assert i in self.agent.ledger.holders, "launched without a grant"
                assert i not in self.processes, "launched twice"
                self.processes.add(i)
                self.started.add(i)
            case msg.AwaitWeights(instance_id=i):
                self.waiting.add(i)
            case msg.LoadEngine(instance_id=i):
                assert i in self.processes
                self.loading.add(i)
            case msg.StopEngine(instance_id=i):
                self.stopping.add(i)
                self.loading.discard(i)
                self.waiting.discard(i)
            case Save(table="instances", value=instance):
                before = self.last.get(instance.instance_id)
                if before is not None:
                    assert instance.revision >= before.revision
                    if instance.revision > before.revision:
                        assert instance.state.value in LEGAL[before.state], f"{before.state} -> {instance.state}"
                self.last[instance.instance_id] = instance

    @rule(i=ids, gpu=gpus, mib=st.sampled_from([0, 50, 150, 300, 301]), epoch=epochs)
    def start(self, i: str, gpu: int, mib: int, epoch: int) -> None:
        model = a_model(mib=mib or 100)
        worker = Worker(worker_id=f"{i}-0", node_id=NODE, gpu_id=f"{NODE}/{gpu}", num_bytes=mib * MIB)
        command = StartInstance(target=NODE, instance_id=i, model=model, workers=(worker,), decision_id="d")
        self.tell(an_event(command, issuer="placer-1", epoch=epoch))

    @rule(i=ids, grace_s=st.sampled_from([0.0, 1.0, 30.0]), epoch=epochs)
    def stop(self, i: str, grace_s: float, epoch: int) -> None:
        command = StopInstance(target=NODE, instance_id=i, reason="r", grace_s=grace_s)
        self.tell(an_event(command, issuer="autoscaler-1", epoch=epoch))

    @rule(i=ids, epoch=epochs)
    def resume(self, i: str, epoch: int) -> None:
        self.tell(an_event(ResumeInstance(target=NODE, instance_id=i, reason="r"), issuer="autoscaler-1", epoch=epoch))

    @rule(i=ids)
    def launched(self, i: str) -> None:
        if i in self.processes:
            self.tell(msg.EngineLaunched(i))

    @rule(i=ids, ok=st.booleans())
    def weights(self, i: str, ok: bool) -> None:
        if i in self.waiting:
            self.waiting.discard(i)
            self.tell(msg.WeightsComplete(i, "/w") if ok else msg.WeightsFailed(i, "weights_unavailable", "gone"))

    @rule(i=ids, ok=st.booleans())
    def loaded(self, i: str, ok: bool) -> None:
        if i in self.loading:
            self.loading.discard(i)
            if not ok:
                self.processes.discard(i)
            self.tell(msg.EngineReady(i, "http://e") if ok else msg.EngineStartFailed(i, "engine_failed", "broken"))

    @rule(i=ids, clean=st.booleans())
    def stopped(self, i: str, clean: bool) -> None:
        if i in self.stopping:
            self.stopping.discard(i)
            if clean:
                self.processes.discard(i)
            self.tell(msg.EngineGone(i, clean=clean))

    @rule(i=ids)
    def dies(self, i: str) -> None:
        if i in self.processes:
            self.processes.discard(i)
            self.tell(msg.EngineExited(i, "killed"))

    @rule(i=ids, ok=st.booleans(), num_in_flight=st.integers(0, 2))
    def seen(self, i: str, ok: bool, num_in_flight: int) -> None:
        if i in self.processes:
            self.tell(msg.HealthSeen(i, ok=ok, reason="no answer"))
            self.tell(msg.InFlight(i, num_in_flight))

    @rule(after_s=st.sampled_from([0.2, 1.0, 5.0, 30.0]))
    def tick(self, after_s: float) -> None:
        self.tell(Tick(), after_s)

    @precondition(lambda self: self.memory is not None)
    @rule(survivors=st.sets(ids))
    def kill_9(self, survivors: set[str]) -> None:
        """The agent dies; so do some of its engines. Everything it had under way is lost."""
        self.processes &= survivors
        self.loading.clear()
        self.waiting.clear()
        self.stopping.clear()
        self.agent = self.new_agent()
        self.tell(msg.Recalled(frozenset(self.processes)))

    @invariant()
    def no_gpu_is_overbooked(self) -> None:
        for gpu in self.agent.ledger.gpus:
            assert 0 <= gpu.used_bytes <= gpu.total_bytes

    @invariant()
    def every_process_has_its_bytes(self) -> None:
        assert self.processes <= self.agent.ledger.holders

    @invariant()
    def grants_are_those_of_the_living(self) -> None:
        living = {i for i, h in self.agent.holdings.items() if not h.instance.state.is_gone or h.stop is not None}
        assert self.agent.ledger.holders == living

    def teardown(self) -> None:
        """Left alone with engines that answer and stops that work, every start comes to an end."""
        if not hasattr(self, "agent"):
            return
        for _ in range(60):
            for i in sorted(self.stopping):
                self._end(i)
            self.tell(Tick(), 1.0)
        for i in self.started & self.agent.holdings.keys():
            state = self.agent.holdings[i].instance.state
            assert state is InstanceState.READY or state.is_gone, f"{i} is left {state}"

    def _end(self, i: str) -> None:
        self.stopping.discard(i)
        self.processes.discard(i)
        self.tell(msg.EngineGone(i))


TestAgent = AgentMachine.TestCase
TestAgent.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestAgent = pytest.mark.timeout(300)(TestAgent)
