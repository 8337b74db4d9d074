"""Commands: tap, why, the demo, logs, a streamed chat, a missing fleet."""

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import httpx
import psutil
import pytest
from typer.testing import CliRunner

from glowplug import __version__
from glowplug.cli import logs, tap, up, why
from glowplug.cli.client import FleetClient, connect
from glowplug.cli.demo import HEADERS, DemoRow, idle, write_models
from glowplug.cli.main import app_of
from glowplug.cli.talk import ChatAnswer, streamed
from glowplug.cli.terminal import CliError, NoFleet
from glowplug.events.filters import EventFilter
from glowplug.runtime import model_files
from glowplug_lab.commands.what_if import _why_not

READY = "glowplug.v1.evt.instance.ready.qwen.i-1"
PLACE = "glowplug.v1.cmd.placer.place.any"
START = "glowplug.v1.cmd.agent.start.node-1"
ANSWER_HEADERS = {"content-type": "text/event-stream", "x-request-id": "r-1", "x-glowplug-instance": "i-1"}


@pytest.mark.parametrize(
    ("given", "subject", "data", "shown"),
    [
        ({}, READY, {}, True),
        ({"types": ("instance.ready",)}, READY, {}, True),
        ({"types": ("instance.",)}, READY, {}, True),
        ({"types": ("instance.failed",)}, READY, {}, False),
        ({"model": "qwen"}, READY, {}, True),
        ({"model": "llama"}, READY, {}, False),
        ({"model": "qwen"}, PLACE, {"model": {"key": "qwen"}}, True),
        ({"entity": "placer"}, PLACE, {}, True),
        ({"entity": "instance"}, PLACE, {}, False),
        ({"entity_id": "i-1"}, READY, {}, True),
        ({"entity_id": "i-2"}, PLACE, {"instance_id": "i-2"}, True),
        ({"service": "agent"}, READY, {}, True),
        ({"service": "age"}, READY, {}, False),
        ({"node": "node-1"}, READY, {"instance": {"workers": [{"node_id": "node-1"}]}}, True),
        ({"node": "node-1"}, START, {}, True),
        ({"node": "node-2"}, START, {}, False),
        ({"text": "Out of Memory"}, READY, {"reason": "out of memory"}, True),
        ({"text": "out of luck"}, READY, {"reason": "out of memory"}, False),
        ({"planes": ("tel",)}, READY, {}, False),
        ({}, "somebody.else", {}, False),
    ],
)
def test_tap_shows_what_was_asked_for(given: dict[str, Any], subject: str, data: dict[str, Any], shown: bool) -> None:
    event = {"issuer": "agent-node-1", "data": data}
    assert tap.wants(EventFilter(**given), subject, event, json.dumps(event).encode()) is shown


def test_tap_lines_tell_who_said_what_about_whom() -> None:
    event = {
        "type": "instance.ready",
        "issuer": "agent-1",
        "occurred_at": 1.5,
        "data": {"instance": {"instance_id": "i-1", "model_key": "qwen", "state": "ready"}},
    }
    line = tap._line(READY, event, b"")
    assert "evt instance.ready" in line and "agent-1" in line and "instance_id=i-1 model_key=qwen state=ready" in line
    assert json.loads(tap._json(READY, event, b""))["subject"] == READY


def decision_text(**fields: Any) -> str:
    made = {"made_at": 0.0, "service": "placer", "kind": "place", "policy": "lru", "reason": "x", "decision_id": "d-1"}
    return why.decision_text(made | fields)


def test_why_shows_rule_reason_inputs_and_rivals() -> None:
    text = decision_text(
        policy="first_fit",
        reason="first GPU with room",
        gpu_id="node-1/0",
        inputs={"need_bytes": 245163072, "waited_s": 0.5},
        rivals=[{"name": "node-2/0", "score": 3.0, "why": "too small"}],
    )
    decided = "placer decided to place by first_fit: first GPU with room"
    for word in (decided, "need_bytes  234 MiB", "0.500 s", "node-2/0", "too small"):
        assert word in text


