"""`glowplug logs` without a name."""

from typing import Any

from glowplug.cli import logs
from glowplug.cli.client import FleetClient

LINE = {
    "at": 1.5,
    "level": "info",
    "text": "placed",
    "source": "placer-1",
    "fields": {"model": "smol", "exception": "x"},
}


class FakeFleet:
    def __init__(self) -> None:
        self.asked: list[Any] = []

    def through_console(self, method: str, path: str, json: Any) -> Any:
        assert (method, path) == ("POST", "/api/v1/logs")
        self.asked.append(json)
        return {"lines": [LINE], "cursors": {"placer-1": "r:1"}, "sources": []}


def test_lines_are_followed_with_the_cursors_of_the_last_answer() -> None:
    fleet: Any = FakeFleet()
    assert list(logs.lines_of(fleet, {"level": "info"}, follow=False)) == [LINE]
    assert fleet.asked == [{"level": "info", "cursors": {}}]


def test_a_line_for_people() -> None:
    assert logs.shown(LINE) == "1970-01-01T00:00:01.500Z [info   ] placer-1 | placed model=smol\nx"


def test_the_console_gets_its_key_and_the_token_that_it_passes_on(monkeypatch: Any) -> None:
    fleet = FleetClient({"console": "http://c"}, admin_token="gpa", console_key="gpk")
    given: list[Any] = []
    monkeypatch.setattr(FleetClient, "call", lambda self, *args, **kwargs: given.append(kwargs["headers"]))
    fleet.through_console("POST", "/x")
    assert given == [{"Authorization": "Bearer gpa", "X-Glowplug-Console-Key": "gpk"}]


def test_names_of_processes() -> None:
    assert logs.is_process("placer") and logs.is_process("router-2")
    assert not logs.is_process("smol-chat") and not logs.is_process("routers")
