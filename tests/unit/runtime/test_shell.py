"""The shell: effects, refusals, causes, resyncs, and failures of a service's parts."""

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from glowplug.bus.memory_bus import MemoryBus
from glowplug.controllers.effects import Effect, Publish, Record, Remove, Save, Tick
from glowplug.controllers.fencing import Fence
from glowplug.controllers.reads import MissingExecutor, Reads
from glowplug.domain.decision import DecisionRecord
from glowplug.domain.hardware import Node
from glowplug.events import Event
from glowplug.events.commands import StopInstance
from glowplug.events.envelope import to_json
from glowplug.events.facts import InstanceReady, NodeLeft
from glowplug.runtime.shell import DECISIONS_LOG, Shell
from glowplug.runtime.tasks import essential
from glowplug.state.memory_store import MemoryStore
from glowplug.telemetry import semconv
from glowplug.telemetry.metrics import ShellMetrics
from tests.fleet_builder import a_node, an_event, an_instance
from tests.waiting import WAIT_S, until

PARENT = f"00-{'a' * 32}-{'b' * 16}-01"
DECISION = DecisionRecord(
    decision_id="d-1", kind="place", policy="first_fit", service="placer", reason="node-1 has room", made_at=9.0
)


@dataclass(frozen=True)
class Own:
    name: str


@dataclass
class FakeController:
    script: Callable[[Any], list[Effect]] = lambda _: []
    told: list[Any] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    restored: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    on_restore: list[Effect] = field(default_factory=list)
    fence: Fence = field(default_factory=Fence)

    def handle(self, stimulus: Any, now_s: float) -> list[Effect]:
        self.told.append(stimulus)
        self.times.append(now_s)
        if isinstance(stimulus, Event) and stimulus.epoch:
            self.fence.admit(stimulus)
        return self.script(stimulus)

    def restore(self, table: str, rows: dict[str, Any], now_s: float) -> list[Effect]:
        self.restored.append((table, rows))
        return self.on_restore


class Stage:
    def __init__(self) -> None:
        self.controller, self.bus, self.store = FakeController(), MemoryBus(), MemoryStore()
        self.registry = CollectorRegistry()
        self.done: list[tuple[Own, Event | None]] = []
        self.shell = Shell(
            "placer",
            "placer-1",
            self.controller,
            self.bus,
            self.store,
            ShellMetrics("placer", self.registry),
            epoch=5,
            reads=Reads(service="placer", tables={"nodes": Node}, effects=(Own,)),
            executors={Own: self.perform},
            tick_s=0.01,
            resync_s=0.01,
            clock=lambda: 1000.5,
        )

    async def perform(self, effect: Own, event: Event | None) -> None:
        self.done.append((effect, event))

    def counted(self, name: str, **labels: str) -> float:
        return self.registry.get_sample_value(name, {"service": "placer", **labels}) or 0.0

    @property
    def store_connected(self) -> float | None:
        return self.registry.get_sample_value("glowplug_store_connected")


@pytest.fixture
async def stage() -> AsyncIterator[Stage]:
    made = Stage()
    yield made
    await made.shell.stop()


def a_fact(traceparent: str = "") -> Event:
    return an_event(NodeLeft(node_id="node-1", reason="silent"), traceparent=traceparent)


async def test_an_effect_that_nothing_carries_out_is_refused_when_the_shell_is_made(stage: Stage) -> None:
    reads = Reads(service="placer", effects=(Own,))
    shell = stage.shell
    with pytest.raises(MissingExecutor, match="placer: nothing carries out Own"):
        Shell("placer", "p-2", stage.controller, stage.bus, stage.store, shell.metrics, reads=reads)


LEFT = NodeLeft(node_id="node-2", reason="told by the controller")
STOP = StopInstance(target="node-2", instance_id="i-2", reason="told by the controller")


async def test_effects_are_performed_in_order(stage: Stage) -> None:
    seen: list[str] = []

    async def heard(event: Event) -> None:
        seen.append(event.type)

    async def perform(effect: Own, _: Event | None) -> None:
        seen.append(effect.name)

    stage.shell._executors[Own] = perform
    await stage.bus.subscribe([">"], heard)
    await stage.shell.execute([Own("1"), Publish(LEFT), Own("2"), Record(DECISION), Own("3")])
    await until(lambda: len(seen) == 5)
    assert [name for name in seen if name in "123"] == ["1", "2", "3"]
    assert [e.type for e in stage.bus.broker.published] == ["node.left", "decision.made"]