def test_why_of_a_gpu_says_who_lies_there_at_what_worth_and_who_goes_next() -> None:
    holder = {"model": "m", "rung": "prewarmed", "num_bytes": 2 << 30, "asked": 0.25, "climb_s": 2.0, "saves_s": 0.5}
    copy = holder | {"instance_id": "r-1", "worth": 0.25 / (1 << 30), "order": 1, "why": ""}
    busy = holder | {"instance_id": "i-1", "rung": "ready", "worth": 9.0 / (1 << 30), "order": 0, "why": "it is pinned"}
    found = {"gpu_id": "node-1/0", "total_bytes": 8 << 30, "free_bytes": 4 << 30, "holders": [copy, busy]}
    head, titles, *rows = why.price_list(found).splitlines()
    assert head == "node-1/0: 4.0 GiB of 8.0 GiB are free"
    heads = "GOES, INSTANCE, MODEL, RUNG, HOLDS, ASKED, SAVES EACH, S PER GIB, WHY"
    assert re.split(r"  +", titles.strip()) == heads.split(", ")
    assert re.split(r"  +", rows[0].strip()) == ["1", "r-1", "m", "prewarmed", "2.0 GiB", "0.25", "2.000 s", "0.25"]
    assert re.split(r"  +", rows[1].strip())[-1] == "it is pinned" and rows[1].startswith("stays")
    for state, goes in (("draining", "leaves"), ("swapped_out", "-"), ("ready", "stays")):
        shown = why.price_list(found | {"holders": [busy | {"state": state}]}).splitlines()[2]
        assert shown.split()[0] == goes, state
    shown = why.price_list(found | {"holders": [copy | {"shared_bytes": 1 << 30}]})
    assert "2.0 GiB (1.0 GiB shared)" in shown
    assert "nothing uses it" in why.price_list(found | {"holders": []})


def test_why_of_a_gpu_of_which_nothing_was_decided_shows_who_lies_there() -> None:
    rows = [{"instance_id": f"i-{at}", "workers": [{"gpu_id": f"node-1/{at}"}]} for at in (0, 1)]
    decided = [{"decision_id": "d-1", "made_at": 1.0}]

    def about(_service: str, _path: str, **names: str) -> list[dict[str, object]]:
        return decided if names.get("instance") == "i-1" else []

    fleet = cast(Any, SimpleNamespace(rows=about, key_of=str, instances=lambda: rows))
    assert why.decisions_about(fleet, "node-1/1", None, 5) == decided
    assert why.decisions_about(fleet, "node-1/2", None, 5) == []


@pytest.mark.parametrize(
    ("known", "now", "fresh"), [("", "ab", "ab"), ("ab", "bc", "c"), ("ab", "ab", ""), ("a", "xy", "xy")]
)
def test_a_log_that_moved_on_shows_only_what_is_new(known: str, now: str, fresh: str) -> None:
    assert logs._fresh(list(known), list(now)) == list(fresh)


def test_a_demo_row_says_where_the_time_went_and_that_an_engine_is_emulated() -> None:
    answer = ChatAnswer(text="hi", ttft_s=2.5, total_s=3.0, timings_s={"queue": 2.0, "load": 1.0, "router": 0.1})
    row = DemoRow.of("cold", "m", "llamacpp", answer)
    assert row.prefill_s == pytest.approx(0.4)
    cells = dict(zip(HEADERS, row.cells(), strict=True))
    assert (cells["queue"], cells["load"], cells["fetch"], cells["result"]) == ("2.000 s", "1.000 s", "-", "ok")
    assert "EMULATED" in DemoRow.of("cold", "m", "emulated", answer).engine
    assert DemoRow.of("cold", "m", "llamacpp", ChatAnswer()).error


async def test_the_demo_is_idle_when_no_instance_serves_and_says_what_lies_dormant() -> None:
    seen = [["ready", "prewarmed"], ["draining", "prewarmed"], ["prewarmed", "swapped_out"]]

    def answer(_: httpx.Request) -> httpx.Response:
        return httpx.Response(200, json={"data": [{"instance_id": "i", "state": state} for state in seen.pop(0)]})

    async with httpx.AsyncClient(transport=httpx.MockTransport(answer)) as client:
        row = await idle("http://placer", client, "emulated")
    assert (seen, row.model, row.error) == ([], "all, 2 dormant", "")


