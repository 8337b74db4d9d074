"""`glowplug requests`."""

import re
from typing import Any

import msgspec
import pytest
from typer.testing import CliRunner

from glowplug.cli import requests
from glowplug.cli.client import FleetClient
from glowplug.cli.main import app_of
from glowplug.services.console.request_log import ENDED_STATES, LIVE_STATES, RequestLine, RequestPage

HELD = RequestLine(request_id="r-h", model_key="m", router_id="t", state="held", arrived_at=90.0, position=2, eta_s=4.5)
DONE = RequestLine(
    request_id="r-d", model_key="m", router_id="t", state="finished", arrived_at=90.0, finished_at=92.0, status=200,
    e2e_s=2.0, queue_s=0.25, response_tokens=7, instance_id="i-1", tenant="lab", key_id="abcdefgh",
)  # fmt: skip
REFUSED = RequestLine(
    request_id="r-r", model_key="", router_id="t", state="refused", arrived_at=90.0, status=401, code="invalid_api_key",
    num_unlisted=30,
)  # fmt: skip


class Console(FleetClient):
    asked: dict[str, Any]

    def get(self, service: str, path: str, **params: Any) -> Any:
        if service == "autoscaler":
            return {"key": path.rpartition("/")[2].lower()}
        assert (service, path) == ("console", "/api/v1/requests")
        type(self).asked = params
        lines = [HELD, DONE, REFUSED]
        page = RequestPage(now=100.0, requests=lines, num_matching=5, num_live=1, num_kept=4, states={})
        return msgspec.to_builtins(page)


@pytest.fixture(autouse=True)
def console(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requests, "connect", lambda _: Console({}))


def test_each_request_is_a_line_and_a_refusal_says_why() -> None:
    done = CliRunner().invoke(
        app_of("requests"), ["requests", "--model", "M", "--state", "ended", "-q", "x", "-n", "3"]
    )
    assert done.exit_code == 0, done.output
    assert Console.asked == {"model": "m", "state": "ended", "q": "x", "limit": 3}
    held, finished, refused = ([*re.split(r"  +", line)][1:] for line in done.stdout.splitlines()[1:])
    in_queue = "number 2 in the queue, about 4.5 s"
    assert held == ["r-h", "-", "-", "m", "held", in_queue, "10.000 s", "-", "10.000 s", "-", "-"]
    assert finished == ["r-d", "lab", "gp-abcdefgh", "m", "finished", "200", "0.250 s", "-", "2.000 s", "~7", "i-1"]
    assert refused[:6] == ["r-r", "-", "-", "-", "refused", "401 invalid_api_key (and 30 refused before it)"]
    assert "2 more match" in done.stderr


def test_without_filters_all_are_asked_for() -> None:
    assert CliRunner().invoke(app_of("requests"), ["requests"]).exit_code == 0
    assert Console.asked == {"model": "", "state": "", "q": "", "limit": 20}


def test_the_states_are_those_of_the_console() -> None:
    assert {kind.value for kind in requests.RequestKind} == {"live", "ended", *LIVE_STATES, *ENDED_STATES}
