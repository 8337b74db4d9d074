"""Whichever of several processes a call reaches, the one that leads answers it.

A Service of Kubernetes spreads calls over leader and standby alike, so a standby passes its part of the API (`/v1/...`)
on: a redirect would name an address that clients outside cannot reach. While no process leads, reads are answered from
what the standby knows, and changes are refused (503 not_leader).
"""

import logging
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Final

from starlette.requests import Request
from starlette.responses import Response

from glowplug.domain.errors import NotLeader, TooLarge
from glowplug.runtime.leader import Candidate
from glowplug.runtime.rest import refused
from glowplug.runtime.web import MAX_BODY_BYTES

if TYPE_CHECKING:
    import httpx

log = logging.getLogger(__name__)
API: Final = "/v1/"
PASSED_ON: Final = "x-glowplug-passed-on"  # by whom: a call is passed on once
TIMEOUT_S: Final = 10.0
READS: Final = ("GET", "HEAD")
# Of one connection, written anew by each sender, or of the page that sent it: that was judged here, by our own name.
_HOP: Final = frozenset(
    {"connection", "content-length", "date", "host", "keep-alive", "server", "te", "trailer", "transfer-encoding"}
    | {"origin", "sec-fetch-site", "x-forwarded-host"}
)


class ToLeader:
    """HTTP middleware of a service. `candidate()` is None where no leader is elected, or not yet."""

    def __init__(self, candidate: Callable[[], Candidate | None]) -> None:
        self._candidate = candidate
        self._client: httpx.AsyncClient | None = None

    async def __call__(self, request: Request, call_next: Callable[[Request], Awaitable[Response]]) -> Response:
        candidate = self._candidate()
        if candidate is None or candidate.may_act() or not request.url.path.startswith(API):
            return await call_next(request)
        lease = candidate.lease
        elsewhere = lease.url if candidate.leader_id != candidate.service_id else ""
        if elsewhere and PASSED_ON not in request.headers:
            answer = await self._pass_on(request, elsewhere, candidate.service_id)
            if answer is not None:
                return answer
        if request.method in READS:
            return await call_next(request)
        who = f"{candidate.leader_id} at {elsewhere} does, and does not answer" if elsewhere else "no process does"
        return refused(NotLeader(f"this {candidate.service} does not lead now: {who}", retry_after_s=1))

    async def _pass_on(self, request: Request, url: str, by: str) -> Response | None:
        """The leader's answer; None where it does not answer."""
        import httpx  # a tenth of a service's start, and only a standby that is called needs it

        body = b""
        async for part in request.stream():
            body += part
            if len(body) > MAX_BODY_BYTES:
                return refused(TooLarge(f"the body has more than {MAX_BODY_BYTES} bytes"))
        headers = [(k, v) for k, v in request.headers.items() if k not in _HOP]
        self._client = self._client or httpx.AsyncClient(timeout=TIMEOUT_S, trust_env=False)
        try:
            answer = await self._client.request(
                request.method,
                httpx.URL(url).copy_with(raw_path=_target(request)),
                content=body,
                headers=[*headers, (PASSED_ON, by)],
            )
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            log.warning("the leader at %s does not answer: %r", url, error)
            return None
        back = {k: v for k, v in answer.headers.items() if k not in _HOP and k != "content-encoding"}
        return Response(answer.content, answer.status_code, back)

    async def close(self) -> None:
        """Let go of the connections to the leader."""
        if self._client is not None:
            await self._client.aclose()


def _target(request: Request) -> bytes:
    """Path and query as they came, escapes and all."""
    path: bytes = request.scope.get("raw_path") or request.url.path.encode()
    query: bytes = request.scope.get("query_string", b"")
    return path + (b"?" + query if query else b"")
