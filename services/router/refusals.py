"""Requests refused before they become requests of a model: no key, no such model, a bad body, over a limit.

Anybody who reaches the port can cause refusals, at any rate: only the last ones are kept, and a flood is sampled.
Neither the request nor the error's message, which may quote it, is kept or reported.
"""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, Final

from glowplug.domain.access import prefix_of
from glowplug.domain.errors import GlowplugError
from glowplug.events.facts import RequestRejected
from glowplug.services.router.http_request import HttpRequest

BURST: Final = 20  # refusals listed in a burst
PER_S: Final = 1.0  # refusals listed per second in the long run


class Refusals:
    """The sampled refusals: the last `num_kept` for /v1/requests, and each to `put` as request.rejected. `clock`:
    seconds since the epoch."""

    def __init__(
        self, router_id: str, put: Callable[..., None], num_kept: int, clock: Callable[[], float] = time.time
    ) -> None:
        self._router_id, self._put, self._clock = router_id, put, clock
        self._kept: deque[tuple[float, RequestRejected]] = deque(maxlen=num_kept)
        self._room, self._since = float(BURST), clock()
        self._num_unlisted = 0

    def take(self, request: HttpRequest, error: GlowplugError) -> None:
        """Report one request that was answered with `error`, unless the rate is exceeded."""
        now = self._clock()
        self._room = min(self._room + max(now - self._since, 0.0) * PER_S, float(BURST))
        self._since = now
        if self._room < 1:
            self._num_unlisted += 1
            return
        self._room -= 1
        fact = RequestRejected(
            model_key="",
            request_id=request.request_id,
            router_id=self._router_id,
            status=error.status,
            code=error.code,
            retry_after_s=error.retry_after_s or 0.0,
            num_unlisted=self._num_unlisted,
            tenant=request.caller.tenant if request.caller.key_id else "",
            key_id=request.caller.key_id,
        )
        self._num_unlisted = 0
        self._kept.append((now, fact))
        self._put(fact)

    def rows(self) -> list[dict[str, Any]]:
        """Rows for /v1/requests, newest first, with the fields that a refusal has."""
        return [_row(*kept) for kept in reversed(self._kept)]


def _row(at: float, fact: RequestRejected) -> dict[str, Any]:
    known = asdict(fact) | {"key": prefix_of(fact.key_id)}
    code = known.pop("code")
    return known | {"model": "", "state": "refused", "error_code": code, "arrived_at": at, "finished_at": at}
