"""Bytes that nobody meant: decoding raises MalformedEvent or nothing, and what decodes is handled by every controller.

Rows and events are drawn with the names of one small fleet, so that odd ones meet each other, and with numbers and
texts from the edges of what decodes.
"""

import dataclasses
import itertools
import json
import typing
from collections.abc import Callable, Mapping
from enum import StrEnum
from types import UnionType
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from glowplug.controllers.agent import AgentController
from glowplug.controllers.agent_words import EngineKind
from glowplug.controllers.autoscaler import AutoscalerController
from glowplug.controllers.effects import Publish, Record, Save, Tick
from glowplug.controllers.fencing import LEADERS
from glowplug.controllers.placer import CORDONS, Cordon, PlacerController
from glowplug.controllers.predictor import PredictorController
from glowplug.controllers.prefetcher import PrefetcherController, PrefetcherParams
from glowplug.controllers.router import RouterController, RouterParams
from glowplug.domain.errors import StaleEpoch
from glowplug.domain.hardware import Node
from glowplug.domain.instance import Instance
from glowplug.domain.lease import Leader
from glowplug.domain.model import Model
from glowplug.events.envelope import PAYLOADS, Event, MalformedEvent, decode, encode, from_json, to_json
from glowplug.events.subjects import subject
from glowplug.memory.ledger import ByteLedger
from glowplug.policies.registry import choose
from glowplug.policies.systems import SYSTEMS
from glowplug.state.rows import read_rows
from glowplug.weights.region import region_digest
from tests.fleet_builder import a_model, a_node, an_event, an_instance
from tests.strategies import events

NOW = 1_700_000_000.0
TABLES: dict[str, type[Any]] = {
    "models": Model,
    "nodes": Node,
    "instances": Instance,
    CORDONS: Cordon,
    LEADERS: Leader,
}
LARGE = 2**62  # decodes, and leaves room to count on
INTS = (0, 1, 2, 8, -1, 100 << 20, 300 << 20, 1 << 53, LARGE, -LARGE)
FLOATS = (0.0, 0.5, -1.0, NOW, NOW - 60, NOW + 60, 1e-300, float(LARGE), -float(LARGE))
NAMES = ("m", "other", "i-1", "i-2", "i-1.1", "node-1", "node-2", "node-1/0", "node-2/0", "emulated", "router-1", "")
ODD = (
    "..",
    "/",
    "a b",
    "\x00",
    "\x1b[2J",
    "\u202e",
    "*.>",
    "x" * 300,
    "file:/weights",
    "http://h:1",
    "prewarmed",
    "🙂",
)
PLAIN: dict[Any, st.SearchStrategy[Any]] = {
    int: st.sampled_from(INTS),
    float: st.sampled_from(FLOATS),
    bool: st.booleans(),
    str: st.sampled_from(NAMES) | st.sampled_from(NAMES) | st.sampled_from(ODD),
    Any: st.sampled_from([None, True, 1, LARGE, "x", [], {"a": [1]}]),
}
NAMED = {
    "instance_id": ("i-1", "i-2", "i-1.1", ""),
    "part_of": ("", "", "i-1", "i-2"),
    "source": ("", "", "i-1", "i-2"),
    "model_key": ("m", "other", ""),
    "key": ("m", "other", ""),
    "node_id": ("node-1", "node-2", ""),
    "target": ("node-1", "any"),
    "gpu_id": ("node-1/0", "node-1/1", "node-2/0", "nowhere", ""),
    "engine": ("emulated", "emulated", "no-engine"),
    "router_id": ("router-1", "router-2", ""),
    "holder": ("i-1", "i-2", "x"),
}
_drawn: dict[Any, st.SearchStrategy[Any]] = {}


def odd(hint: Any) -> st.SearchStrategy[Any]:
    """Values of one annotation, as JSON has them."""
    if hint not in _drawn:
        _drawn[hint] = _odd(hint)
    return _drawn[hint]


