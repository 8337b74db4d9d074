"""The filter of tap and console."""

import shlex
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from typer.testing import CliRunner

from glowplug.cli.main import app_of
from glowplug.events.commands import StopInstance
from glowplug.events.envelope import PAYLOADS, Event, encode, from_json
from glowplug.events.facts import InstanceReady, NodeBeat, RequestFinished, RouterRequestsFinished
from glowplug.events.filters import EventFilter, ends, node_of, sight, summary
from glowplug.events.subjects import subject
from tests.fleet_builder import a_node, an_instance

READY = InstanceReady(instance=an_instance(gpu_id="node-2/0"))


def seen(payload: Any, issuer: str = "agent-node-2") -> Any:
    return sight(subject(payload), issuer, payload)


def test_an_instance_is_seen_with_its_model_and_node() -> None:
    found = seen(READY)
    assert (found.plane, found.kind, found.model_key, found.node_id, found.entity_id) == (
        "evt", "instance.ready", "m", "node-2", "i-1",
    )  # fmt: skip


def test_a_command_to_an_agent_is_about_its_node() -> None:
    stop = StopInstance(target="node-7", instance_id="i-1", reason="idle")
    assert (seen(stop).plane, seen(stop).entity, seen(stop).node_id) == ("cmd", "agent", "node-7")


def test_json_is_seen_like_classes() -> None:
    plain = {"instance": {"model_key": "m", "workers": [{"node_id": "node-2"}], "instance_id": "i-1", "state": "ready"}}
    assert sight(subject(READY), "agent-node-2", plain) == seen(READY)
    assert summary(plain) == "instance_id=i-1 model_key=m state=ready"
    assert summary(READY) == "instance_id=i-1 model_key=m node_id=node-2 state=ready"
    assert node_of({"workers": "odd"}) == ""


def test_a_beat_is_summed_up_by_its_node() -> None:
    assert summary(NodeBeat(node=a_node())) == "node_id=node-1"
    assert seen(NodeBeat(node=a_node())).node_id == "node-1"


def test_the_command_line_of_a_filter_gives_the_same_filter() -> None:
    asked = EventFilter(
        planes=("evt", "tel"), types=("instance.",), entity="instance", model="m", node="node-1", service="placer",
        entity_id="i-1", text="it's gone",
    )  # fmt: skip
    words = shlex.split(asked.command())
    assert words[:2] == ["glowplug", "tap"] and "it's gone" in words
    options = {word for word in words if word.startswith("--")}
    text = CliRunner().invoke(app_of(), ["tap", "--help"], env={"COLUMNS": "200", "TERM": "dumb"}).output
    assert options == {"--plane", "--type", "--entity", "--model", "--node", "--service", "--id", "--grep"}
    assert not [option for option in options if option not in text]
    assert EventFilter().command() == "glowplug tap"


@pytest.mark.parametrize("text", ["oom", "OOM"])
def test_text_is_found_anywhere_in_any_case(text: str) -> None:
    event = Event(event_id="e", type=READY.TYPE, occurred_at=0.0, issuer="a", data={"reason": "Killed: oom"})
    assert EventFilter(text=text).wants(seen(READY), encode(event))
    assert not EventFilter(text=text + "!").wants(seen(READY), encode(event))


def test_each_end_of_a_report_is_seen_as_an_event() -> None:
    done = msgspec.convert(
        {"model_key": "m", "router_id": "router-1", "instance_id": "i-1", "status": 200, "arrived_at": 1.0,
         "finished_at": 2.0, "queue_s": 0.0, "ttft_s": 0.1, "e2e_s": 1.0, "prompt_tokens": 3, "response_tokens": 4,
         "tokens_exact": True, "cold": False, "request_id": "r-1"},
        RequestFinished,
    )  # fmt: skip
    report = RouterRequestsFinished(router_id="router-1", requests=(done, replace(done, request_id="r/2")))
    event = Event(event_id="e", type=report.TYPE, occurred_at=3.0, issuer="router-1", data=report)
    found = list(ends(from_json(encode(event), dict[str, Any])))
    assert [where for where, _ in found] == [subject(one) for one in report.requests]
    assert [(one["event_id"], one["type"], one["occurred_at"], one["cause_id"]) for _, one in found] == [
        ("e-0", "request.finished", 2.0, "r-1"),
        ("e-1", "request.finished", 2.0, "r/2"),
    ]
    assert msgspec.convert(found[0][1]["data"], RequestFinished) == done
    odd = {"type": report.TYPE, "data": {"requests": [1, {}], "traceparents": "x"}}
    assert [one["data"] for _, one in ends(odd)] == [{}]
    assert not list(ends({"type": "request.waiting", "data": {}}))


def test_telemetry_is_asked_for_by_name() -> None:
    done = PAYLOADS["request.finished"]
    assert done is RequestFinished
    beat = seen(NodeBeat(node=a_node()))
    assert not EventFilter().wants(beat, b"") and EventFilter(planes=("tel",)).wants(beat, b"")
