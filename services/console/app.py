"""The console's REST: trace and fleet APIs, the page, and its questions to other services."""

import hashlib
import time
from collections.abc import Awaitable, Callable
from functools import partial
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path, PurePath
from typing import Final

from fastapi import FastAPI, Request
from fastapi.responses import Response
from starlette.middleware import Middleware

from glowplug.fleet.clocks import Clocks
from glowplug.runtime.key_reader import KeyReader
from glowplug.runtime.rest import make_app, opened_by
from glowplug.services.console import (
    asked,
    decisions,
    events,
    fleet_api,
    history_api,
    log_view,
    login,
    passing,
    trace_api,
    usage_api,
)
from glowplug.services.console.events import EventLog
from glowplug.services.console.fleet_view import ShownFleet
from glowplug.services.console.history_keeper import HistoryKeeper
from glowplug.services.console.log_view import LogReader, LogSources
from glowplug.services.console.login import ConsoleAccess
from glowplug.services.console.metrics import ConsoleMetrics
from glowplug.services.console.oidc import Oidc
from glowplug.services.console.request_log import RequestLog
from glowplug.services.console.settings import ConsoleSettings
from glowplug.services.console.span_export import SpanExport, to_endpoint
from glowplug.services.console.stories import Stories, StoryDisk
from glowplug.services.console.stream import Hub
from glowplug.services.console.upstream import SETTINGS, Addresses, Upstream
from glowplug.services.console.usage_api import UsageReader
from glowplug.services.console.usage_ledger import UsageLedger
from glowplug.services.console.usage_prices import PriceFile
from glowplug.telemetry import logs

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
UPLOT: Final = ("uPlot.iife.js", "uPlot.min.css")
_PATHS: Final = {"index.html": "/", "login.html": "/login"}
_TYPES: Final = {".js": "text/javascript", ".css": "text/css", ".html": "text/html", ".svg": "image/svg+xml"}


class Console:
    def __init__(
        self,
        settings: ConsoleSettings,
        metrics: ConsoleMetrics,
        clock: Callable[[], float] = time.time,
        keys: KeyReader | None = None,
    ) -> None:
        self.settings, self.metrics, self.clock, self.clocks = settings, metrics, clock, Clocks()
        self.oidc = Oidc(settings, clock) if settings.oidc_issuer else None
        self.access = ConsoleAccess(
            settings.console_key or settings.api_key,
            settings.console_session_s,
            clock,
            admin_token=settings.admin_token,
            keys=keys,
            is_api_key=not settings.console_key,
            has_oidc=self.oidc is not None,
        )
        self.view = ShownFleet(max_decisions=settings.decisions_kept)
        self.stories = Stories(settings.requests_shown, self.view.decisions, self.view.models)
        self.disk: StoryDisk | None = None
        endpoint = settings.otlp_endpoint
        self.spans = SpanExport(self.stories, to_endpoint(endpoint), metrics, clock) if endpoint else None
        folder = settings.state_dir.absolute() / "console"  # a pod's service id changes, its data does not
        self.ledger = UsageLedger(settings.usage_database_url or f"sqlite:///{folder / 'usage.db'}")
        self.usage = UsageReader(self.ledger, metrics, settings.usage_kept_days, clock)
        self.prices = PriceFile(settings.usage_prices)
        self.hub = Hub(queue_limit=settings.stream_queue, max_clients=settings.stream_max_clients)
        self.requests = RequestLog(settings.requests_shown)
        self.history = HistoryKeeper(self.view, clock)
        self.events = EventLog(max_events=settings.events_kept, watch_limit=settings.events_per_beat)
        addresses = {service: getattr(settings, name) for service, name in SETTINGS.items()}
        self.log_sources = LogSources()
        self.upstream = Upstream(Addresses(addresses), max_connections=2 * settings.chat_max_streams)

    def open_disk(self) -> None:
        """Restore history and stories, and write from now on. Blocks; call before serving."""
        folder = self.settings.state_dir / "console"
        self.history.open_disk(folder / "history.db")
        if not self.settings.trace_disk:
            return
        self.disk = StoryDisk(folder / "stories.log")
        for event in self.disk.read():
            self.view.decisions.take(event)
            self.stories.take(event)


