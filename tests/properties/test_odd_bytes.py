"""Unintended bytes: decoding raises MalformedEvent or nothing."""

import asyncio
import contextlib
import itertools
import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from glowplug.bus.memory_bus import MemoryBus
from glowplug.controllers.agent.controller import AgentController
from glowplug.controllers.agent.messages import AgentMemory, EngineKind, Recalled
from glowplug.controllers.autoscaler.controller import AutoscalerController
from glowplug.controllers.autoscaler.learned import SCALING_LEARNED
from glowplug.controllers.effects import Publish, Record, Save, Tick
from glowplug.controllers.fencing import LEADERS
from glowplug.controllers.operator import CORDONS
from glowplug.controllers.placer.controller import PlacerController
from glowplug.controllers.predictor.controller import PredictorController
from glowplug.controllers.prefetcher.controller import PrefetcherController
from glowplug.controllers.prefetcher.params import PrefetcherParams
from glowplug.controllers.router.controller import RouterController
from glowplug.controllers.router.params import RouterParams
from glowplug.domain.errors import StaleEpoch
from glowplug.domain.hardware import Node
from glowplug.domain.instance import Instance
from glowplug.domain.model import Model
from glowplug.domain.snapshot import ModelLoad
from glowplug.events.envelope import PAYLOADS, Event, MalformedEvent, decode, encode, from_json, to_json
from glowplug.events.facts import NodeBeat
from glowplug.events.subjects import subject
from glowplug.fleet.start_times import START_TIMES
from glowplug.memory.ledger import ByteLedger
from glowplug.policies.registry import choose
from glowplug.services.console.app import Console, build_app
from glowplug.services.console.main import Feed
from glowplug.services.console.metrics import ConsoleMetrics
from glowplug.services.console.settings import ConsoleSettings
from glowplug.state.memory_store import MemoryStore
from glowplug.state.rows import read_rows
from glowplug.weights.region import region_digest
from glowplug_lab.systems import SYSTEMS
from tests.fleet_builder import a_model, a_node, an_event, an_instance, load_report
from tests.odd_rows import KINDS, NOW, TABLES, a_tweaked_event, event_bytes, key_of, odd, steps
from tests.strategies import events

VIEWS = (
    "fleet",
    "requests",
    "decisions",
    "events/latest?plane=evt&plane=tel&plane=cmd",
    "models/m",
    "requests?q=x&state=ended",
)


def an_agent(memory: AgentMemory | None = None) -> AgentController:
    ledger = ByteLedger(a_node("node-1", gpus_mib=(300, 300)).gpus)
    abilities = frozenset({"prewarm", "swap", "stages"})
    return AgentController(
        "node-1", ledger, {"emulated": EngineKind(name="emulated", abilities=abilities)}, memory=memory
    )


def a_placer(system: str) -> PlacerController:
    policies = SYSTEMS[system].policies
    place, evict, prewarm = (choose(kind, policies[kind]) for kind in ("placement", "eviction", "prewarming"))
    return PlacerController(place, evict, dict(policies), 1, prewarm=prewarm)


def an_autoscaler(system: str) -> AutoscalerController:
    name = SYSTEMS[system].policies["scaling"]
    return AutoscalerController(choose("scaling", name), name, 1)


def a_prefetcher(system: str) -> PrefetcherController:
    params = PrefetcherParams(capacity_bytes=1 << 30, caching=SYSTEMS[system].policies["caching"])
    return PrefetcherController("node-1", params, digest_of=region_digest)


CONTROLLERS: dict[str, Callable[[str], Any]] = {
    "agent": lambda _: an_agent(),
    "placer": a_placer,
    "autoscaler": an_autoscaler,
    "prefetcher": a_prefetcher,
    "predictor": lambda system: PredictorController(make=choose("prediction", SYSTEMS[system].policies["prediction"])),
    "router": lambda system: RouterController(RouterParams(policy=SYSTEMS[system].policies["routing"])),
}

READ = {
    "agent": ("instances", "nodes", LEADERS),
    "placer": ("models", "nodes", "instances", CORDONS, LEADERS, START_TIMES),
    "autoscaler": ("models", "instances", SCALING_LEARNED),
    "prefetcher": ("models", "instances", LEADERS),
    "predictor": ("models",),
    "router": ("models", "instances", START_TIMES),
}