async def test_the_times_of_another_clock_are_laid_on_its_own(stage: Stage) -> None:
    await stage.shell.start()
    row = an_instance(ready_at=8000.0, changed_at=8000.5)
    event = replace(an_event(InstanceReady(instance=row)), occurred_at=8000.5)
    await stage.shell.on_event(event)
    (told,) = [one for one in stage.controller.told if isinstance(one, Event)]
    assert (told.data.instance.ready_at, told.occurred_at) == (1000.0, 8000.5)
    await stage.store.put("nodes", "node-1", to_json(a_node(heartbeat_at=8000.5)))
    await until(lambda: stage.controller.restored[-1][1].keys() == {"node-1"})
    assert stage.controller.restored[-1][1]["node-1"].heartbeat_at == 1000.5


async def test_one_stimulus_is_over_before_the_next_begins(stage: Stage) -> None:
    steps: list[str] = []

    async def slow(effect: Own, _: Event | None) -> None:
        steps.append(f"begin {effect.name}")
        await asyncio.sleep(0.02)
        steps.append(f"end {effect.name}")

    stage.shell._executors[Own] = slow
    stage.controller.script = lambda stimulus: [Own(stimulus)] if isinstance(stimulus, str) else []
    stage.controller.on_restore = [Own("restore")]
    await stage.shell.start()
    await asyncio.gather(*(stage.shell.ask(name) for name in "abc"))
    pairs = [tuple(steps[i : i + 2]) for i in range(0, len(steps) - 1, 2)]
    assert pairs == [(f"begin {p[0].partition(' ')[2]}", f"end {p[0].partition(' ')[2]}") for p in pairs]
    assert [s for s in steps if s.startswith("end") and "restore" not in s] == ["end a", "end b", "end c"]


async def test_rows_are_written_and_removed(stage: Stage) -> None:
    node = a_node()
    await stage.shell.execute([Save("nodes", "node-1", node), Save("nodes", "node-2", node), Remove("nodes", "node-2")])
    assert await stage.store.load("nodes") == {"node-1": to_json(node)}


async def test_a_decision_is_kept_and_published_and_counted(stage: Stage) -> None:
    await stage.shell.execute([Record(DECISION)])
    assert await stage.store.tail(DECISIONS_LOG, 10) == [to_json(DECISION)]
    assert [e.data.decision for e in stage.bus.broker.of_type("decision.made")] == [DECISION]
    sample = stage.registry.get_sample_value("glowplug_decisions_total", {"kind": "place", "policy": "first_fit"})
    assert sample == 1


async def test_an_effect_of_the_services_own_is_given_its_event(stage: Stage) -> None:
    event = a_fact()
    stage.controller.script = lambda _: [Own("x")]
    await stage.shell.start()
    await stage.shell.on_event(event)
    assert (Own("x"), event) in stage.done


async def test_facts_carry_no_epoch_and_commands_carry_ours(stage: Stage) -> None:
    await stage.shell.execute([Publish(LEFT), Publish(STOP)])
    fact, command = stage.bus.broker.published
    assert (fact.epoch, command.epoch) == (0, 5)
    assert fact.event_id != command.event_id
    assert {(e.issuer, e.occurred_at) for e in (fact, command)} == {("placer-1", 1000.5)}


async def test_what_follows_from_an_event_names_it_and_continues_its_trace(stage: Stage) -> None:
    stage.controller.script = lambda s: [Publish(STOP), Record(DECISION)] if isinstance(s, Event) else []
    await stage.shell.start()
    await stage.shell.on_event(fact := a_fact(PARENT))
    assert [(e.cause_id, e.traceparent) for e in stage.bus.broker.published] == [(fact.event_id, PARENT)] * 2


async def test_a_cause_given_with_the_effect_wins(stage: Stage) -> None:
    """A pending placement is decided on another event, yet belongs to its request."""
    asked, other = a_fact(PARENT), a_fact(PARENT.replace("a", "c"))
    stage.controller.script = lambda s: [Publish(STOP, asked), Record(DECISION, asked)] if s == other else []
    await stage.shell.start()
    await stage.shell.on_event(other)
    assert [(e.cause_id, e.traceparent) for e in stage.bus.broker.published] == [(asked.event_id, PARENT)] * 2