def test_demo_models_are_valid_and_fall_asleep_soon(tmp_path: Path) -> None:
    write_models(tmp_path / "models", "emulated")
    models = [m for file in (tmp_path / "models").iterdir() for m in model_files.load(file)]
    assert len(models) >= 6
    assert all(0 < m.keep_alive_s < 10 and not m.preload for m in models)


def test_no_fleet_names_the_directory_and_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GLOWPLUG_DATA_URL", raising=False)
    with pytest.raises(NoFleet, match="glowplug up") as refused:
        connect(tmp_path)
    assert str(tmp_path) in str(refused.value)
    assert refused.value.exit_code == 3


@pytest.mark.parametrize("change", [{"urls": 7}, {"urls": {"console": None}}, {"nats_url": []}, {"api_key": None}])
def test_a_fleet_file_of_another_shape_is_one_line(tmp_path: Path, change: dict[str, Any]) -> None:
    own = psutil.Process()
    sound = {"pid": own.pid, "pid_started_at": own.create_time(), "urls": {}}
    sound |= dict.fromkeys(("admin_token", "api_key", "nats_url"), "")
    (tmp_path / "fleet.json").write_text(json.dumps(sound))
    assert connect(tmp_path).urls == {}
    (tmp_path / "fleet.json").write_text(json.dumps(sound | change))
    with pytest.raises(CliError, match="was written by another version"):
        connect(tmp_path)


def test_a_key_of_the_environment_goes_before_the_fleets_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own, names = psutil.Process(), ("admin_token", "api_key", "console_key")
    document = {"pid": own.pid, "pid_started_at": own.create_time(), "urls": {}, "nats_url": ""}
    (tmp_path / "fleet.json").write_text(json.dumps(document | dict.fromkeys(names, "the fleet's")))
    monkeypatch.setenv("GLOWPLUG_ADMIN_TOKEN", "")
    assert connect(tmp_path).admin_token == "the fleet's"
    for name in names:
        monkeypatch.setenv(f"GLOWPLUG_{name.upper()}", "mine")
    assert {getattr(connect(tmp_path), name) for name in names} == {"mine"}


def test_a_fleet_elsewhere_is_named_by_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOWPLUG_AUTOSCALER_URL", "http://far:8005/")
    monkeypatch.setenv("GLOWPLUG_ADMIN_TOKEN", "t")
    monkeypatch.setenv("GLOWPLUG_CONSOLE_KEY", "own")
    fleet = connect(tmp_path)
    assert fleet.url("autoscaler") == "http://far:8005"
    assert (fleet.admin_token, fleet.console_key) == ("t", "own")


def test_up_says_how_to_find_the_command_where_the_path_does_not_lead_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "activate").touch()
    monkeypatch.setenv("PATH", "/nowhere")
    (line,) = up.on_path(tmp_path)
    assert f"source {tmp_path}/activate" in line and f"{tmp_path}/glowplug" in line
    (tmp_path / "glowplug").touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert up.on_path(tmp_path) == []


def test_a_fleet_that_is_not_where_others_look_says_how_to_find_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("GLOWPLUG_STATE_DIR", raising=False)
    assert up._where(tmp_path / ".glowplug") == []
    assert up._where(tmp_path / "mine") == [f"  first: export GLOWPLUG_STATE_DIR={tmp_path}/mine"]
    monkeypatch.setenv("GLOWPLUG_STATE_DIR", str(tmp_path / "mine"))
    assert up._where(tmp_path / "mine") == []


@pytest.mark.parametrize(
    ("given", "console", "others", "data"),
    [
        ({"admin_token": "admin", "api_key": "api"}, "api", "admin", "api"),
        ({"admin_token": "admin", "api_key": "api", "console_key": "own"}, "own", "admin", "api"),
        ({}, "", "", ""),
    ],
    ids=["the console takes the API key", "a key of the console's own", "where nothing is asked nothing is sent"],
)
def test_each_service_gets_its_key(given: dict[str, Any], console: str, others: str, data: str) -> None:
    fleet = FleetClient(urls={}, **given)
    sent = [fleet.headers("console"), fleet.headers("placer"), fleet.headers("router"), fleet.data_headers()]
    assert sent == [{"Authorization": f"Bearer {key}"} if key else {} for key in (console, others, others, data)]


