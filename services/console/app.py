"""The REST surface: the OTLP receiver, the trace and fleet APIs, the page, and what the page asks of other services."""

import hashlib
import time
from collections.abc import Callable
from importlib.resources import files
from pathlib import PurePath
from typing import Final

from fastapi import FastAPI, Request
from fastapi.responses import Response
from starlette.middleware import Middleware

from glowplug.runtime.rest import make_app
from services.console import decisions, events, fleet_api, forecasts, jaeger, login, otlp, passing, prices, trace_api
from services.console.decisions import DecisionLog
from services.console.events import EventLog
from services.console.fleet_view import FleetView
from services.console.forecasts import Forecasts
from services.console.login import Access
from services.console.metrics import ConsoleMetrics
from services.console.model_detail import StartHistory
from services.console.otlp import Receiver
from services.console.prices import Prices
from services.console.request_log import RequestLog
from services.console.settings import ConsoleSettings
from services.console.stream import Hub
from services.console.trace_store import TraceDisk, TraceStore
from services.console.upstream import Addresses, Upstream

PAGE_HEADERS: Final = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",
}
_PATHS: Final = {"index.html": "/", "login.html": "/login"}
_TYPES: Final = {".js": "text/javascript", ".css": "text/css", ".html": "text/html", ".svg": "image/svg+xml"}


class Console:
    """Everything the console holds. Build one, then `build_app` it."""

    def __init__(
        self, settings: ConsoleSettings, metrics: ConsoleMetrics, clock: Callable[[], float] = time.time
    ) -> None:
        self.settings, self.metrics, self.clock = settings, metrics, clock
        self.access = Access(settings.console_key or settings.api_key, settings.console_session_s, clock)
        self.view = FleetView()
        self.starts = StartHistory()
        self.traces = TraceStore(
            max_traces=settings.trace_max_traces,
            max_bytes=settings.trace_max_bytes,
            max_spans_per_trace=settings.trace_max_spans,
        )
        self.hub = Hub(queue_limit=settings.stream_queue, max_clients=settings.stream_max_clients)
        self.requests = RequestLog(settings.requests_shown)
        self.events = EventLog(
            max_events=settings.events_kept, max_bytes=settings.events_max_bytes, watch_limit=settings.events_per_beat
        )
        self.decisions = DecisionLog(max_decisions=settings.decisions_kept)
        addresses = {name: getattr(settings, f"{name}_url") for name in ("router", "autoscaler", "placer", "predictor")}
        self.upstream = Upstream(Addresses(addresses), max_connections=2 * settings.chat_max_streams)

    def open_disk(self) -> None:
        """Read the traces of the last run and write those to come. Blocks; call before anything is served."""
        settings = self.settings
        path = settings.state_dir / "console" / "traces.sqlite"  # a pod's service id changes, what it has seen does not
        disk = TraceDisk(
            path,
            max_bytes=settings.trace_max_bytes,
            keep_content=settings.log_prompts,
            on_failure=self.metrics.disk_dropped.inc,
        )
        self.traces.restore(disk)


def build_app(console: Console) -> FastAPI:
    """Ready from the start: the console takes traces and shows what it has whether bus and store answer or not."""
    app = make_app(
        "console",
        console.settings.service_id or "console-1",
        ready=lambda: "",
        policies=dict,
        description="Receives the fleet's traces and shows fleet and traces on one page; passes operator actions and "
        "chats on to the services that own them.",
    )
    receiver = Receiver(console.settings, console.traces, console.metrics, console.hub.trace_changed)
    app.include_router(otlp.routes(receiver))
    app.include_router(trace_api.routes(console.traces))
    app.include_router(jaeger.routes(console.traces, console.clock))
    app.include_router(
        fleet_api.routes(console.view, console.hub, console.requests, console.starts, console.decisions, console.clock)
    )
    app.include_router(decisions.routes(console.decisions, console.events))
    settings = console.settings
    app.include_router(
        events.routes(console.events, max_watchers=settings.events_max_watchers, beat_s=settings.events_beat_s)
    )
    app.include_router(forecasts.routes(Forecasts(console.upstream, console.clock)))
    app.include_router(prices.routes(Prices(console.upstream, console.clock)))
    app.include_router(passing.action_routes(console.upstream, settings.action_timeout_s))
    app.include_router(
        passing.chat_routes(
            console.upstream,
            max_body_bytes=settings.chat_max_body_bytes,
            max_chats=settings.chat_max_streams,
            silence_s=settings.chat_silence_s,
            router_key="" if settings.console_key else settings.api_key,
        )
    )
    cookie = login.cookie_name(settings.port)
    app.include_router(login.routes(console.access, cookie))
    _page(app)
    if console.access.is_asked:  # innermost: a refusal gets its request id from outside
        app.user_middleware.append(Middleware(login.Locked, access=console.access, cookie=cookie))
    return app


def _page(app: FastAPI) -> None:
    """Every file of the page has one fixed route: no path comes from a client. The document names every module, so that
    a browser asks for all of them at once and not as it comes upon each import."""
    found = {entry.name: entry for entry in (files("services.console") / "page").iterdir() if entry.is_file()}
    assets = {name: found[name] for name in sorted(found) if PurePath(name).suffix in _TYPES}
    modules = (name for name in assets if name.endswith(".js") and name != "login.js")
    hints = "".join(f'<link rel="modulepreload" href="/page/{name}">\n' for name in modules)
    for name, asset in assets.items():
        body = asset.read_bytes()
        if name == "index.html":
            body = body.replace(b"</head>", hints.encode() + b"</head>", 1)
        path = _PATHS.get(name, f"/page/{name}")
        answer = _static(body, _TYPES[PurePath(name).suffix])
        app.add_api_route(path, answer, include_in_schema=False, methods=["GET", "HEAD"])


def _static(body: bytes, kind: str) -> Callable[[Request], Response]:
    headers = {**PAGE_HEADERS, "ETag": f'"{hashlib.sha256(body).hexdigest()[:16]}"'}

    def asset(request: Request) -> Response:
        if request.headers.get("if-none-match") == headers["ETag"]:
            return Response(status_code=304, headers=headers)
        return Response(body, media_type=f"{kind}; charset=utf-8", headers=headers)

    return asset
