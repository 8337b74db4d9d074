"""Two autoscalers over one in-memory store."""

from dataclasses import replace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from glowplug.bus.memory_bus import MemoryBroker, MemoryBus
from glowplug.controllers.autoscaler.controller import AutoscalerController
from glowplug.controllers.autoscaler.learned import SCALING_LEARNED
from glowplug.controllers.autoscaler.reads import READS
from glowplug.controllers.effects import Tick
from glowplug.events.envelope import to_json
from glowplug.events.facts import InstanceReady
from glowplug.policies.scaling import union
from glowplug.policies.scaling.port import learning
from glowplug.policies.scaling.union import UnionState
from glowplug.runtime.leader import ElectedShell
from glowplug.state.memory_store import MemoryStore
from glowplug.telemetry.metrics import ShellMetrics
from tests.fleet_builder import a_model, an_event, an_instance


class Group:
    """Each look shifts the plan of `m` by its process's own step; `seen` holds each process's last state."""

    def __init__(self) -> None:
        self.now, self.step_m = 1000.0, {"first": 0.1, "second": 0.07}
        self.store, self.broker = MemoryStore(clock=lambda: self.now), MemoryBroker()
        self.seen: dict[str, UnionState] = {}

    def process(self, name: str) -> ElectedShell:
        @learning(UnionState)
        def scale(view: Any, state: UnionState | None = None) -> Any:
            self.seen[name] = state or UnionState()
            decision, after = union.scale(view, state)
            return decision, replace(after, plan=replace(after.plan, m=after.plan.m + self.step_m[name]))

        shell = ElectedShell(
            "autoscaler",
            name,
            lambda epoch: AutoscalerController(scale, "union", epoch),
            MemoryBus(self.broker),
            self.store.client(),
            ShellMetrics("autoscaler", CollectorRegistry()),
            may_act=lambda: True,
            reads=READS,
            tick_s=3600.0,
            resync_s=3600.0,
            clock=lambda: self.now,
        )
        return shell


@pytest.mark.parametrize("was_standby", [True, False], ids=["a standby", "a process that starts"])
async def test_what_the_plan_has_learned_outlives_the_autoscaler_that_leads(was_standby: bool) -> None:
    group = Group()
    await group.store.put("models", "m", to_json(a_model("m")))
    first, second = group.process("first"), group.process("second")
    await first.start()
    await first.lead(1, "")
    if was_standby:
        await second.start()
    for revision in (1, 2, 3):
        ready = an_event(InstanceReady(instance=an_instance("i-1", revision=revision)))
        await first.ask(ready)
        if was_standby:
            await second.ask(ready)
    if was_standby:
        assert group.seen["second"].plan.m == pytest.approx(0.14), "it reckons for itself until it leads"
    await first.stop()
    if not was_standby:
        await second.start()
    await second.lead(2, "")
    assert group.store.tables[SCALING_LEARNED].keys() == {"m"}
    await second.ask(Tick())
    await second.stop()
    assert group.seen["second"].plan.m == pytest.approx(0.3)
    assert group.seen["second"].plan.made_at == -1, "what the load was is not learned"
