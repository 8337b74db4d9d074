"""A candidate and its shell on in-memory doubles and a manual clock."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any, cast

import pytest
from prometheus_client import CollectorRegistry

from glowplug.bus.memory_bus import MemoryBroker, MemoryBus
from glowplug.controllers.effects import Effect, Publish, Save, Tick
from glowplug.controllers.reads import Reads
from glowplug.domain.errors import NotLeader
from glowplug.domain.hardware import Node
from glowplug.events.commands import StopInstance
from glowplug.events.envelope import from_json
from glowplug.events.facts import NodeLeft
from glowplug.runtime.control import ControlService
from glowplug.runtime.identity import PROCESSES, Identity, ServiceHolder
from glowplug.runtime.leader import Candidate, ElectedShell
from glowplug.state.memory_store import MemoryStore
from glowplug.state.port import StoreUnavailable
from glowplug.telemetry.metrics import ShellMetrics
from tests.fleet_builder import a_node, an_event
from tests.waiting import WAIT_S

LEASE_S = 6.0
STOP = StopInstance(target="node-1", instance_id="i-1", reason="test")


class Counting:
    """Hands its count of facts to its heir; each fact makes a command and a row."""

    def __init__(self, epoch: int) -> None:
        self.epoch, self.facts, self.ticks = epoch, 0, 0
        self.tables: dict[str, Any] = {}

    def inherit(self, earlier: "Counting", now_s: float) -> None:
        self.facts = earlier.facts

    def restore(self, table: str, rows: dict[str, Any], now_s: float) -> list[Effect]:
        self.tables[table] = rows
        return []

    def handle(self, stimulus: Any, now_s: float) -> list[Effect]:
        if isinstance(stimulus, Tick):
            self.ticks += 1
            return []
        self.facts += 1
        return [Publish(STOP), Save("counts", "facts", a_node("n", revision=self.facts))]


class Member:
    def __init__(self, name: str, group: "Group") -> None:
        self.name, self.group, self.registry = name, group, CollectorRegistry()
        self.store = group.store.client()
        metrics, self.stopping = ShellMetrics("placer", self.registry), asyncio.Event()
        self.began: list[int] = []
        url = f"http://{name}"

        async def term(epoch: int) -> None:
            try:
                await self.shell.lead(epoch, url)
                self.began.append(epoch)
                await asyncio.Event().wait()
            finally:
                self.shell.follow()

        self.candidate = Candidate(
            "placer", name, url, LEASE_S, self.store, metrics, term, self.stopping, clock=lambda: group.now
        )
        self.shell = ElectedShell(
            "placer",
            name,
            Counting,
            MemoryBus(group.broker),
            self.store,
            metrics,
            may_act=self.candidate.may_act,
            reads=Reads(service="placer", tables={"nodes": Node}),
            tick_s=3600.0,
            resync_s=3600.0,
        )

    @property
    def controller(self) -> Counting:
        found = self.shell.controller
        assert isinstance(found, Counting)
        return found

    async def step(self, times: int = 1) -> None:
        for _ in range(times):
            await self.candidate._step()
            for _ in range(20):  # a new term reads its tables
                await asyncio.sleep(0)

    async def hear(self) -> None:
        await self.shell.ask(an_event(NodeLeft(node_id="node-9", reason="test")))


class Group:
    def __init__(self) -> None:
        self.now = 1000.0
        self.store, self.broker = MemoryStore(clock=lambda: self.now), MemoryBroker()
        self.a, self.b = Member("placer-a", self), Member("placer-b", self)

    @property
    def commands(self) -> list[tuple[str, int]]:
        return [(event.issuer, event.epoch) for event in self.broker.of_type("agent.stop")]

    async def elect(self) -> None:
        """In a new store, candidates wait for a lease."""
        for _ in range(2):
            for member in (self.a, self.b):
                await member.step()
            self.now += LEASE_S / 2
        await self.a.step(2)
        await self.b.step()
        assert self.a.candidate.may_act() and not self.b.candidate.may_act()


@pytest.fixture
async def group() -> AsyncIterator[Group]:
    made = Group()
    for member in (made.a, made.b):
        await member.shell.start()
    await made.elect()
    yield made
    for member in (made.a, made.b):
        await member.candidate.resign()
        await member.shell.stop()


async def test_only_the_leaders_effects_are_carried_out(group: Group) -> None:
    await group.b.hear()
    assert group.commands == [] and group.b.controller.facts == 1
    await group.a.hear()
    assert group.commands == [("placer-a", group.a.began[0])]
    assert from_json(group.store.tables["counts"]["facts"], Node).revision == 1


async def test_a_standby_takes_neither_commands_nor_operators_nor_ticks(group: Group) -> None:
    for stimulus in (an_event(STOP, epoch=1), "what an operator asks"):
        with pytest.raises(NotLeader):
            await group.b.shell.ask(stimulus)
    await group.b.shell.ask(Tick())
    assert group.b.controller.ticks == 0


async def test_who_takes_over_has_heard_what_the_other_heard_and_has_a_higher_epoch(group: Group) -> None:
    for _ in range(3):
        await group.b.hear()
    await group.store.put("nodes", "n", b"not a node")
    group.now += LEASE_S + 0.1
    await group.b.step(2)  # it looks again after a pause
    assert group.b.began and group.b.began[0] > group.a.began[0]
    assert group.b.controller.facts == 3 and group.b.controller.epoch == group.b.began[0]
    await group.b.hear()
    assert group.commands[-1] == ("placer-b", group.b.began[0])
    leaders = group.store.tables["leaders"]
    assert b"placer-b" in leaders["placer"]


async def test_a_service_says_that_it_leads_once_it_knows_what_the_leader_before_it_knew(group: Group) -> None:
    service = ControlService(cast(Any, None), Reads(service="placer", tables={"nodes": Node}))
    service.shell, service.candidate = group.b.shell, group.b.candidate
    group.now += LEASE_S + 0.1
    for _ in range(2):
        await group.b.candidate._step()
    assert group.b.candidate.may_act() and not group.b.began
    assert (service.about()["role"], service.about()["leader"]) == ("standby", "placer-b")
    while not group.b.began:
        await asyncio.sleep(0)
    assert service.about()["role"] == "leader"


async def test_a_leader_that_slept_sends_nothing_when_it_wakes_up_and_before_it_knows(
    group: Group, caplog: pytest.LogCaptureFixture
) -> None:
    group.now += LEASE_S + 0.1
    await group.b.step(2)
    assert group.a.shell.epoch > 0 and group.a.candidate._election.leads
    await group.a.hear()
    await group.a.shell.ask(Tick())
    with pytest.raises(NotLeader):
        await group.a.shell.ask("what an operator asks")
    assert group.commands == []
    assert (group.a.candidate.leader_id, group.a.candidate.lease.url) == ("", ""), "it does not call itself the leader"
    await group.a.step()
    assert group.a.shell.epoch == 0 and not group.a.candidate._election.leads
    assert "placer-a no longer leads; no process does" in caplog.text
    await group.a.step()
    assert (group.a.candidate.leader_id, group.a.candidate.lease.url) == ("placer-b", "http://placer-b")


async def test_a_lease_that_ends_between_two_effects_ends_them(group: Group) -> None:
    """The process falls asleep after the first."""
    published = group.a.shell.bus.publish

    async def publish_and_sleep(event: Any) -> None:
        await published(event)
        group.now += LEASE_S + 0.1

    group.a.shell.bus.publish = publish_and_sleep  # type: ignore[method-assign]
    await group.a.hear()
    assert len(group.commands) == 1 and "facts" not in group.store.tables["counts"]


async def test_a_write_on_its_way_is_refused_once_another_leads(group: Group) -> None:
    """The store refuses it; the clock cannot catch a write that left before the lease ended."""
    group.now += LEASE_S + 0.1
    await group.b.step(2)
    with pytest.raises(StoreUnavailable):
        await group.a.store.put("counts", "facts", b"{}")
    await group.b.store.put("counts", "facts", b"{}")


async def test_who_resigns_is_followed_at_once_and_keeps_its_own_name_in_the_store(group: Group) -> None:
    """Another leads with a newer epoch; a standby owns its service id."""
    name = Identity(group.a.store, "placer-a", "http://placer-a", process="a")
    await group.a.candidate.resign()
    await group.b.step(2)
    assert group.b.candidate.may_act() and group.a.shell.epoch == 0
    await name.claim()
    assert from_json(group.store.tables[PROCESSES]["placer-a"], ServiceHolder).process == "a"
    await name.release()
    assert not group.store.tables[PROCESSES]


async def test_a_store_that_is_away_for_long_leaves_nobody_in_the_lead(group: Group) -> None:
    group.store.down = group.a.store.down = group.b.store.down = True
    group.now += LEASE_S / 3
    await group.a.step()
    assert group.a.candidate.may_act()
    group.now += LEASE_S
    await group.a.step()
    assert not group.a.candidate.may_act() and group.a.shell.epoch == 0
    group.store.down = group.a.store.down = group.b.store.down = False
    for _ in range(3):
        await group.b.step()
        await group.a.step()
    assert [m.candidate.may_act() for m in (group.a, group.b)].count(True) == 1


async def test_metrics_tell_who_leads(group: Group) -> None:
    def told(member: Member, name: str) -> float | None:
        return member.registry.get_sample_value(name, {"service": "placer"})

    assert (told(group.a, "glowplug_leader"), told(group.b, "glowplug_leader")) == (1.0, 0.0)
    assert told(group.a, "glowplug_leader_changes_total") == told(group.b, "glowplug_leader_changes_total") == 1.0


async def test_a_term_that_fails_stops_the_service(group: Group) -> None:
    async def failing(epoch: int, url: str) -> None:
        raise RuntimeError("a fault of ours")

    group.b.shell.lead = failing  # type: ignore[method-assign]
    await group.a.candidate.resign()
    await group.b.step(2)
    async with asyncio.timeout(WAIT_S):
        await group.b.stopping.wait()
    assert group.b.stopping.is_set()