def _odd(hint: Any) -> st.SearchStrategy[Any]:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if hint in PLAIN:
        return PLAIN[hint]
    if origin is tuple:
        return st.lists(odd(args[0]), max_size=3)
    if origin is Mapping:
        return st.dictionaries(st.sampled_from(NAMES), odd(args[1]), max_size=2)
    if origin in (UnionType, typing.Union):
        return st.one_of([odd(arg) for arg in args if arg is not type(None)])
    if isinstance(hint, type) and issubclass(hint, StrEnum):
        return st.sampled_from([member.value for member in hint])
    hints = typing.get_type_hints(hint)
    required, optional = {}, {}
    for field in dataclasses.fields(hint):
        names = NAMED.get(field.name) if hints[field.name] is str else None
        drawn = st.sampled_from(names) if names else odd(hints[field.name])
        needed = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        (required if needed else optional)[field.name] = drawn
    return st.fixed_dictionaries(required, optional=optional)


def an_agent() -> AgentController:
    ledger = ByteLedger(a_node("node-1", gpus_mib=(300, 300)).gpus)
    abilities = frozenset({"prewarm", "swap", "stages"})
    return AgentController("node-1", ledger, {"emulated": EngineKind(name="emulated", abilities=abilities)})


def a_placer(system: str) -> PlacerController:
    policies = SYSTEMS[system].policies
    place, evict, prewarm = (choose(room, policies[room]) for room in ("placement", "residency", "prewarming"))
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
    "placer": ("models", "nodes", "instances", CORDONS, LEADERS),
    "autoscaler": ("models", "instances"),
    "prefetcher": ("models", "instances", LEADERS),
    "predictor": ("models",),
    "router": ("models", "instances"),
}
KINDS = sorted(PAYLOADS)
an_odd_event = st.sampled_from(KINDS).flatmap(
    lambda kind: st.tuples(st.just(kind), odd(PAYLOADS[kind]), odd(float), st.sampled_from((0, 1, 2, LARGE)))
)
an_odd_table = st.sampled_from(sorted(TABLES)).flatmap(
    lambda table: st.tuples(st.just(table), st.lists(odd(TABLES[table]), max_size=3))
)
steps = st.lists(
    st.one_of(
        an_odd_event,
        an_odd_table,
        st.sampled_from([0.0, 0.5, 1.0, 20.0, 600.0]),
    ),
    min_size=1,
    max_size=12,
)


class Stage:
    """One controller, fed as its shell feeds it: what does not decode never reaches it."""

    def __init__(self, service: str, system: str) -> None:
        self.controller, self.now_s, self._ids = CONTROLLERS[service](system), NOW, itertools.count(1)
        self._reads = READ[service]
        self.settle()

    def settle(self) -> None:
        """The fleet the odd ones come into: sound rows, and time to know them."""
        sound = {
            "models": {"m": a_model("m")},
            "nodes": {"node-1": a_node("node-1", gpus_mib=(300, 300))},
            "instances": {"i-1": an_instance("i-1", "m")},
        }
        for table in sorted(sound.keys() & set(self._reads)):
            rows: dict[str, Any] = dict(sound[table])  # type: ignore[arg-type]
            self.effects(self.controller.restore(table, rows, self.now_s))
        for _ in range(12):
            self.now_s += 1.0
            self.effects(self.controller.handle(Tick(), self.now_s))

    def take(self, step: Any) -> None:
        if isinstance(step, float):
            self.now_s += step
            self.effects(self.controller.handle(Tick(), self.now_s))
        elif len(step) == 2:
            self.table(*step)
        else:
            self.event(*step)

    def event(self, kind: str, data: Any, at: float, epoch: int) -> None:
        about = {"event_id": f"e-{next(self._ids)}", "type": kind, "occurred_at": at, "issuer": "placer-1"}
        try:
            event = decode(json.dumps(about | {"data": data, "epoch": epoch}).encode())
        except MalformedEvent:
            return
        try:
            self.effects(self.controller.handle(event, self.now_s))
        except StaleEpoch:
            return

    def table(self, table: str, rows: list[Any]) -> None:
        if table not in self._reads:
            return
        name = {"models": "key", "instances": "instance_id", LEADERS: "service"}.get(table, "node_id")
        raw = {row[name]: json.dumps(row).encode() for row in rows}
        self.effects(self.controller.restore(table, read_rows(table, raw, TABLES[table])[0], self.now_s))

    def effects(self, effects: list[Any]) -> None:
        """What goes out again can be written, under a subject, and read by others."""
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
@settings(max_examples=40, suppress_health_check=list(HealthCheck))
@given(system=st.sampled_from(sorted(SYSTEMS)), drawn=steps)
def test_what_decodes_never_breaks_a_controller(service: str, system: str, drawn: list[Any]) -> None:
    stage = Stage(service, system)
    for step in drawn:
        stage.take(step)
    stage.take(1.0)


