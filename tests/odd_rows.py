"""Hypothesis strategies for odd rows and events. Most decode: they have names of one small fleet, so that they refer to
each other, and extreme numbers and texts."""

import dataclasses
import json
import typing
from collections.abc import Mapping
from dataclasses import replace
from enum import StrEnum
from types import UnionType
from typing import Any

import msgspec
from hypothesis import strategies as st

from glowplug.controllers.autoscaler.reads import READS as AUTOSCALER
from glowplug.controllers.placer.reads import READS as PLACER
from glowplug.domain.instance import InstanceState, Worker
from glowplug.domain.model import MAX_BYTES, WeightsRef
from glowplug.events.commands import FetchWeights, PlaceInstance, StartInstance, StopInstance
from glowplug.events.envelope import PAYLOADS
from glowplug.events.facts import (
    InstanceFailed,
    InstancePrewarmed,
    InstanceReady,
    InstanceStarting,
    InstanceSwappedOut,
    ModelDeployed,
    NodeBeat,
)
from glowplug.state.rows import KEYS
from tests.fleet_builder import a_model, a_node, an_instance

NOW = 1_700_000_000.0
TABLES = {**PLACER.tables, **AUTOSCALER.tables}
LARGE = 2**53  # decodes, with room for counts and products
INTS = (0, 1, 2, 8, -1, 100 << 20, 300 << 20, LARGE, -LARGE)
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
NAMED: dict[str, tuple[str, ...]] = {
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
# Odd values within the bounds that these types check.
SOUND: dict[Any, st.SearchStrategy[Any]] = {
    int: st.sampled_from([n for n in INTS if n > 0]),
    float: st.sampled_from([n for n in FLOATS if n >= 0]),
}
COUNTED: dict[str, tuple[int, ...]] = {
    "weights_bytes": (1 << 20, 100 << 20, 100 << 20, MAX_BYTES),
    "kv_bytes": (0, 1 << 20, 100 << 20, MAX_BYTES),
    "num_stages": (0, 1, 1, 2, 3, 256),
    "max_concurrency": (0, 1, 8, 1 << 20, LARGE),
    "context_tokens": (1, 2048, 1 << 32),
    "min_instances": (0, 1),
    "max_instances": (1, 2, 10_000),
    "num_gpus": (1, 1, 1, 2, 1024),
}
_drawn: dict[Any, st.SearchStrategy[Any]] = {}


def odd(hint: Any) -> st.SearchStrategy[Any]:
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
    required: dict[str, st.SearchStrategy[Any]] = {}
    optional: dict[str, st.SearchStrategy[Any]] = {}
    for field in dataclasses.fields(hint):
        needed = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        (required if needed else optional)[field.name] = _of_field(hint, field.name, hints[field.name])
    return st.fixed_dictionaries(required, optional=optional)


KINDS = sorted(PAYLOADS)


def _of_field(cls: type[Any], name: str, hint: Any) -> st.SearchStrategy[Any]:
    names = NAMED.get(name) if hint is str else COUNTED.get(name)
    if names:
        return st.sampled_from(names)
    return SOUND[hint] if hasattr(cls, "__post_init__") and hint in SOUND else odd(hint)


def tweaked(sound: Any) -> st.SearchStrategy[Any]:
    plain: dict[str, Any] = msgspec.to_builtins(sound)
    holders: list[tuple[str | None, type[Any]]] = [(None, type(sound))]
    holders += [(name, type(getattr(sound, name))) for name in ("instance", "model", "node") if hasattr(sound, name)]

    def change(drawn: list[tuple[str | None, str, Any]]) -> Any:
        made = {name: dict(value) if isinstance(value, dict) else value for name, value in plain.items()}
        for holder, field, value in drawn:
            (made[holder] if holder else made)[field] = value
        return made

    changes = [
        st.tuples(st.just(holder), st.just(name), _of_field(cls, name, typing.get_type_hints(cls)[name]))
        for holder, cls in holders
        for name in (field.name for field in dataclasses.fields(cls))
    ]
    return st.lists(st.one_of(changes), max_size=2).map(change)


def an_event_of(kind: str, data: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.tuples(st.just(kind), data, odd(float), st.sampled_from((0, 1, 2, LARGE)))


def _worker(gpu_id: str, num_bytes: int) -> Worker:
    return Worker(worker_id=f"w-{gpu_id}", node_id="node-1", gpu_id=gpu_id, num_bytes=num_bytes)


ABILITIES = ("emulated:prewarm", "emulated:swap", "emulated:stages")
READY = an_instance("i-1", "m", revision=3)
SOUND_PAYLOADS: tuple[Any, ...] = (
    PlaceInstance(instance_id="i-2", model=a_model("m"), reason="asked", wanted_at=NOW),
    StartInstance(
        target="node-1",
        instance_id="i-2",
        model=a_model("m"),
        workers=(_worker("node-1/0", 100 << 20),),
        decision_id="d-1",
    ),
    StopInstance(target="node-1", instance_id="i-2", reason="idle"),
    FetchWeights(target="node-1", model_key="m", weights=WeightsRef(uri="file:/weights", num_bytes=1 << 20)),
    InstanceStarting(instance=replace(READY, state=InstanceState.STARTING)),
    InstanceReady(instance=READY),
    InstanceReady(instance=an_instance("i-2", "other", gpu_id="node-2/0")),
    InstancePrewarmed(instance=replace(READY, state=InstanceState.PREWARMED, replica=True)),
    InstanceSwappedOut(instance=replace(READY, state=InstanceState.SWAPPED_OUT)),
    InstanceFailed(instance=replace(READY, state=InstanceState.FAILED)),
    ModelDeployed(model=a_model("m", min_instances=1, kv_bytes=1 << 20)),
    ModelDeployed(model=a_model("other", max_instances=3)),
    NodeBeat(
        node=a_node("node-2", gpus_mib=(300,), abilities=("emulated:prewarm", "emulated:swap", "emulated:stages"))
    ),
)
an_odd_event = st.one_of([an_event_of(kind, odd(PAYLOADS[kind])) for kind in KINDS])
a_tweaked_event = st.one_of([an_event_of(sound.TYPE, tweaked(sound)) for sound in SOUND_PAYLOADS])
an_odd_table = st.one_of([st.tuples(st.just(name), st.lists(odd(TABLES[name]), max_size=3)) for name in sorted(TABLES)])
SOUND_ROWS: tuple[tuple[str, Any], ...] = (("instances", READY), ("models", a_model("m")), ("nodes", a_node("node-1")))
a_tweaked_table = st.one_of(
    [st.tuples(st.just(table), st.lists(tweaked(sound), min_size=1, max_size=2)) for table, sound in SOUND_ROWS]
)
passing = st.sampled_from([0.0, 0.5, 1.0, 20.0, 600.0])
steps = st.lists(
    st.one_of(an_odd_event, a_tweaked_event, a_tweaked_event, an_odd_table, a_tweaked_table, passing),
    min_size=4,
    max_size=14,
)


def event_bytes(number: int, kind: str, data: Any, at: float, epoch: int) -> bytes:
    about = {"event_id": f"e-{number}", "type": kind, "occurred_at": at, "issuer": "placer-1", "epoch": epoch}
    return json.dumps(about | {"data": data}).encode()


def key_of(table: str, row: Mapping[str, Any]) -> str:
    key: str = row[KEYS.get(table, "node_id")]
    return key
