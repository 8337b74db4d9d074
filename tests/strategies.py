"""Hypothesis strategies for value types, made from their annotations."""

import dataclasses
import math
import typing
from collections.abc import Mapping
from enum import StrEnum
from types import UnionType
from typing import Any

from hypothesis import strategies as st

from glowplug.domain.access import AccessLimits, ApiKey, Tenant
from glowplug.domain.bounds import Bounds, kinds_of, marks_of
from glowplug.domain.instance import MAX_STAGES
from glowplug.domain.model import Model
from glowplug.events import Event

MAX_ITEMS = 2
EXACT = 2**53  # the largest integer every JSON reader holds exactly
LARGEST = 2.0**62  # within the wire's bounds (events/envelope.py)
texts = st.text(st.characters(codec="utf-8", exclude_characters="\x00"), max_size=12)
numbers = st.floats(-LARGEST, LARGEST)
any_json = (
    st.none() | st.booleans() | st.integers(-EXACT, EXACT) | numbers | texts | st.lists(texts, max_size=MAX_ITEMS)
)
PLAIN: dict[Any, st.SearchStrategy[Any]] = {
    str: texts,
    int: st.integers(-EXACT, EXACT),
    float: numbers,
    bool: st.booleans(),
    Any: any_json,
}


SOUND = {int: st.integers(1, EXACT), float: st.floats(0, LARGEST)}  # for types that check their bounds
access_names = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}", fullmatch=True)
CHECKED: dict[type[Any], dict[str, st.SearchStrategy[Any]]] = {  # fields with checks beyond bounds
    AccessLimits: {field.name: st.integers(1, 1 << 48) for field in dataclasses.fields(AccessLimits)},
    Tenant: {"name": access_names, "weight": st.floats(0.001, 1000.0)},
    ApiKey: {
        "key_id": st.from_regex(r"[a-z0-9]{8}", fullmatch=True),
        "tenant": access_names,
        "name": access_names,
        "sha256": st.from_regex(r"[0-9a-f]{64}", fullmatch=True),
        "models": st.lists(texts, min_size=1, max_size=MAX_ITEMS).map(tuple),
    },
}


MOST_OF_MODEL = {
    name: mark.most
    for name, kind in kinds_of(Model).items()
    for mark in marks_of(kind)
    if isinstance(mark, Bounds) and mark.most < math.inf
}


def values(cls: type[Any]) -> st.SearchStrategy[Any]:
    hints = {f.name: typing.get_type_hints(cls)[f.name] for f in dataclasses.fields(cls)}
    plain = SOUND if hasattr(cls, "__post_init__") else {}
    drawn = {name: plain[hint] if hint in plain else of_hint(hint) for name, hint in hints.items()}
    drawn |= CHECKED.get(cls, {})
    return st.fixed_dictionaries(drawn).map(lambda given: cls(**_in_order(given)))


def _in_order(given: dict[str, Any]) -> dict[str, Any]:
    if "num_stages" in given:
        given["num_stages"] = min(given["num_stages"], MAX_STAGES)
    if "min_instances" in given:
        given |= {name: min(given[name], int(most)) for name, most in MOST_OF_MODEL.items()}
        given["min_instances"] = min(given["min_instances"], given["max_instances"])
        given["min_instances"], given["max_instances"] = sorted((given["min_instances"], given["max_instances"]))
    return given


def of_hint(hint: Any) -> st.SearchStrategy[Any]:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is tuple:
        return st.lists(of_hint(args[0]), max_size=MAX_ITEMS).map(tuple)
    if origin is Mapping:
        return st.dictionaries(of_hint(args[0]), of_hint(args[1]), max_size=MAX_ITEMS)
    if origin in (UnionType, typing.Union) and type(None) in args:
        return st.none() | of_hint(next(arg for arg in args if arg is not type(None)))
    if origin is UnionType:
        return st.integers(-EXACT, EXACT) | numbers | texts
    if dataclasses.is_dataclass(hint):
        return values(typing.cast(type[Any], hint))
    if issubclass(hint, StrEnum):
        return st.sampled_from(hint)
    return PLAIN[hint]


def events(payload: type[Any]) -> st.SearchStrategy[Event]:
    return st.builds(
        Event,
        event_id=texts,
        type=st.just(payload.TYPE),
        occurred_at=numbers,
        issuer=texts,
        data=values(payload),
        cause_id=texts,
        traceparent=texts,
        epoch=PLAIN[int],
        schema=st.just(1),
    )
