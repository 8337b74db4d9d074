"""The codec of events."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from glowplug.domain.decision import DecisionRecord
from glowplug.domain.instance import Instance
from glowplug.events import Event, decode, encode
from glowplug.events.envelope import COMMANDS, PAYLOADS, MalformedEvent, from_json, to_json
from glowplug.events.facts import NodeLeft
from tests.strategies import events, values

some = settings(max_examples=6)
payloads = pytest.mark.parametrize("cls", PAYLOADS.values(), ids=lambda cls: cls.TYPE)


def an_event() -> dict[str, Any]:
    payload = NodeLeft(node_id="node-1", reason="silent")
    event = Event(event_id="e-1", type=payload.TYPE, occurred_at=1.5, issuer="agent-1", data=payload)
    return dict(json.loads(encode(event)))


def raw(fields: dict[str, Any]) -> bytes:
    return json.dumps(fields).encode()


@payloads
@some
@given(data=st.data())
def test_decode_reverses_encode(cls: type[Any], data: st.DataObject) -> None:
    event = data.draw(events(cls))
    assert decode(encode(event)) == event


@some
@given(record=values(DecisionRecord))
def test_rows_of_the_store_come_back_the_same(record: DecisionRecord) -> None:
    assert from_json(to_json(record), DecisionRecord) == record


@pytest.mark.parametrize("word", ["7", "007", "1.5", "true", "null", "1e3"])
def test_a_word_that_looks_like_a_number_stays_a_word(word: str) -> None:
    record = DecisionRecord(
        decision_id="d", kind="place", policy="p", service="s", reason="r", made_at=0.0, inputs={"name": word}
    )
    again = from_json(to_json(record), DecisionRecord).inputs["name"]
    assert again == word
    assert type(again) is str


def test_every_type_names_its_entity_or_service_and_is_told_once() -> None:
    assert len({cls.__name__ for cls in PAYLOADS.values()}) == len(PAYLOADS)
    for name in PAYLOADS:
        assert [part.isidentifier() for part in name.split(".")] == [True, True], name
    assert {name.partition(".")[0] for name in COMMANDS} == {"placer", "agent", "prefetcher"}


def test_fields_an_older_writer_does_not_know_have_their_defaults() -> None:
    fields = an_event()
    for name in ("cause_id", "traceparent", "epoch", "schema"):
        del fields[name]
    event = decode(raw(fields))
    assert (event.cause_id, event.traceparent, event.epoch, event.schema) == ("", "", 0, 1)


def test_integers_written_as_text_are_read() -> None:
    """proto3-JSON writes 64-bit integers as text."""
    fields = an_event() | {"epoch": "1763730000123"}
    assert decode(raw(fields)).epoch == 1763730000123


@pytest.mark.parametrize(
    "change",
    [
        {"event_id": None},
        {"occurred_at": "soon"},
        {"type": "no.such"},
        {"type": "placer.divine"},
        {"type": ""},
        {"type": 7},
        {"data": []},
        {"data": {}},
        {"epoch": 1.5},
        {"issuer": "i" * 1025},
        {"data": {"node_id": "n" * 1025, "reason": ""}},
    ],
    ids=lambda change: str(change)[:40],
)
def test_a_wrong_field_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(MalformedEvent):
        decode(raw(an_event() | change))


def test_ids_are_read_up_to_their_bound_and_texts_beyond() -> None:
    longest = {"node_id": "n" * 1024, "reason": "r" * 2000}
    assert decode(raw(an_event() | {"data": longest})).data == NodeLeft(**longest)


@pytest.mark.parametrize("name", ["event_id", "type", "occurred_at", "issuer", "data"])
def test_a_missing_field_is_refused(name: str) -> None:
    fields = an_event()
    del fields[name]
    with pytest.raises(MalformedEvent):
        decode(raw(fields))


@given(junk=st.binary(max_size=200) | st.recursive(st.none() | st.text(), st.lists).map(json.dumps).map(str.encode))
def test_junk_is_refused_and_nothing_else_is_raised(junk: bytes) -> None:
    with pytest.raises(MalformedEvent):
        decode(junk)


@given(cut=st.integers(0, 10_000))
def test_a_cut_event_is_refused(cut: int) -> None:
    whole = raw(an_event())
    with pytest.raises(MalformedEvent):
        decode(whole[: cut % len(whole)])


@pytest.mark.parametrize("junk", [b"", b"[]", b"nope", b'{"instance_id": 3}', b'{"state":"flying"}'])
def test_rows_that_are_no_rows_are_refused(junk: bytes) -> None:
    with pytest.raises(MalformedEvent):
        from_json(junk, Instance)


def test_deep_nesting_is_refused() -> None:
    bomb = b'{"data":' + b'{"a":' * 100_000
    with pytest.raises(MalformedEvent):
        decode(bomb)