class Stage:
    """Fed as its shell feeds it: undecodable bytes never reach it."""

    def __init__(self, service: str, system: str) -> None:
        self.controller, self.now_s, self._ids = CONTROLLERS[service](system), NOW, itertools.count(1)
        self._reads = READ[service]
        self.settle()

    def settle(self) -> None:
        sound = {
            "models": {"m": a_model("m")},
            "nodes": {"node-1": a_node("node-1", gpus_mib=(300, 300))},
            "instances": {"i-1": an_instance("i-1", "m")},
        }
        for table in sorted(sound.keys() & set(self._reads)):
            rows: dict[str, Any] = dict(sound[table])  # type: ignore[arg-type]
            self.effects(self.controller.restore(table, rows, self.now_s))
        for _ in range(8):
            self.tick(1.0)

    def tick(self, passed_s: float) -> None:
        self.now_s += passed_s
        beat = NodeBeat(node=a_node("node-1", gpus_mib=(300, 300), revision=next(self._ids)))
        for event_in in (an_event(beat), load_report(m=ModelLoad(num_waiting=1, last_active_at=self.now_s)), Tick()):
            self.effects(self.controller.handle(event_in, self.now_s))

    def take(self, step: Any) -> None:
        if isinstance(step, float):
            self.tick(step)
        elif len(step) == 2:
            self.table(*step)
        else:
            self.event(*step)

    def event(self, kind: str, data: Any, at: float, epoch: int) -> None:
        try:
            event = decode(event_bytes(next(self._ids), kind, data, at, epoch))
        except MalformedEvent:
            return
        try:
            self.effects(self.controller.handle(event, self.now_s))
        except StaleEpoch:
            return

    def table(self, table: str, rows: list[Any]) -> None:
        if table not in self._reads:
            return
        raw = {key_of(table, row): json.dumps(row).encode() for row in rows}
        self.effects(self.controller.restore(table, read_rows(table, raw, TABLES[table])[0], self.now_s))

    def effects(self, effects: list[Any]) -> None:
        for effect in effects:
            if isinstance(effect, Publish):
                event = an_event(effect.payload)
                assert subject(effect.payload)
                decode(encode(event))
            elif isinstance(effect, Save):
                from_json(to_json(effect.value), type(effect.value))
            elif isinstance(effect, Record):
                from_json(to_json(effect.decision), type(effect.decision))


@pytest.mark.parametrize("service", sorted(CONTROLLERS))
@settings(suppress_health_check=list(HealthCheck))
@given(system=st.sampled_from(sorted(SYSTEMS)), drawn=steps)
def test_what_decodes_never_breaks_a_controller(service: str, system: str, drawn: list[Any]) -> None:
    stage = Stage(service, system)
    for step in drawn:
        stage.take(step)
    stage.take(1.0)
    assert stage.now_s > NOW


@given(memory=odd(AgentMemory), drawn=st.lists(a_tweaked_event, max_size=4))
def test_an_agent_starts_from_whatever_memory_decodes(memory: dict[str, Any], drawn: list[Any]) -> None:
    stage = Stage("agent", "union")
    try:
        known = from_json(json.dumps(memory).encode(), AgentMemory)
    except MalformedEvent:
        return
    stage.controller = an_agent(known)
    stage.effects(stage.controller.handle(Recalled(frozenset({"i-1"})), stage.now_s))
    for step in (*drawn, 1.0, 20.0):
        stage.take(step)
    assert from_json(to_json(stage.controller.memory()), AgentMemory)


def mutated(raw: bytes, cuts: list[tuple[int, int, bytes]]) -> bytes:
    for at, num, instead in cuts:
        at %= len(raw) + 1
        raw = raw[:at] + instead + raw[at + num :]
    return raw


NASTY = (
    b"\xff", b"\xc3", b"\xed\xa0\x80", b"\x00", b"null", b"true", b"NaN", b"Infinity", b"1e400", b"-1e400", b"9" * 5000,
    b"[" * 2000, b'{"a":' * 2000, b'"', b"\\", b"\\ud800", b"\\u0000", b"{}", b"[]", b"-", b'"nan"', b'"1"', b"",
)  # fmt: skip
a_cut = st.tuples(st.integers(0, 2000), st.integers(0, 12), st.sampled_from(NASTY) | st.binary(max_size=4))
cuts = st.lists(a_cut, min_size=1, max_size=3)
an_event_of_any_kind = st.sampled_from(KINDS).flatmap(lambda kind: events(PAYLOADS[kind]))
a_row = st.sampled_from(sorted(TABLES)).flatmap(
    lambda table: st.tuples(st.just(table), odd(TABLES[table]).map(json.dumps).map(str.encode))
)


@given(event=an_event_of_any_kind, drawn=cuts)
def test_a_damaged_event_is_malformed_or_an_event_that_can_be_sent_on(event: Event, drawn: list[Any]) -> None:
    try:
        decoded = decode(mutated(encode(event), drawn))
    except MalformedEvent as error:
        assert 0 < len(str(error)) < 400
    else:
        assert decode(encode(decoded)) == decoded


