"""Refuses requests to a service's REST by the rules of web.py, and gives every answer headers that browsers obey."""

import uuid
from typing import Final

from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from glowplug.runtime.rest import refused
from glowplug.runtime.web import WebRules

# On every answer that does not say otherwise: it runs and loads nothing, is framed nowhere, and is what it says it is.
HEADERS: Final = {
    "Content-Security-Policy": "default-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
}


class Guarded:
    """An app behind the rules. Pages of `rules.origins` get the CORS headers they need; cookies never go along."""

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
