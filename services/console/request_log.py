"""Requests of the whole fleet: live ones from routers' reports, and the latest `num_kept` that ended. Never holds a
request's text."""

from collections import Counter
from collections.abc import Iterator
from typing import Any, Final

import msgspec

from glowplug.domain.access import prefix_of
from glowplug.domain.snapshot import LiveRequest
from glowplug.events import Event
from glowplug.events.facts import RequestFinished, RequestRejected, RouterRequestsFinished, RouterRequestsReported
from glowplug.services.console.records import Newest
from glowplug.telemetry.tracing import trace_id_of

REPORT_LEASE_S: Final = 3.0
LIVE_STATES: Final = ("held", "dispatched", "streaming")
ENDED_STATES: Final = ("finished", "left", "failed", "refused")


class RequestLine(msgspec.Struct, frozen=True, kw_only=True):
    """A request from its first report to its end, in one form. `state`: held, dispatched, streaming, finished, left,
    failed or refused. Seconds; 0 if unknown.

    `ttft_s`: of streamed answers; for others the first byte is the whole. `tpot_s`: mean time between tokens after
    the first; needs two. `num_unlisted`: refusals before this one without a line."""

    request_id: str
    model_key: str
    router_id: str = ""
    state: str = ""
    arrived_at: float = 0.0
    finished_at: float = 0.0
    status: int = 0
    code: str = ""
    retry_after_s: float = 0.0
    num_unlisted: int = 0
    position: int = 0
    eta_s: float = 0.0
    queue_s: float = 0.0
    ttft_s: float = 0.0
    tpot_s: float = 0.0
    e2e_s: float = 0.0
    prompt_tokens: int = 0
    response_tokens: int = 0
    tokens_exact: bool = False
    stream: bool = False
    cold: bool = False
    emulated: bool = False
    num_continued: int = 0
    instance_id: str = ""
    trace_id: str = ""
    tenant: str = ""
    key_id: str = ""


class RequestPage(msgspec.Struct, frozen=True, kw_only=True):
    """Matching lines, live ones first (oldest first), then ended ones (newest first).

    `num_live` includes those past the bound of a router's report. `states` counts lines that match all but the
    state."""

    now: float
    requests: list[RequestLine]
    num_matching: int
    num_live: int
    num_kept: int
    states: dict[str, int]


class RequestLog:
    def __init__(self, num_kept: int) -> None:
        self._ended: Newest[tuple[str, str], RequestLine] = Newest(num_kept)
        self._reports: dict[str, tuple[float, int, list[RequestLine]]] = {}  # router -> received at, live, lines

    def take(self, event: Event, now_s: float) -> None:
        match event.data:
            case RouterRequestsFinished() as report:
                for fact, traceparent in report.traced():
                    self._end(_finished(fact, trace_id_of(traceparent)))
            case RequestRejected() as fact:
                self._refuse(fact, event)
            case RouterRequestsReported(router_id=router_id, num_live=num_live, requests=requests):
                self._forget_silent(now_s)
                self._reports[router_id] = (now_s, num_live, [_live(router_id, row) for row in requests])

    def page(self, now_s: float, *, model: str = "", state: str = "", text: str = "", limit: int = 200) -> RequestPage:
        """Return matches: `model` and `state` exactly ("live" and "ended" are groups), `text` anywhere in ids, model
        key, tenant, key, code and status."""
        self._forget_silent(now_s)
        wanted = {"live": LIVE_STATES, "ended": ENDED_STATES}.get(state, (state,) if state else ())
        terms = text.lower().split()
        in_any_state = [
            line
            for line in self._lines()
            if model in ("", line.model_key) and all(term in _text(line) for term in terms)
        ]
        matching = [line for line in in_any_state if not wanted or line.state in wanted]
        return RequestPage(
            now=now_s,
            requests=matching[:limit],
            num_matching=len(matching),
            num_live=self._num_live(),
            num_kept=len(self._ended),
            states=Counter(line.state for line in in_any_state),
        )

    def _forget_silent(self, now_s: float) -> None:
        for router_id in [r for r, (at_s, _, _) in self._reports.items() if now_s - at_s > REPORT_LEASE_S]:
            del self._reports[router_id]

    def _lines(self) -> Iterator[RequestLine]:
        live = [line for _, _, lines in self._reports.values() for line in lines if _key(line) not in self._ended]
        yield from sorted(live, key=lambda line: (line.arrived_at, line.request_id))
        yield from reversed(self._ended.values())

    def _num_live(self) -> int:
        """Count reported requests, also past a report's bound, without those ended since."""
        return sum(num - sum(_key(line) in self._ended for line in lines) for _, num, lines in self._reports.values())

    def _end(self, line: RequestLine) -> None:
        known = self._ended.get(_key(line))
        if known is not None and known.state == "refused" and not known.finished_at:
            line = msgspec.structs.replace(line, state="refused", code=known.code, retry_after_s=known.retry_after_s)
        self._ended.put(_key(line), line)

    def _refuse(self, fact: RequestRejected, event: Event) -> None:
        """A known model's refusal arrives before or after the request's end."""
        known = self._ended.get((fact.router_id, fact.request_id))
        if known is not None and known.status == fact.status and known.state != "refused":
            refusal = {"state": "refused", "code": fact.code, "retry_after_s": fact.retry_after_s}
            self._ended[_key(known)] = msgspec.structs.replace(known, **refusal)
            return
        trace_id = trace_id_of(event.traceparent)
        self._end(_line(fact, state="refused", arrived_at=event.occurred_at, trace_id=trace_id))


def _key(line: RequestLine) -> tuple[str, str]:
    return (line.router_id, line.request_id)


def _text(line: RequestLine) -> str:
    whose = line.tenant, line.key_id and prefix_of(line.key_id)
    parts = (line.request_id, line.model_key, line.code, str(line.status or ""), line.instance_id, line.trace_id)
    return " ".join((*parts, *whose)).lower()


def _line(report: LiveRequest | RequestFinished | RequestRejected, **others: Any) -> RequestLine:
    return msgspec.structs.replace(msgspec.convert(report, RequestLine, from_attributes=True), **others)


def _live(router_id: str, row: LiveRequest) -> RequestLine:
    state = row.state if row.state in LIVE_STATES else "dispatched"
    return _line(row, router_id=router_id, state=state, ttft_s=row.first_token_s)


def _finished(fact: RequestFinished, trace_id: str) -> RequestLine:
    num_gaps = fact.response_tokens - 1
    has_gaps = fact.first_token_s and num_gaps > 0
    return _line(
        fact,
        state="finished" if fact.status < 400 else "left" if fact.status == 499 else "failed",
        code=fact.error_code,
        ttft_s=fact.first_token_s,
        tpot_s=max(fact.e2e_s - fact.ttft_s, 0.0) / num_gaps if has_gaps else 0.0,
        trace_id=trace_id,
    )
