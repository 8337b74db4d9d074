"""The requests of the whole fleet: those routers hold and run, as they report them, and the latest that ended.

Pure: it is given events with `now_s` and gives lines. It never holds text of a request. Bounded: `num_kept` requests
that ended, and the latest report of each router, which the router bounds.
"""

from collections import Counter
from collections.abc import Iterator
from typing import Final

import msgspec

from glowplug.domain.access import prefix_of
from glowplug.domain.snapshot import LiveRequest
from glowplug.events import Event
from glowplug.events.facts import RequestFinished, RequestRejected, RouterRequestsFinished, RouterRequestsReported
from glowplug.services.console.events import trace_id_of
from glowplug.services.console.records import Newest, record_of

REPORT_LEASE_S: Final = 3.0  # silence after which a router's requests are no longer shown as under way
LIVE_STATES: Final = ("held", "dispatched", "streaming")
ENDED_STATES: Final = ("finished", "left", "failed", "refused")


class RequestLine(msgspec.Struct, frozen=True, kw_only=True):
    """One request. `state`: held, dispatched, streaming, finished, left, failed or refused. Seconds; 0 where unknown.

    `ttft_s` is of answers that are streamed: of others the first byte is the whole. `tpot_s` is the mean time between
    tokens after the first; it needs two tokens. `num_unlisted` of a refusal: how many before it have no line.
    """

    request_id: str
    model_key: str
    router_id: str
    state: str
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
    """Lines that match, live ones first (oldest first), then the ended (newest first); and how many there are in all.

    `num_live` counts also those past the bound of a router's report. `states` counts the lines that match everything
    but the state.
    """

    now: float
    requests: list[RequestLine]
    num_matching: int
    num_live: int
    num_kept: int
    states: dict[str, int]


class RequestLog:
    def __init__(self, num_kept: int) -> None:
        self._ended: Newest[tuple[str, str], RequestLine] = Newest(num_kept)  # by (router id, request id)
        self._reports: dict[str, tuple[float, int, list[RequestLine]]] = {}  # router -> received at, live, lines

    def take(self, event: Event, now_s: float) -> None:
        """One event; types that are no request's are ignored."""
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
        """What matches: `model` and `state` exactly ("live" and "ended" are groups of states), `text` anywhere in ids,
        model key, tenant, key, code and status."""
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
        """Those reported, also past the bound of a report, less those that have ended since."""
        return sum(num - sum(_key(line) in self._ended for line in lines) for _, num, lines in self._reports.values())

    def _end(self, line: RequestLine) -> None:
        known = self._ended.get(_key(line))
        if known is not None and known.state == "refused" and not known.finished_at:
            line = msgspec.structs.replace(line, state="refused", code=known.code, retry_after_s=known.retry_after_s)
        self._ended.put(_key(line), line)

    def _refuse(self, fact: RequestRejected, event: Event) -> None:
        """A refusal of a known model comes beside the request's end, before it or after it."""
        known = self._ended.get((fact.router_id, fact.request_id))
        if known is not None and known.status == fact.status and known.state != "refused":
            refusal = {"state": "refused", "code": fact.code, "retry_after_s": fact.retry_after_s}
            self._ended[_key(known)] = msgspec.structs.replace(known, **refusal)
            return
        trace_id = trace_id_of(event.traceparent)
        self._end(record_of(RequestLine, fact, state="refused", arrived_at=event.occurred_at, trace_id=trace_id))


def _key(line: RequestLine) -> tuple[str, str]:
    return (line.router_id, line.request_id)


def _text(line: RequestLine) -> str:
    whose = line.tenant, line.key_id and prefix_of(line.key_id)
    parts = (line.request_id, line.model_key, line.code, str(line.status or ""), line.instance_id, line.trace_id)
    return " ".join((*parts, *whose)).lower()


def _live(router_id: str, row: LiveRequest) -> RequestLine:
    state = row.state if row.state in LIVE_STATES else "dispatched"
    return record_of(RequestLine, row, router_id=router_id, state=state, ttft_s=row.first_token_s)


def _finished(fact: RequestFinished, trace_id: str) -> RequestLine:
    num_gaps = fact.response_tokens - 1
    has_gaps = fact.first_token_s and num_gaps > 0
    return record_of(
        RequestLine,
        fact,
        state="finished" if fact.status < 400 else "left" if fact.status == 499 else "failed",
        code=fact.error_code,
        ttft_s=fact.first_token_s,
        tpot_s=max(fact.e2e_s - fact.ttft_s, 0.0) / num_gaps if has_gaps else 0.0,
        trace_id=trace_id,
    )
