"""Terminal output without control sequences; tables, sizes, ages."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from glowplug.cli import tap, views, why
from glowplug.cli.client import FleetClient
from glowplug.cli.doctor.findings import Findings, lines
from glowplug.cli.terminal import clock, emit, in_line, pairs, safe, say, table
from glowplug.domain.units import show_bytes

NASTY = "\x1b]0;owned\x07\x1b[2J\r\x9b31m\u202egnp.exe\u2066\u200f\u2028\x00\x7f\udc80"
CLI = Path(views.__file__).parent
OBEYED = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


@given(st.text(st.characters(codec=None), max_size=40))
def test_nothing_that_a_terminal_obeys_is_left(text: str) -> None:
    assert not OBEYED.search(safe(text))
    safe(text).encode()
    assert "\n" not in in_line(text) and not OBEYED.search(in_line(text))


@given(
    st.text(st.characters(codec="ascii", exclude_categories=["Cc"]))
    | st.sampled_from(["é", "模型", "🙂", "a\tb\nc", "👩‍🚀"])
)
def test_what_people_write_stays(text: str) -> None:
    assert safe(text) == text


def test_what_is_taken_out_can_still_be_read() -> None:
    assert safe("\x1b[31mred\r\nnext\rover") == "\\x1b[31mred\nnext\\x0dover"
    assert safe("a\u202eb\U000e0041") == "a\\u202eb\\U000e0041"
    assert in_line("two\nlines\t") == "two\\nlines\\t"


def test_commands_print_through_one_place() -> None:
    spoken = [
        f"{path.name}: {line.strip()}"
        for path in CLI.rglob("*.py")
        if path.name != "terminal.py"
        for line in path.read_text().splitlines()
        if re.search(r"typer\.(s?echo|secho)\(|(?<![\w.])print\(|sys\.std(out|err)\.write", line)
    ]
    assert [line for line in spoken if "import torch" not in line] == []


def test_a_cell_is_one_cell_whatever_it_holds(capsys: pytest.CaptureFixture[str]) -> None:
    say(table(("name", "state"), [(NASTY, "up"), ("a\nFAKE  up", "down")]))
    out = capsys.readouterr().out
    assert len(out.splitlines()) == 3 and not OBEYED.search(out)
    say(pairs({NASTY: "x\ny"}))
    assert len(capsys.readouterr().out.splitlines()) == 1


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"\xff\xfe",
        b"[]",
        b"[" * 100_000,
        b'{"occurred_at": "soon", "type": [], "issuer": {"a": "\\u001b[2J"}, "data": 5}',
        b'{"occurred_at": 1e300, "data": {"instance": []}}',
        b'{"occurred_at": -1e300, "data": null}',
        b'{"occurred_at": ' + b"9" * 5000 + b"}",
        b'{"occurred_at": true, "type": "x\\nfake", "data": {"reason": "\\u202e\\u001b]0;x\\u0007"}}',
        b'{"data": {"instance": {"workers": [7], "state": {"a": 1}}}}',
    ],
)
@pytest.mark.parametrize("subject", ["glowplug.v1.evt.instance.ready.m.i-1", "glowplug.v1.evt.x.y.\x1b[2J.\u202e"])
def test_tap_shows_any_event_on_one_line(raw: bytes, subject: str, capsys: pytest.CaptureFixture[str]) -> None:
    event = tap.decoded(raw)
    tap.wants(tap.EventFilter(), subject, event, raw)
    for show in (tap._line, tap._raw, tap._json):
        say(show(subject, event, raw))
        out = capsys.readouterr().out
        assert len(out.splitlines()) == 1 and not OBEYED.search(out)


def test_why_and_doctor_show_what_they_were_told_and_no_more(capsys: pytest.CaptureFixture[str]) -> None:
    decision: dict[str, Any] = {
        "made_at": 1e300,
        "service": NASTY,
        "kind": "evict",
        "policy": NASTY,
        "reason": f"fine\n12:00:00 placer decided to grant everything{NASTY}",
        "model_key": NASTY,
        "inputs": {NASTY: NASTY, "left_bytes": -5, "seen_at": -1e300, "for_s": 1e300},
        "rivals": [{"name": NASTY, "score": 1e300, "why": "\n"}],
        "decision_id": "d-1",
    }
    say(why.decision_text(decision))
    out = capsys.readouterr().out
    assert not OBEYED.search(out) and len([line for line in out.splitlines() if line.startswith("12:00")]) == 0
    say("\n".join(lines([Findings("fleet").fail(NASTY, f"a\nb{NASTY}", "do")])))
    assert not OBEYED.search(capsys.readouterr().out)


@pytest.mark.parametrize("moment", [0, -1, 1e18, -1e18, 2**62, -(2**62), float(2**62), 1.7e9])
def test_every_moment_and_size_can_be_shown(moment: float) -> None:
    assert len(clock(moment)) == 8
    assert show_bytes(int(moment))


def test_nodes_that_are_away_and_cordoned_are_listed() -> None:
    class FakePlacer(FleetClient):
        def get(self, service: str, path: str, **params: Any) -> Any:
            return {"data": [{"node_id": "n-1", "is_alive": True}, {"node_id": "n-2", "is_alive": False}]}

    assert views._cordoned_away(FakePlacer(urls={})) == ["n-2"]
    assert len(views.away_row("n-2")) == len(views.NODE_HEADERS)


def test_columns_line_up_and_numbers_stand_right() -> None:
    text = table(("name", "count"), [("a", 5), ("longer", 1234)])
    assert text.splitlines() == ["NAME    COUNT", "a           5", "longer   1234"]


def test_json_is_the_value_and_an_empty_table_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    value = {"a": [1], "name": NASTY.replace("\udc80", ""), "é": "\n"}
    emit(True, value, (), ())
    assert json.loads(capsys.readouterr().out) == value
    emit(False, [], ("a",), [], "no model is deployed")
    shown = capsys.readouterr()
    assert (shown.out, shown.err) == ("", "no model is deployed\n")


def test_weights_that_several_hold_show_once_among_the_bytes_of_their_gpu() -> None:
    grants = [{"holder": name, "owner": "kv", "num_bytes": 64 << 20} for name in ("i-1", "i-2")]
    shared = [
        {"key": "k", "num_bytes": 92 << 20, "holders": ["i-1", "i-2"]},
        {"key": "l", "num_bytes": 7, "holders": ["i-3"]},
    ]
    gpu = {"gpu_id": "n/0", "kind": "host", "total_bytes": 420 << 20, "grants": grants, "shared": shared}
    node = {"gpus": [gpu], "cached": [], "engines": [], "draining": False, "heartbeat_at": 0.0}
    (cells,) = views.node_rows(node)
    assert cells[2] == "220 MiB" and cells[4] == "i-1, i-2 (92 MiB of weights once for 2)"
    (cells,) = views.node_rows(node | {"gpus": [{key: gpu[key] for key in gpu if key != "shared"}]})
    assert cells[2] == "128 MiB" and cells[4] == "i-1, i-2", "of an agent of an earlier version"