@given(row=a_row, drawn=st.just([]) | cuts)
def test_a_damaged_row_is_named_or_a_row_that_can_be_written_again(row: tuple[str, bytes], drawn: list[Any]) -> None:
    table, raw = row
    rows, unreadable = read_rows(table, {key_of(table, json.loads(raw)): mutated(raw, drawn)}, TABLES[table])
    assert len(rows) + len(unreadable) == 1
    for value in rows.values():
        assert from_json(to_json(value), TABLES[table]) == value


@given(junk=st.binary(max_size=300), kind=st.sampled_from([*TABLES.values(), dict[str, Any], list[Node]]))
def test_junk_is_malformed_and_nothing_else_is_raised(junk: bytes, kind: type[Any]) -> None:
    for read in (decode, lambda raw: from_json(raw, kind)):
        try:
            value = read(junk)
        except MalformedEvent:
            continue
        assert to_json(value)


JOIN = PAYLOADS["agent.join"]


def with_text(raw: bytes, text: str, field: str) -> bytes:
    return json.dumps(json.loads(raw) | {field: "HERE"}).replace('"HERE"', text).encode()


@pytest.mark.parametrize("field", ["occurred_at", "epoch", "schema"])
@pytest.mark.parametrize("number", ["1e400", "9" * 5000, "9" * 40, '"nan"', '"inf"', "-1e300", "NaN"])
def test_a_number_that_nobody_can_mean_is_malformed(field: str, number: str) -> None:
    with pytest.raises(MalformedEvent):
        decode(with_text(encode(an_event(JOIN(target="n", instance_id="i"))), number, field))


@pytest.mark.parametrize("field", ["kv_bytes", "max_instances", "num_gpus", "keep_alive_s"])
@pytest.mark.parametrize("number", ["1e400", "9" * 5000, "9" * 40, '"nan"', '"inf"', "1e300"])
def test_a_number_of_a_model_that_nobody_can_mean_is_malformed(field: str, number: str) -> None:
    with pytest.raises(MalformedEvent):
        from_json(with_text(to_json(a_model()), number, field), Model)


def test_engine_arguments_nest_so_deep_and_no_deeper() -> None:
    shallow, deep = (with_text(to_json(a_model()), '{"a":' + "[" * n + "]" * n + "}", "engine_args") for n in (8, 500))
    assert from_json(shallow, Model).engine_args
    with pytest.raises(MalformedEvent, match="nested"):
        from_json(deep, Model)


def test_an_event_larger_than_the_bus_takes_is_malformed_and_its_error_is_short() -> None:
    whole = an_event(JOIN(target="n", instance_id="i" * (5 << 20)))
    with pytest.raises(MalformedEvent, match="bytes, at most"):
        decode(encode(whole))
    with pytest.raises(MalformedEvent) as caught:
        decode(encode(an_event(JOIN(target="n", instance_id="i"))).replace(b"agent.join", b"x" * 99999))
    assert len(str(caught.value)) < 400


def test_a_row_under_the_key_of_another_is_named() -> None:
    rows, unreadable = read_rows("instances", {"i-1": to_json(an_instance("i-2"))}, Instance)
    assert (rows, unreadable) == ({}, {"i-1": "Instance: it is the row of 'i-2'"})
    assert read_rows("nodes", {"\\xff": b""}, Node)[1] == {"\\xff": "Node: no bytes, or a key that is not UTF-8"}


async def connected() -> None:
    """No connection needed in memory."""


async def expect_shown(drawn: list[Any]) -> None:
    now_s, ids = NOW, itertools.count(1)
    store = MemoryStore()
    console = Console(ConsoleSettings(), ConsoleMetrics(CollectorRegistry()), clock=lambda: now_s)
    feed = Feed(console, MemoryBus(), store, connected)
    console.hub.join(console.view, now_s)
    for step in drawn:
        if isinstance(step, float):
            now_s += step
        elif len(step) == 2:
            table, rows = step
            store.tables[table] = {key_of(table, row): json.dumps(row).encode() for row in rows}
        else:
            with contextlib.suppress(MalformedEvent):
                await feed._on_event(decode(event_bytes(next(ids), *step)))
        await feed.resync()
        feed.beat()
    transport = httpx.ASGITransport(build_app(console))
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
        paths = [f"/api/v1/{view}" for view in VIEWS]
        paths += [f"/api/v1/events/e-{number}" for number in range(1, next(ids))]
        for path in paths:
            answer = await client.get(path)
            assert answer.status_code in (200, 404), (path, answer.text)
            answer.json()


@given(drawn=steps)
def test_a_console_shows_whatever_decodes(drawn: list[Any]) -> None:
    asyncio.run(expect_shown(drawn))