async def test_a_stale_command_is_counted_and_acknowledged(stage: Stage) -> None:
    stage.controller.script = lambda s: [Own(f"{s.epoch}")] if isinstance(s, Event) else []
    await stage.shell.start()
    for epoch in (5, 7, 6, 7):
        await stage.shell.on_event(an_event(STOP, epoch=epoch))
    assert [effect.name for effect, _ in stage.done] == ["5", "7", "7"]
    assert stage.counted("glowplug_stale_commands_total") == 1


async def test_a_bus_that_is_down_is_counted_and_the_rest_goes_on(stage: Stage) -> None:
    stage.bus.broker.down = True
    await stage.shell.execute([Publish(LEFT), Own("after"), Save("nodes", "n", 1)])
    assert [effect.name for effect, _ in stage.done] == ["after"]
    assert await stage.store.get("nodes", "n") == b"1"
    assert stage.counted("glowplug_bus_publish_failures_total") == 1


async def test_a_store_that_is_down_is_counted_and_the_rest_goes_on(stage: Stage) -> None:
    stage.store.down = True
    await stage.shell.execute([Save("nodes", "n", 1), Remove("nodes", "n"), Publish(LEFT)])
    assert [e.type for e in stage.bus.broker.published] == ["node.left"]
    assert stage.counted("glowplug_store_failures_total") == 2


async def test_a_start_waits_for_the_store(stage: Stage) -> None:
    stage.store.down = True
    starting = asyncio.create_task(stage.shell.start())
    await asyncio.sleep(0.05)
    assert not stage.shell.restored
    assert stage.controller.told == []
    stage.store.down = False
    await starting
    assert stage.shell.restored
    assert stage.controller.restored == [("nodes", {})]


async def test_a_store_lost_later_stops_nothing(stage: Stage) -> None:
    await stage.shell.start()
    stage.store.down = True
    before = len(stage.controller.told)
    await until(lambda: stage.store_connected == 0.0 and len(stage.controller.told) > before + 2)
    await stage.shell.on_event(fact := a_fact())
    assert fact in stage.controller.told
    stage.store.down = False
    read = len(stage.controller.restored)
    await until(lambda: len(stage.controller.restored) > read)


async def test_tables_are_read_again_and_unreadable_rows_are_left_out(stage: Stage) -> None:
    node = a_node()
    await stage.store.put("nodes", "node-1", to_json(node))
    await stage.store.put("nodes", "node-2", b"{broken")
    await stage.shell.start()
    assert stage.controller.restored[0] == ("nodes", {"node-1": node})
    await stage.store.put("nodes", "node-3", to_json(a_node("node-3")))
    await until(lambda: stage.controller.restored[-1][1].keys() == {"node-1", "node-3"})


async def test_unreadable_rows_are_named_once_and_stay_counted(stage: Stage, caplog: pytest.LogCaptureFixture) -> None:
    for n in range(9):
        await stage.store.put("nodes", f"bad-{n}", b"\xff" * (n + 1))
    await stage.shell.start()
    resyncs = len(stage.controller.restored)
    await until(lambda: len(stage.controller.restored) > resyncs + 2)
    assert stage.counted(semconv.ROWS_UNREADABLE, table="nodes") == 9.0
    said = [record.message for record in caplog.records if "left out" in record.message]
    assert len(said) == 6 and "'bad-0' of nodes" in said[0] and said[-1].startswith("4 more rows")
    for n in range(9):
        await stage.store.delete("nodes", f"bad-{n}")
    await until(lambda: stage.counted(semconv.ROWS_UNREADABLE, table="nodes") == 0.0)


async def test_what_is_no_table_keeps_nobody_from_starting_and_takes_nothing_from_who_runs(stage: Stage) -> None:
    node = a_node()
    await stage.store.put("nodes", "node-1", to_json(node))
    stage.store.no_tables.add("nodes")
    await stage.shell.start()
    assert stage.shell.restored and stage.controller.restored == [("nodes", {})]
    assert stage.counted(semconv.ROWS_UNREADABLE, table="nodes") == 1.0
    stage.store.no_tables.clear()
    await until(lambda: stage.controller.restored[-1] == ("nodes", {"node-1": node}))
    stage.store.no_tables.add("nodes")
    await until(lambda: stage.counted(semconv.ROWS_UNREADABLE, table="nodes") == 1.0)
    assert stage.controller.restored[-1] == ("nodes", {"node-1": node}), "it keeps what it knows"


