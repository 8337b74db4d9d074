"""Build the REST surface of every service: health, metrics, OpenAI-shaped errors, admin token, /docs as plain HTML.

Requests refused by web.py never reach the app, bodies are bounded, and every answer has protective browser headers.
"""

import base64
import hashlib
import hmac
import logging
import math
import uuid
from collections.abc import Awaitable, Callable, Iterator
from html import escape
from http import HTTPStatus
from pathlib import Path
from string import Template
from typing import Any, Final

from fastapi import Depends, FastAPI, Request
from fastapi.exceptions import HTTPException, RequestValidationError
from fastapi.responses import JSONResponse, Response
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException as AnyHTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from glowplug import __version__
from glowplug.domain.access import ApiKey, Role
from glowplug.domain.errors import GlowplugError, RoleRequired, TooLarge, Unauthorized
from glowplug.runtime.identity import PROCESS
from glowplug.runtime.web import MAX_BODY_BYTES, WebRules
from glowplug.telemetry.logs import labelled
from glowplug.telemetry.tally import exposition

_PAGE: Final = Template(Path(__file__).with_name("docs_page.html").read_text(encoding="utf-8"))
_CODES: Final = {404: "not_found", 405: "method_not_allowed", 413: TooLarge.code}
_SAYS: Final = {404: "there is nothing at {path}", 405: "{method} is not allowed at {path}"}  # for the bare phrase
_STYLE: Final = _PAGE.template.partition("<style>")[2].partition("</style>")[0]
_HASH: Final = base64.b64encode(hashlib.sha256(_STYLE.encode()).digest()).decode()
PAGE_HEADERS: Final = {
    "Content-Security-Policy": f"default-src 'none'; style-src 'sha256-{_HASH}'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'"
}
log = logging.getLogger(__name__)
_bearer = HTTPBearer(auto_error=False)
FindKey = Callable[[str], Awaitable[ApiKey | None]]
ACTOR_HEADER: Final = "x-glowplug-actor"  # on whose behalf the console asks; trusted with the admin token
MAX_ACTOR_CHARS: Final = 200
# Defaults of every answer: it runs and loads nothing, is never framed or sniffed.
HEADERS: Final = {
    "Content-Security-Policy": "default-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
}


def error_body(message: str, kind: str, code: str, param: str | None = None) -> dict[str, object]:
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


async def no_keys(_: str) -> ApiKey | None:
    return None


def admin(
    token: str,
    refusal: str = "the admin token is missing or wrong",
    *,
    least: Role = Role.ADMIN,
    find: FindKey = no_keys,
    changes: bool = True,
) -> Callable[..., Awaitable[None]]:
    """Return a dependency that admits holders of the token, or of a living key (`find`) whose role includes `least`;
    open without a token (loopback). Changes are logged with the asker, unless `changes` is false. Raises Unauthorized,
    or RoleRequired for too small a role."""

    async def check(request: Request, given: HTTPAuthorizationCredentials | None = Depends(_bearer)) -> None:
        presented = given.credentials if given else ""
        if _is_open(token, presented):
            actor = request.headers.get(ACTOR_HEADER, "")[:MAX_ACTOR_CHARS] or "the admin token"
        else:
            key = await find(presented) if presented else None
            if key is None or key.role is Role.NONE:
                raise Unauthorized(refusal)
            actor = f"key {key.prefix}"
            if not key.role.includes(least):
                raise RoleRequired(f"The {actor} has the role {key.role}, and this needs the role {least}.")
        if changes and request.method not in ("GET", "HEAD"):
            log.info("%s asked for %s %s", actor if token else "anybody", request.method, request.url.path)

    return check


def _is_open(token: str, presented: str) -> bool:
    """Compare in constant time; open without a token."""
    return not token or hmac.compare_digest(presented.encode(), token.encode())


def opened_by(token: str) -> Callable[[str], bool]:
    def opens(header: str) -> bool:
        kind, _, given = header.partition(" ")
        return _is_open(token, given if kind.lower() == "bearer" else "")

    return opens


def make_app(
    service: str,
    service_id: str,
    *,
    ready: Callable[[], str],
    policies: Callable[[], dict[str, str]],
    description: str = "",
) -> FastAPI:
    """Build an app with the common routes. `ready()` returns "" or why not; `policies()` maps kinds to policies in
    force."""
    title = f"glowplug {service}"
    app = FastAPI(title=title, version=__version__, description=description, docs_url=None, redoc_url=None)

    app.state.about = dict  # more about this process, e.g. its role in an election

    @app.get("/live", tags=["health"])
    async def live() -> dict[str, str]:
        """The process answers."""
        who = {"service": service, "service_id": service_id, "version": __version__, "process": PROCESS}
        return {"status": "ok", **who}

    @app.get("/health", tags=["health"])
    async def health() -> dict[str, Any]:
        """The process answers, and who leads where one of several does."""
        return {**await live(), **app.state.about()}

    @app.get("/ready", tags=["health"], responses={503: {"description": "not ready; `reason` says why"}})
    async def is_ready() -> JSONResponse:
        """The service can do its work."""
        why = ready()
        role = {"role": about["role"]} if "role" in (about := app.state.about()) else {}
        return JSONResponse({"ready": not why, "reason": why, **role}, status_code=503 if why else 200)

    @app.get("/metrics", tags=["health"], response_class=Response)
    async def metrics() -> Response:
        """Prometheus text."""
        return Response(await exposition(), media_type=CONTENT_TYPE_LATEST)

    @app.get("/policies", tags=["policies"])
    async def policies_in_force() -> dict[str, str]:
        """Kind -> name of the policy in force."""
        return policies()

    @app.get("/docs", include_in_schema=False)
    async def docs() -> Response:
        return Response(render(app.openapi()), media_type="text/html", headers=PAGE_HEADERS)

    app.add_middleware(BodyBound)
    _errors(app)
    return app