def mutated(raw: bytes, cuts: list[tuple[int, int, bytes]]) -> bytes:
    """`raw` with stretches of it replaced."""
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


@settings(max_examples=300)
@given(event=an_event_of_any_kind, drawn=cuts)
def test_a_damaged_event_is_malformed_or_an_event_that_can_be_sent_on(event: Event, drawn: list[Any]) -> None:
    try:
        decoded = decode(mutated(encode(event), drawn))
    except MalformedEvent as error:
        assert 0 < len(str(error)) < 400
    else:
        assert decode(encode(decoded)) == decoded


@settings(max_examples=300)
@given(row=a_row, drawn=st.just([]) | cuts)
def test_a_damaged_row_is_named_or_a_row_that_can_be_written_again(row: tuple[str, bytes], drawn: list[Any]) -> None:
    table, raw = row
    key = json.loads(raw).get({"models": "key", "instances": "instance_id", LEADERS: "service"}.get(table, "node_id"))
    rows, unreadable = read_rows(table, {key: mutated(raw, drawn)}, TABLES[table])
    assert len(rows) + len(unreadable) == 1
    for value in rows.values():
        assert from_json(to_json(value), TABLES[table]) == value


@given(junk=st.binary(max_size=300), kind=st.sampled_from([*TABLES.values(), dict[str, Any], list[Node]]))
def test_junk_is_malformed_and_nothing_else_is_raised(junk: bytes, kind: type[Any]) -> None:
    for read in (decode, lambda raw: from_json(raw, kind)):
        try:
            read(junk)
        except MalformedEvent:
            continue


@pytest.mark.parametrize("field", ["occurred_at", "epoch", "schema"])
@pytest.mark.parametrize("number", ["1e400", "9" * 5000, "9" * 40, '"nan"', '"inf"', "-1e300", "NaN"])
def test_a_number_that_nobody_can_mean_is_malformed(field: str, number: str) -> None:
    raw = encode(an_event(PAYLOADS["agent.join"](target="n", instance_id="i")))
    event = json.loads(raw) | {field: "HERE"}
    with pytest.raises(MalformedEvent):
        decode(json.dumps(event).replace('"HERE"', number).encode())


@pytest.mark.parametrize("field", ["kv_bytes", "max_instances", "num_gpus", "keep_alive_s"])
@pytest.mark.parametrize("number", ["1e400", "9" * 5000, "9" * 40, '"nan"', '"inf"', "1e300"])
def test_a_number_of_a_model_that_nobody_can_mean_is_malformed(field: str, number: str) -> None:
    row = json.loads(to_json(a_model())) | {field: "HERE"}
    with pytest.raises(MalformedEvent):
        from_json(json.dumps(row).replace('"HERE"', number).encode(), Model)


def test_engine_arguments_nest_so_deep_and_no_deeper() -> None:
    def nested(depth: int) -> bytes:
        row = json.loads(to_json(a_model())) | {"engine_args": {"a": "HERE"}}
        return json.dumps(row).replace('"HERE"', "[" * depth + "]" * depth).encode()

    assert from_json(nested(8), Model).engine_args
    with pytest.raises(MalformedEvent, match="nested"):
        from_json(nested(500), Model)


def test_an_event_larger_than_the_bus_takes_is_malformed_and_its_error_is_short() -> None:
    whole = an_event(PAYLOADS["agent.join"](target="n", instance_id="i" * (5 << 20)))
    with pytest.raises(MalformedEvent, match="bytes, at most"):
        decode(encode(whole))
    with pytest.raises(MalformedEvent) as caught:
        decode(
            encode(an_event(PAYLOADS["agent.join"](target="n", instance_id="i"))).replace(b"agent.join", b"x" * 99999)
        )
    assert len(str(caught.value)) < 400


def test_a_row_under_the_key_of_another_is_named() -> None:
    rows, unreadable = read_rows("instances", {"i-1": to_json(an_instance("i-2"))}, Instance)
    assert (rows, unreadable) == ({}, {"i-1": "Instance: it is the row of 'i-2'"})
