"""The REST surface every service shares: health, metrics, OpenAI-shaped errors, the admin token."""

import hmac
import logging
import math
import uuid
from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import Depends, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException

from glowplug import __version__
from glowplug.domain.errors import GlowplugError, Unauthorized
from glowplug.runtime import api_page
from glowplug.runtime.identity import PROCESS
from glowplug.telemetry.logs import of_request
from glowplug.telemetry.tally import exposition

log = logging.getLogger(__name__)
_bearer = HTTPBearer(auto_error=False)


def error_body(message: str, kind: str, code: str, param: str | None = None) -> dict[str, object]:
    """OpenAI's error shape."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def admin(token: str) -> Callable[..., Awaitable[None]]:
    """A dependency that lets only holders of the admin token through; open when no token is set (loopback)."""

    async def check(given: HTTPAuthorizationCredentials | None = Depends(_bearer)) -> None:
        if token and not (given and hmac.compare_digest(given.credentials.encode(), token.encode())):
            raise Unauthorized("the admin token is missing or wrong")

    return check


def make_app(
    service: str,
    service_id: str,
    *,
    ready: Callable[[], str],
    policies: Callable[[], dict[str, str]],
    description: str = "",
) -> FastAPI:
    """An app with the routes every service has. `ready()` returns "" or why the service is not ready;
    `policies()` maps the kind to the policy in force."""
    title = f"glowplug {service}"
    app = FastAPI(title=title, version=__version__, description=description, docs_url=None, redoc_url=None)

    app.state.about = dict  # what else this process says of itself: its role, where processes elect a leader

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
        return Response(api_page.render(app.openapi()), media_type="text/html", headers=api_page.HEADERS)

    _errors(app)
    return app


def refused(error: GlowplugError) -> JSONResponse:
    """An error as an answer."""
    headers = {"Retry-After": str(max(1, math.ceil(error.retry_after_s)))} if error.retry_after_s is not None else {}
    body = error_body(error.message, error.type, error.code, error.param)
    return JSONResponse(body, status_code=error.status, headers=headers)


def _errors(app: FastAPI) -> None:
    @app.middleware("http")
    async def request_id(request: Request, call_next: Callable[[Request], Awaitable[Response]]) -> Response:
        given = request.headers.get("x-request-id") or uuid.uuid4().hex
        with of_request(given[:128], request.headers.get("traceparent", "")):
            try:
                response = await call_next(request)
            except Exception:
                log.exception("%s %s failed", request.method, request.url.path)
                body = error_body("the service failed; its log says why", "server_error", "internal_error")
                response = JSONResponse(body, status_code=500)
        response.headers.setdefault("X-Request-Id", given[:128])  # an answer passed on has that of who gave it
        return response

    @app.exception_handler(GlowplugError)
    async def typed(_: Request, error: GlowplugError) -> JSONResponse:
        return refused(error)

    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: RequestValidationError) -> JSONResponse:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        body = error_body(f"{where}: {first['msg']}", "invalid_request_error", "bad_request", where)
        return JSONResponse(body, status_code=400)

    @app.exception_handler(HTTPException)
    async def plain(_: Request, error: HTTPException) -> JSONResponse:
        code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code, "http_error")
        return JSONResponse(
            error_body(str(error.detail), "invalid_request_error", code), error.status_code, headers=error.headers
        )
