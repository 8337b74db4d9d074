"""The limits of callers on one data port: admission, header lines, and reports to the other routers
(policies/limits/limiter.py).

Daily and monthly tokens, the other routers' included, survive a restart in a copy on disk. After a crash it may be
`COPY_EVERY_S` old; the other routers then know this one's last reports.
"""

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Callable
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

import msgspec

from glowplug.controllers.effects import Effect
from glowplug.controllers.router.messages import Dispatch, Hold, Reject
from glowplug.domain.access import prefix_of
from glowplug.domain.limits import ScopeUse
from glowplug.domain.model import Model
from glowplug.events.envelope import MalformedEvent, from_json
from glowplug.events.facts import RouterUsageReported
from glowplug.policies.limits.limiter import Limiter
from glowplug.policies.limits.scope import Left, Limit, LimitRefusal, Reservation
from glowplug.policies.prediction.response_length import ResponseLengths
from glowplug.runtime.clock import now_s
from glowplug.services.router.api_errors import ApiError
from glowplug.services.router.disk_copy import replace_file
from glowplug.services.router.http_request import HttpRequest
from glowplug.services.router.wire import MESSAGES, is_anthropic

REPORT_EVERY_S: Final = 0.5
REPORT_SOONEST_S: Final = 0.05  # between two reports, where one is urgent
COPY_EVERY_S: Final = 10.0
COPY_SLICE: Final = 200  # scopes copied without a pause
MAX_COPY_BYTES: Final = 64 << 20
LONGEST_RETRY_S: Final = 60.0  # SDKs retry at once when told to wait longer
UNITS: Final = {
    Limit.REQUESTS: "requests per minute",
    Limit.TOKENS: "tokens per minute",
    Limit.DAY: "tokens per day (UTC)",
    Limit.MONTH: "tokens per month (UTC)",
    Limit.CONCURRENT: "requests at once",
    Limit.QUEUED: "held requests",
}
QUOTAS: Final = (Limit.DAY, Limit.MONTH)
log = logging.getLogger(__name__)


class CallerLimits:
    """The limits of one router's callers. `clock`: epoch seconds. `lengths_of`: a model's answer lengths by key, taught
    here unless `learned` elsewhere."""

    def __init__(
        self,
        router_id: str,
        lengths_of: Callable[[str], ResponseLengths],
        clock: Callable[[], float] = now_s,
        *,
        learned: bool = False,
    ) -> None:
        self.limiter, self._clock = Limiter(router_id), clock
        self.reserved: dict[int, Reservation] = {}  # by ticket
        self._lengths_of, self._learned = lengths_of, learned

    # -- requests --------------------------------------------------------------------------------------------------

    def admit(
        self, request: HttpRequest, model: Model, prompt_tokens: int, max_tokens: int, num_answers: int = 1
    ) -> Reservation:
        """Reserve the prompt and `num_answers` answers, and note the remaining limits for the client. Raises ApiError:
        429."""
        scopes, now_s = request.caller.scopes_at(model), self._clock()
        expected = self._lengths_of(model.key).expect(prompt_tokens, max_tokens) * num_answers
        answer = self.limiter.admit(scopes, prompt_tokens + expected, now_s)
        request.notes += _headers(request.first_path or request.path, *self.limiter.left(scopes, now_s), now_s)
        if type(answer) is Reservation:
            return answer
        assert isinstance(answer, LimitRefusal)
        error = _error(answer)
        if error.retry_after_s is None or error.retry_after_s > LONGEST_RETRY_S:
            request.notes += b"x-should-retry: false\r\n"
        raise error

    def effect(self, effect: Effect, reservation: Reservation) -> Effect:
        """Return the effect on a limited request: Reject in place of Hold if it may not be held."""
        if type(effect) is Hold:
            refusal = self.limiter.hold(reservation)
            if refusal is not None:
                return Reject(effect.ticket, _error(refusal))
        elif type(effect) is Dispatch:
            self.limiter.release(reservation)
        return effect

    def end(self, ticket: int, model_key: str, prompt_tokens: int, response_tokens: int, *, is_whole: bool) -> None:
        """Settle an ended request. `is_whole`: its tokens are one uncut answer's."""
        reservation = self.reserved.pop(ticket, None)
        if reservation is not None:
            self.limiter.end(reservation, prompt_tokens + response_tokens, self._clock())
            if is_whole and not self._learned:
                self._lengths_of(model_key).learn(prompt_tokens, response_tokens)

    # -- the other routers -----------------------------------------------------------------------------------------

    def take(self, report: RouterUsageReported) -> None:
        self.limiter.take(report.router_id, report.number, report.scopes, self._clock())

    async def report(self, put: Callable[[Any], None], is_needed: Callable[[], bool], copy: "LimitsCopy") -> None:
        """Report admissions twice a second while there are limits, urgent ones sooner, and write the copy at times."""
        copied_at, due = self._clock(), asyncio.Event()
        self.limiter.on_urgent = due.set
        next_at = time.monotonic()
        while True:
            now_s = self._clock()
            if time.monotonic() < next_at:
                self._put(put, *self.limiter.report_urgent(now_s))
            else:
                next_at = time.monotonic() + REPORT_EVERY_S
                if is_needed() or len(self.limiter):
                    self._put(put, *self.limiter.report(now_s))
                    if not 0 <= now_s - copied_at < COPY_EVERY_S:
                        copied_at = now_s
                        await copy.write(self.limiter, now_s)
            await asyncio.sleep(REPORT_SOONEST_S)
            due.clear()
            if not self.limiter.urgent:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(max(next_at - time.monotonic(), 0.0)):
                        await due.wait()

    def _put(self, put: Callable[[Any], None], number: int, scopes: dict[str, ScopeUse]) -> None:
        put(RouterUsageReported(router_id=self.limiter.router_id, number=number, scopes=scopes))