def event(text: str) -> str:
    return f'data: {{"choices": [{{"delta": {{"content": "{text}"}}}}]}}\n\n'


async def ask(status: int, body: str, **headers: str) -> tuple[str, ChatAnswer]:
    given = ANSWER_HEADERS | {name.replace("_", "-"): value for name, value in headers.items()}
    transport = httpx.MockTransport(lambda request: httpx.Response(status, text=body, headers=given))
    answer = ChatAnswer()
    async with httpx.AsyncClient(base_url="http://fleet", transport=transport) as client:
        pieces = [piece async for piece in streamed(client, "m", [{"role": "user", "content": "x"}], answer)]
    return "".join(pieces), answer


async def test_text_ids_and_server_timing() -> None:
    text, answer = await ask(
        200, event("a") + event("b") + "data: [DONE]\n\n", server_timing="queue;dur=1500, router;dur=2"
    )
    assert text == answer.text == "ab"
    assert (answer.request_id, answer.instance_id, answer.emulated) == ("r-1", "i-1", False)
    assert answer.timings_s == {"queue": 1.5, "router": 0.002}
    assert answer.ttft_s is not None and answer.total_s >= answer.ttft_s


async def test_a_held_stream_tells_its_timings_in_a_comment() -> None:
    body = ": glowplug waiting model=m eta_s=3.0\n\n: glowplug ready queue;dur=2000.0, load;dur=900\n\n" + event("a")
    _, answer = await ask(200, body + "data: [DONE]\n\n", x_glowplug_emulated="true")
    assert answer.timings_s == {"queue": 2.0, "load": 0.9}
    assert answer.emulated


async def test_events_without_text_are_no_first_token() -> None:
    _, answer = await ask(200, 'data: {"choices": [], "usage": {}}\n\ndata: [DONE]\n\n')
    assert answer.text == "" and answer.ttft_s is None


QUEUE_FULL = '{"error": {"message": "the queue is full", "type": "rate_limit_error", "code": "queue_full"}}'
BROKEN = 'data: {"error": {"message": "the engine went away"}}\n\n'


@pytest.mark.parametrize(
    ("status", "body", "said"),
    [
        pytest.param(200, event("a"), "without its [DONE]", id="an answer without its end"),
        pytest.param(200, event("a") + BROKEN, "the engine went away", id="an error in the stream, in its words"),
        pytest.param(429, QUEUE_FULL, "the queue is full (queue_full); try again in 7 s", id="a refusal"),
        pytest.param(502, "<html>", "http://fleet/v1/chat/completions answered 502", id="an error of another shape"),
    ],
)
async def test_a_failure_says_what_went_wrong(status: int, body: str, said: str) -> None:
    with pytest.raises(CliError, match=re.escape(said)):
        await ask(status, body, retry_after="7")


def test_the_version_is_asked_for_as_of_any_command() -> None:
    asked = CliRunner().invoke(app_of("version"), ["--version"])
    assert (asked.exit_code, asked.output.strip()) == (0, __version__)


@pytest.mark.parametrize(
    ("point", "shown"),
    [
        ({"met": True, "impossible": "", "lost": 0, "missed": []}, "-"),
        ({"met": False, "impossible": "no GPU holds m", "lost": None, "missed": ["a"]}, "no GPU holds m"),
        (
            {"met": False, "impossible": "", "lost": 0, "missed": ["ttft_p99 of at most 1 s"]},
            "misses ttft_p99 of at most 1 s",
        ),
        ({"met": False, "impossible": "", "lost": 3, "missed": ["a", "b"]}, "3 not answered; misses a; misses b"),
    ],
)
def test_a_plan_says_of_each_number_why_it_is_not_enough(point: dict[str, Any], shown: str) -> None:
    assert _why_not(point) == shown