def build_app(console: Console) -> FastAPI:
    app = make_app(
        "console",
        console.settings.service_id or "console-1",
        ready=lambda: "",
        policies=dict,
        description="Shows the fleet and the story of each request and start on one page; passes operator actions and "
        "chats on to the services that own them.",
    )
    app.include_router(trace_api.routes(console.stories))
    app.include_router(fleet_api.routes(console.view, console.hub, console.requests, console.clock))
    app.include_router(decisions.routes(console.view.decisions, console.events))
    prometheus_url = console.settings.prometheus_url
    app.include_router(history_api.routes(console.history.history, console.clock, prometheus_url))
    app.include_router(usage_api.routes(usage_api.Usage(console.ledger, console.prices, console.clock)))
    settings = console.settings
    app.include_router(events.routes(console.events, max_watchers=settings.events_max_watchers))
    app.include_router(asked.routes(console.upstream, console.clock))
    opens = opened_by(settings.admin_token)
    reader = LogReader(console.upstream, logs.RING, settings.service_id or "console-1", opens)
    find = partial(console.log_sources.find, console.view.nodes.values, console.clock)
    app.include_router(log_view.routes(reader, find))
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
    app.include_router(login.routes(console.access, cookie, console.oidc))
    if console.oidc is not None:
        app.include_router(login.oidc_routes(console.access, cookie, console.oidc))
    _page(app)
    if console.access.is_asked:  # innermost: a refusal gets its request id from outside
        app.user_middleware.append(Middleware(login.Locked, access=console.access, cookie=cookie))
    return app


def _page(app: FastAPI) -> None:
    """Serve every file at a fixed route: no path is taken from a client. The document preloads every module at once,
    and names uPlot, if installed, for the first chart."""
    found = {entry.name: entry for entry in (files("glowplug.services.console") / "page").iterdir() if entry.is_file()}
    assets = {name: found[name].read_bytes() for name in sorted(found) if PurePath(name).suffix in _TYPES}
    modules = (name for name in assets if name.endswith(".js") and name != "login.js")
    hints = "".join(f'<link rel="modulepreload" href="/page/{name}">\n' for name in modules)
    uplot = uplot_files()
    if uplot:
        hints += f'<meta name="uplot" content="{" ".join(f"/page/{name}" for name in uplot)}">\n'
    assets["index.html"] = assets["index.html"].replace(b"</head>", hints.encode() + b"</head>", 1)
    for name, body in (assets | uplot).items():
        path = _PATHS.get(name, f"/page/{name}")
        answer = _static(body, _TYPES[PurePath(name).suffix])
        app.add_route(path, answer, methods=["GET", "HEAD"])


def uplot_files() -> dict[str, bytes]:
    """Return uPlot's script and style from the package uplot-python, or none. It is not imported, since it would import
    IPython."""
    spec = find_spec("uplot")
    folders = [Path(place) / "static" for place in (spec.submodule_search_locations if spec else None) or ()]
    found = {name: folder / name for folder in folders for name in UPLOT if (folder / name).is_file()}
    return {name: path.read_bytes() for name, path in found.items()} if len(found) == len(UPLOT) else {}


def _static(body: bytes, kind: str) -> Callable[[Request], Awaitable[Response]]:
    headers = {**PAGE_HEADERS, "ETag": f'"{hashlib.sha256(body).hexdigest()[:16]}"'}

    async def asset(request: Request) -> Response:
        if request.headers.get("if-none-match") == headers["ETag"]:
            return Response(status_code=304, headers=headers)
        return Response(body, media_type=f"{kind}; charset=utf-8", headers=headers)

    return asset
