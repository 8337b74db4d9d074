"""Log lines for slow or failed requests."""

import logging
from dataclasses import replace

import msgspec
import pytest

from glowplug.events.facts import RequestFinished
from glowplug.services.router.reports import MOST_A_S, SlowLines
from glowplug.telemetry.logs import labelled, more_of

FACT = RequestFinished(
    model_key="smol",
    request_id="req-1",
    router_id="router-1",
    instance_id="i-1",
    status=200,
    arrived_at=10.0,
    finished_at=14.2,
    queue_s=3.1,
    ttft_s=3.5,
    e2e_s=4.2,
    prompt_tokens=1,
    response_tokens=1,
    tokens_exact=True,
    cold=True,
)


def test_the_line_says_how_long_it_waited_and_leads_to_its_trace(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    with labelled("", event_id="e-of-another", event_type="instance.ready"):
        SlowLines().take(FACT, f"00-{'a' * 32}-{'b' * 16}-01")
        [record] = caplog.records
        told = more_of(record)
    assert record.getMessage() == (
        "a request for smol waited 3.10 s for a start of its model and was answered with 200 after 4.20 s"
    )
    assert told == {"request_id": "req-1", "model": "smol", "instance": "i-1", "trace_id": "a" * 32}


def test_a_flood_of_failures_has_few_lines_and_the_next_says_how_many_had_none(
    caplog: pytest.LogCaptureFixture,
) -> None:
    lines = SlowLines()
    failed = FACT.__class__(**{**msgspec.to_builtins(FACT), "status": 502, "cold": False})
    later = FACT.__class__(**{**msgspec.to_builtins(FACT), "status": 502, "finished_at": 15.0})
    for _ in range(MOST_A_S + 7):
        lines.take(failed, "")
    assert len(caplog.records) == MOST_A_S
    lines.take(later, "")
    assert "(7 such requests before it have no line)" in caplog.records[-1].getMessage()


def test_each_second_has_lines_of_its_own(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    lines = SlowLines()
    for finished_at, num in ((10.0, MOST_A_S), (10.9, MOST_A_S), (11.0, 2 * MOST_A_S)):
        for _ in range(MOST_A_S):
            lines.take(replace(FACT, finished_at=finished_at), "")
        assert len(caplog.records) == num


@pytest.mark.parametrize(("status", "level"), [(200, "INFO"), (499, "INFO"), (500, "WARNING")])
def test_a_fault_of_the_server_is_a_warning(caplog: pytest.LogCaptureFixture, status: int, level: str) -> None:
    caplog.set_level(logging.INFO)
    SlowLines().take(replace(FACT, status=status, instance_id="", error_code="x" * (status == 500)), "")
    (record,) = caplog.records
    assert record.levelname == level
    assert (record.instance, record.error_code, record.trace_id) == (None, "x" if status == 500 else None, None)  # type: ignore[attr-defined]
