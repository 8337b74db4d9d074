"""What a newer version writes is read by this one: fields it does not know are passed over, in events and in rows."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from glowplug.domain.hardware import Node
from glowplug.domain.instance import Instance
from glowplug.domain.model import Model
from glowplug.events.envelope import PAYLOADS, MalformedEvent, decode, encode, from_json, to_json
from tests.strategies import events, values

FUTURE = {"from_the_future": {"deep": [1, 2, 3]}}


def with_future(raw: bytes, *path: str) -> bytes:
    """A document whose outermost object, and each on `path`, has one field more."""
    document = json.loads(raw)
    for step in ((), *(path[:i] for i in range(1, len(path) + 1))):
        inner = document
        for name in step:
            inner = inner[name]
        inner.update(FUTURE)
    return json.dumps(document).encode()


@pytest.mark.parametrize("name", sorted(PAYLOADS))
def test_an_event_with_more_fields_is_the_event(name: str) -> None:
    @given(events(PAYLOADS[name]))
    def check(event: Any) -> None:
        assert decode(with_future(encode(event), "data")) == event

    check()


@pytest.mark.parametrize("cls", [Model, Instance, Node])
def test_a_row_with_more_fields_is_the_row(cls: type[Any]) -> None:
    @given(values(cls))
    def check(row: Any) -> None:
        assert from_json(with_future(to_json(row)), cls) == row

    check()


@given(st.sampled_from(["node.dreamt", "placer.divine", ""]))
def test_an_event_of_an_unknown_type_is_malformed_and_nothing_worse(name: str) -> None:
    raw = {"event_id": "e", "type": name, "occurred_at": 0, "issuer": "x", "data": {}}
    with pytest.raises(MalformedEvent):
        decode(json.dumps(raw).encode())