class _Copy(msgspec.Struct):
    written_at: float
    routers: list[str]
    scopes: dict[str, ScopeUse]


class LimitsCopy:
    """The copy of the counts: one file, replaced whole."""

    def __init__(self, path: Path) -> None:
        self._path = path

    async def write(self, limiter: Limiter, now_s: float) -> None:
        scopes: dict[str, ScopeUse] = {}
        for num, (scope_id, use) in enumerate(limiter.copy(now_s)):
            if use is not None:
                scopes[scope_id] = use
            if num % COPY_SLICE == COPY_SLICE - 1:
                await asyncio.sleep(0)
        await asyncio.to_thread(self._replace, _Copy(now_s, limiter.peers.others(), scopes))

    def read(self, limiter: Limiter, now_s: float) -> None:
        try:
            copy = from_json(self._path.read_bytes(), _Copy, max_bytes=MAX_COPY_BYTES)
        except FileNotFoundError:
            return
        except (OSError, MalformedEvent) as error:
            log.warning("failed to read the copy of what callers have used, starting without it: %s", error)
            return
        limiter.restore(copy.routers, copy.scopes, copy.written_at, now_s)

    def _replace(self, copy: _Copy) -> None:
        try:
            replace_file(self._path, msgspec.json.encode(copy))
        except OSError as error:
            log.warning("failed to copy to disk what callers have used: %s", error)


# -- messages to the client --------------------------------------------------------------------------------------------


def _error(refusal: LimitRefusal) -> ApiError:
    kind, _, name = refusal.scope_id.partition("/")
    if kind == "key":
        who = f"key {prefix_of(name)}"
    elif kind == "model":
        tenant, _, model_key = name.partition("/")
        who = f"tenant {tenant} at model {model_key}"
    else:
        who = f"tenant {name}"
    what = f"{refusal.amount} {UNITS[refusal.limit]}"
    wait_s = None if refusal.is_for_ever else max(math.ceil(refusal.wait_s), 1)
    if refusal.limit in QUOTAS:
        text = f"The {who} has used its quota of {what}, or too little of it is left for this request."
        return ApiError(429, text, "insufficient_quota", "insufficient_quota", retry_after_s=wait_s)
    is_tokens = refusal.limit is Limit.TOKENS
    if wait_s is None:
        text = f"The request is larger than the limit of {who}: {what}, prompt and answer together."
    else:
        text = f"The limit of {who} is reached: {what}. Please try again in {wait_s} s."
    return ApiError(429, text, "tokens" if is_tokens else "requests", "rate_limit_exceeded", retry_after_s=wait_s)


def _headers(path: bytes, requests: Left | None, tokens: Left | None, now_s: float) -> bytes:
    """Return Anthropic's header lines on its paths, else OpenAI's."""
    if path.startswith(MESSAGES) and is_anthropic(path):  # the first test spares most paths a call
        return _anthropic(b"requests", requests, now_s) + _anthropic(b"tokens", tokens, now_s)
    lines = b""
    if requests is not None:
        lines = _openai_form(b"requests", requests[0]) % (requests[1], _duration(math.ceil(requests[2] * 1000)))
    if tokens is not None:
        lines += _openai_form(b"tokens", tokens[0]) % (tokens[1], _duration(math.ceil(tokens[2] * 1000)))
    return lines


@lru_cache(maxsize=1024)
def _openai_form(kind: bytes, amount: int) -> bytes:
    lines = b"x-ratelimit-limit-%b: %d\r\nx-ratelimit-remaining-%b: %%d\r\nx-ratelimit-reset-%b: %%b\r\n"
    return lines % (kind, amount, kind, kind)


def _anthropic(kind: bytes, left: Left | None, now_s: float) -> bytes:
    if left is None:
        return b""
    amount, remaining, reset_s = left
    reset = datetime.fromtimestamp(math.ceil(now_s + reset_s), UTC).strftime("%Y-%m-%dT%H:%M:%SZ").encode()
    lines = b"anthropic-ratelimit-%b-limit: %d\r\nanthropic-ratelimit-%b-remaining: %d\r\n"
    return (lines + b"anthropic-ratelimit-%b-reset: %b\r\n") % (kind, amount, kind, remaining, kind, reset)


@lru_cache(maxsize=4096)
def _duration(milliseconds: int) -> bytes:
    """Format as OpenAI does: `120ms`, `1.5s`, `6m0s`."""
    if milliseconds < 1000:
        return b"%dms" % milliseconds
    minutes, tenths = divmod(round(milliseconds / 100), 600)
    form = b"%g" % (tenths / 10)
    return b"%dm%bs" % (minutes, form) if minutes else form + b"s"