async def test_a_reading_of_the_tables_that_fails_is_followed_by_the_next(stage: Stage) -> None:
    await stage.shell.start()
    reads = 0

    def restore(table: str, rows: dict[str, Any], now_s: float) -> list[Effect]:
        nonlocal reads
        reads += 1
        raise KeyError(table)

    stage.controller.restore = restore  # type: ignore[method-assign]
    await until(lambda: reads >= 3)


async def test_ticks_come_and_time_is_the_clocks(stage: Stage) -> None:
    await stage.shell.start()
    await until(lambda: stage.controller.told.count(Tick()) > 2)
    assert set(stage.controller.times) == {1000.5}


async def test_ticks_do_not_pile_up_behind_a_slow_world(stage: Stage) -> None:
    async def slow(_: Own, __: Event | None) -> None:
        await asyncio.sleep(0.3)

    stage.shell._executors[Own] = slow
    stage.controller.script = lambda s: [Own("x")] if s == "slow" else []
    await stage.shell.start()
    await stage.shell.put("slow")
    await stage.shell.ask("next")
    assert stage.controller.told[stage.controller.told.index("slow") + 1 :].count(Tick()) <= 1


async def test_a_tick_that_fails_is_followed_by_the_next(stage: Stage) -> None:
    def script(stimulus: Any) -> list[Effect]:
        raise KeyError("always")

    stage.controller.script = script
    await stage.shell.start()
    await until(lambda: stage.controller.told.count(Tick()) > 2)
    assert stage.shell.restored


async def test_an_error_of_the_controller_reaches_who_asked_and_stops_nothing(stage: Stage) -> None:
    def script(stimulus: Any) -> list[Effect]:
        if stimulus == "bad":
            raise KeyError("bad")
        return [Own(stimulus)] if isinstance(stimulus, str) else []

    stage.controller.script = script
    await stage.shell.start()
    with pytest.raises(KeyError):
        await stage.shell.ask("bad")
    await stage.shell.put("bad")
    await stage.shell.ask("good")
    assert [effect.name for effect, _ in stage.done] == ["good"]


async def test_a_handled_event_is_counted_by_type(stage: Stage) -> None:
    await stage.shell.start()
    await stage.shell.on_event(a_fact())
    assert stage.counted("glowplug_stimuli_total", type="node.left") == 1


async def test_an_essential_part_that_fails_stops_its_service() -> None:
    stopping = asyncio.Event()

    async def failing() -> None:
        raise OSError("gone")

    essential(asyncio.create_task(failing()), stopping)
    async with asyncio.timeout(WAIT_S):
        await stopping.wait()
    assert stopping.is_set()


async def test_an_essential_part_that_is_over_or_cancelled_stops_nothing() -> None:
    stopping = asyncio.Event()
    over = essential(asyncio.create_task(asyncio.sleep(0)), stopping)
    cancelled = essential(asyncio.create_task(asyncio.sleep(60)), stopping)
    await over
    cancelled.cancel()
    await asyncio.wait([cancelled])
    await asyncio.sleep(0)
    assert not stopping.is_set()


async def test_a_quiet_shell_ticks_when_something_comes_and_is_slow_otherwise(stage: Stage) -> None:
    quiet = [True]
    shell = Shell(
        "placer",
        "placer-1",
        stage.controller,
        stage.bus,
        stage.store,
        ShellMetrics("placer", CollectorRegistry()),
        reads=Reads(service="placer", tables={}),
        tick_s=0.005,
        quiet_tick_s=3600.0,
        is_quiet=lambda: quiet[0],
    )
    await shell.start()
    try:
        await shell.ask("one")
        await until(lambda: stage.controller.told.count(Tick()) == 1)
        await shell.ask("other")
        await until(lambda: stage.controller.told.count(Tick()) == 2)
        await asyncio.sleep(0.05)
        assert stage.controller.told == ["one", Tick(), "other", Tick()]  # the next would take an hour
        quiet[0] = False
        await shell.ask("last")
        await until(lambda: stage.controller.told.count(Tick()) > 4)
    finally:
        await shell.stop()
