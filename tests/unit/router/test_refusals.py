"""Requests refused at the door, and floods of them."""

from typing import Any

from glowplug.domain.errors import Unauthorized
from glowplug.services.router.api_errors import refused
from glowplug.services.router.http_request import HttpRequest
from glowplug.services.router.keys import Caller
from glowplug.services.router.reports import BURST, RefusalSample

SECRET = "what nobody else should read"


def refusals(num_kept: int = 100) -> tuple[RefusalSample, list[Any], list[float]]:
    """Refusals, reports, and the clock's time in a list."""
    reported, now = list[Any](), [50.0]
    return RefusalSample("router-1", reported.append, num_kept, clock=lambda: now[0]), reported, now


def take(those: RefusalSample, name: str) -> None:
    those.take(HttpRequest(request_id=name, body=SECRET.encode()), Unauthorized(f"wrong: {SECRET}"))


def test_a_refusal_is_a_row_and_an_event_without_anything_that_was_sent() -> None:
    those, reported, now = refusals()
    take(those, "r-1")
    now[0] = 51.0
    those.take(HttpRequest(request_id="r-2"), refused(503, SECRET, "overloaded", retry_after_s=7.0))
    second, first = those.rows()
    assert (first["request_id"], first["status"], first["error_code"]) == ("r-1", 401, "invalid_api_key")
    assert (first["state"], first["arrived_at"], first["finished_at"], first["model_key"]) == ("refused", 50, 50, "")
    assert (second["request_id"], second["status"], second["retry_after_s"]) == ("r-2", 503, 7.0)
    assert [(fact.request_id, fact.router_id, fact.model_key) for fact in reported] == [
        ("r-1", "router-1", ""),
        ("r-2", "router-1", ""),
    ]
    assert SECRET not in f"{those.rows()} {reported}"


def test_of_a_flood_one_a_second_is_listed_and_says_how_many_were_not() -> None:
    those, reported, now = refusals()
    for number in range(BURST + 30):
        take(those, f"r-{number}")
    assert len(reported) == BURST and not any(fact.num_unlisted for fact in reported)
    now[0] += 1.0
    take(those, "after")
    take(those, "too soon")
    assert [(fact.request_id, fact.num_unlisted) for fact in reported[BURST:]] == [("after", 30)]
    now[0] += 1000.0
    for number in range(BURST + 1):
        take(those, f"later-{number}")
    assert [fact.num_unlisted for fact in reported[BURST + 1 :]] == [1] + [0] * (BURST - 1)


def test_the_last_are_kept() -> None:
    those, _, _ = refusals(num_kept=2)
    for name in ("r-1", "r-2", "r-3"):
        take(those, name)
    assert [row["request_id"] for row in those.rows()] == ["r-3", "r-2"]


def test_a_clock_that_goes_back_lets_no_more_through() -> None:
    those, reported, now = refusals()
    for at in (50.0, 20.0, 50.0, 20.0):
        now[0] = at
        for number in range(BURST):
            take(those, f"{at}-{number}")
    assert len(reported) <= 2 * BURST + 10


def test_the_room_for_refusals_comes_back_with_time_and_is_bounded() -> None:
    those, reported, now = refusals()
    for number in range(BURST):
        take(those, f"r-{number}")
    for at, num in ((50.99, 0), (51.0, 1), (51.98, 1), (52.5, 2), (53.0, 3), (53.4, 3)):
        now[0] = at
        take(those, f"r-{at}")
        assert len(reported) == BURST + num, at


def test_a_refusal_names_its_key_and_no_tenant_without_one() -> None:
    those, reported, _ = refusals()
    for key_id in ("aaaaaaa1", ""):
        those.take(HttpRequest(request_id="r", caller=Caller(tenant="acme", key_id=key_id)), refused(400, "no"))
    assert [(fact.tenant, fact.key_id, fact.retry_after_s) for fact in reported] == [
        ("acme", "aaaaaaa1", 0),
        ("", "", 0),
    ]
    assert [row["key"] for row in those.rows()] == ["", "gp-aaaaaaa1"]
