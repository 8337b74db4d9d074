"""Subjects of events."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from glowplug.bus.memory_bus import matches
from glowplug.events import subjects
from glowplug.events.commands import StopInstance
from glowplug.events.document import example
from glowplug.events.envelope import COMMANDS, PAYLOADS
from glowplug.events.facts import (
    InstanceReady,
    ModelUndeployed,
    NodeLeft,
    ServiceStarted,
    UsageRecorded,
    WeightsEvicted,
)
from tests.strategies import values

some = settings(max_examples=6)
payloads = pytest.mark.parametrize("cls", PAYLOADS.values(), ids=lambda cls: cls.TYPE)


@payloads
@some
@given(data=st.data())
def test_parse_agrees_with_subject(cls: type[Any], data: st.DataObject) -> None:
    payload = data.draw(values(cls))
    name = subjects.subject(payload)
    parsed = subjects.parse(name)
    assert f"{parsed.entity}.{parsed.verb}" == cls.TYPE
    assert parsed.plane == ("cmd" if cls.TYPE in COMMANDS else "tel" if subjects.is_telemetry(cls.TYPE) else "evt")
    assert len(name.split(".")) == (6 if parsed.plane == "cmd" else 7)
    assert all(token and not set(token) & set("*> \t\r\n") for token in name.split("."))
    assert name.isprintable()


@payloads
@some
@given(data=st.data())
def test_every_filter_finds_what_it_is_for(cls: type[Any], data: st.DataObject) -> None:
    payload = data.draw(values(cls))
    name = subjects.subject(payload)
    if cls.TYPE in COMMANDS:
        filters = [subjects.commands_to(cls.TYPE.partition(".")[0], payload.target), subjects.COMMANDS_ALL]
        others = [subjects.FACTS, subjects.TELEMETRY]
    else:
        telemetry = subjects.is_telemetry(cls.TYPE)
        whole = subjects.TELEMETRY if telemetry else subjects.USAGE if subjects.is_usage(cls.TYPE) else subjects.FACTS
        filters = [subjects.facts_of(cls.TYPE), whole]
        if not subjects.is_usage(cls.TYPE):
            filters.append(subjects.entity_facts(cls.TYPE.partition(".")[0], telemetry=telemetry))
        others = sorted({*sum(subjects.EVERYTHING.values(), ()), subjects.COMMANDS_ALL} - {whole})
    assert all(matches(pattern, name) for pattern in filters)
    assert not any(matches(pattern, name) for pattern in others)


def test_subjects_read_as_promised() -> None:
    ready = InstanceReady(instance=example(PAYLOADS["instance.ready"]).instance)
    assert subjects.subject(ready) == "glowplug.v1.evt.instance.ready.{model_key}.{instance_id}"
    assert subjects.subject(NodeLeft(node_id="node-1", reason="")) == "glowplug.v1.evt.node.left._.node-1"
    assert subjects.subject(ModelUndeployed(model_key="m")) == "glowplug.v1.evt.model.undeployed.m.m"
    stop = StopInstance(target="node-3", instance_id="i", reason="")
    assert subjects.subject(stop) == "glowplug.v1.cmd.agent.stop.node-3"
    usage = UsageRecorded(router_id="router-1", batch=1, records=())
    assert subjects.subject(usage) == "glowplug.v1.use.usage.recorded._.router-1"
    for name in (subjects.subject(usage), "glowplug.v1.evt.usage.recorded._.router-1"):  # form used up to 0.2
        assert subjects.parse(name).plane == "evt" and subjects.is_subject_of(name, usage)
    started = ServiceStarted(service="router", service_id="router-1", url="", version="")
    assert subjects.subject(started) == "glowplug.v1.evt.service.started._.router-1"


def test_a_subject_is_never_longer_than_a_server_takes_and_long_ids_stay_apart() -> None:
    """NATS ends connections at 4,096 bytes of its line."""
    names = {
        subjects.subject(WeightsEvicted(node_id="n", digest=1023 * "ü" + end, num_bytes=0, reason="")) for end in "ab"
    }
    assert len(names) == 2 and all(len(name.encode()) < 1024 for name in names)
    assert len(subjects.subject(StopInstance(target=1024 * "ü", instance_id="", reason="")).encode()) < 1024
    plain = subjects.subject(NodeLeft(node_id="n" * subjects.MAX_TOKEN_CHARS, reason=""))
    assert plain.endswith("n" * subjects.MAX_TOKEN_CHARS)


def test_a_subject_without_model_or_id_parses_to_nothing_there() -> None:
    parsed = subjects.parse(subjects.subject(NodeLeft(node_id="", reason="")))
    assert (parsed.model_key, parsed.entity_id) == ("", "")


OTHERS = ("glowplug.v2.evt.a.b.c.d", "glowplug.v1.evt.a.b.c", "glowplug.v1.cmd.a.b", "glowplug.v1.x.a.b.c.d")


@pytest.mark.parametrize("text", ["", "glowplug", "a.b.c", *OTHERS])
def test_what_is_no_subject_of_ours_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="subject"):
        subjects.parse(text)


@pytest.mark.parametrize(
    ("pattern", "name", "agrees"),
    [
        ("a.b", "a.b", True),
        ("a.*", "a.b", True),
        ("a.>", "a.b.c", True),
        ("a.>", "a", False),
        ("a.*", "a.b.c", False),
        ("a.b.c", "a.b", False),
        ("*.b", "a.c", False),
        (">", "a", True),
    ],
)
def test_wildcards_are_those_of_nats(pattern: str, name: str, agrees: bool) -> None:
    assert matches(pattern, name) is agrees