def refused(error: GlowplugError) -> JSONResponse:
    headers = {"Retry-After": str(max(1, math.ceil(error.retry_after_s)))} if error.retry_after_s is not None else {}
    body = error_body(error.message, error.type, error.code, error.param)
    return JSONResponse(body, status_code=error.status, headers=headers)


def _errors(app: FastAPI) -> None:
    @app.middleware("http")
    async def request_id(request: Request, call_next: Callable[[Request], Awaitable[Response]]) -> Response:
        given = request.headers.get("x-request-id") or uuid.uuid4().hex
        with labelled(request.headers.get("traceparent", ""), request_id=given[:128]):
            try:
                response = await call_next(request)
            except Exception:
                log.exception("%s %s failed", request.method, request.url.path)
                body = error_body("the service failed; its log says why", "server_error", "internal_error")
                response = JSONResponse(body, status_code=500)
        response.headers.setdefault("X-Request-Id", given[:128])  # a passed-on answer keeps its own
        return response

    @app.exception_handler(GlowplugError)
    async def typed(_: Request, error: GlowplugError) -> JSONResponse:
        return refused(error)

    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: RequestValidationError) -> JSONResponse:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        message = f"{where}: {first['msg'].removeprefix('Value error, ')}"
        if first["type"] == "json_invalid":
            message = f"the body is not JSON: {first['ctx']['error']}"
        body = error_body(message, "invalid_request_error", "bad_request", where)
        return JSONResponse(body, status_code=400)

    @app.exception_handler(AnyHTTPException)
    async def plain(request: Request, error: AnyHTTPException) -> JSONResponse:
        code, message = _CODES.get(error.status_code, "http_error"), str(error.detail)
        if message == HTTPStatus(error.status_code).phrase:
            bare = _SAYS.get(error.status_code, message)
            message = bare.format(method=request.method, path=request.url.path[:200])
        return JSONResponse(
            error_body(message, "invalid_request_error", code), error.status_code, headers=error.headers
        )


class BodyBound:
    """Bound bodies by MAX_BODY_BYTES: reading on raises HTTPException (413). Directly around the routes, since FastAPI
    passes that on and middleware would wrap it."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        num_bytes = 0

        async def receive_bounded() -> Message:
            nonlocal num_bytes
            message = await receive()
            num_bytes += len(message.get("body", b""))
            if num_bytes > MAX_BODY_BYTES:
                raise HTTPException(TooLarge.status, f"the body has more than {MAX_BODY_BYTES} bytes")
            return message

        await self._app(scope, receive_bounded, send)


class Guarded:
    """Apply the rules to an app. Pages of `rules.origins` get CORS headers, never cookies."""

    def __init__(self, app: ASGIApp, rules: WebRules) -> None:
        origins = sorted(rules.origins)
        self._app = (
            CORSMiddleware(app, allow_origins=origins, allow_methods=["*"], allow_headers=["*"], expose_headers=["*"])
            if origins
            else app
        )
        self._rules = rules

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        error = self._rules.refusal(scope["method"], headers.getlist("host"), headers.get)

        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                given = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    given.setdefault(name, value)
            await send(message)

        if error is None:
            await self._app(scope, receive, send_guarded)
            return
        answer = refused(error)
        answer.headers["X-Request-Id"] = (headers.get("x-request-id") or uuid.uuid4().hex)[:128]
        await answer(scope, receive, send_guarded)


def render(document: dict[str, Any]) -> str:
    info = document["info"]
    by_tag: dict[str, list[str]] = {}
    for tag, row in _rows(document["paths"]):
        by_tag.setdefault(tag, []).append(row)
    parts = [f"<h2>{escape(tag)}</h2><dl>{''.join(rows)}</dl>" for tag, rows in by_tag.items()]
    return _PAGE.substitute(
        title=escape(f"{info['title']} {info['version']}"),
        description=escape(info.get("description", "")),
        operations="".join(parts),
    )


def _rows(paths: dict[str, dict[str, Any]]) -> Iterator[tuple[str, str]]:
    for path, operations in paths.items():
        for method, operation in operations.items():
            query = [p["name"] for p in operation.get("parameters", ()) if p["in"] == "query"]
            shown = escape(path + ("?" + "&".join(f"{name}=" for name in query) if query else ""))
            what = escape(operation.get("description") or operation.get("summary", ""))
            yield operation.get("tags", ["other"])[0], f"<dt><b>{method.upper()}</b> {shown}</dt><dd>{what}</dd>"
