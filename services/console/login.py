"""Who may read the console where a key is set: the key itself, and sessions opened with it at the login page.

Without the key all reach the login page, health, metrics and the page's files. Browsers come with the cookie of
their session, programs with the key itself: as `Authorization: Bearer`, or as `X-Glowplug-Console-Key` where the former
is for the service that the console passes a call on to. Sessions are random, live in memory and end by themselves; a
restart ends them all. Wrong keys are counted per address."""

import asyncio
import hashlib
import hmac
import ipaddress
import secrets
from collections.abc import Callable
from typing import Annotated, Final

import msgspec
from fastapi import APIRouter, Request
from fastapi.responses import RedirectResponse, Response
from starlette.datastructures import Headers
from starlette.requests import cookie_parser
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from glowplug.domain.errors import BadRequest, Contended, GlowplugError, Unauthorized
from glowplug.runtime.rest import refused
from services.console.records import Newest
from services.console.upstream import read_body

MAX_SESSIONS: Final = 1000  # the oldest leaves
WINDOW_S: Final = 60.0
MAX_WRONG: Final = 10  # from one address in a window: enough for a person, too few to guess
MAX_WRONG_IN_ALL: Final = 300  # from all: many addresses get no further
MAX_ADDRESSES: Final = 4096  # remembered at once
KEY_HEADER: Final = "x-glowplug-console-key"
MAX_LOGIN_BYTES: Final = 4096
BY_SESSION: Final = "glowplug.by_session"  # in a request's scope: its reader has logged in
# Spans are taken from every service: they are written only, and bounded by the receiver.
_OPEN: Final = frozenset(("/live", "/health", "/ready", "/metrics", "/login", "/logout", "/session", "/v1/traces"))
_OPEN_PREFIX: Final = "/page/"


class KeyRequired(Unauthorized):
    """The console's key is missing, or the session is over (401)."""

    code = "console_key_required"


class WrongKey(Unauthorized):
    """It is not the console's key (401)."""

    code = "wrong_console_key"


class TooManyWrongKeys(Contended):
    """Wrong keys came too often (429)."""

    code = "too_many_wrong_keys"


class Access:
    """The key of one console and its open sessions. Without a key every client may read."""

    def __init__(self, key: str, session_s: float, clock: Callable[[], float]) -> None:
        self.is_asked = bool(key)
        self.session_s = session_s
        self._key = key.encode()
        self._clock = clock
        self._sessions: Newest[bytes, float] = Newest(MAX_SESSIONS)  # digest of the token -> when it ends
        self._wrong: dict[str, int] = {}  # network of an address -> wrong keys in this window
        self._window_ends = 0.0

    def log_in(self, key: str, address: str) -> str:
        """The token of a new session. Raises WrongKey, and TooManyWrongKeys without looking at the key."""
        self.check(key, address)
        token = secrets.token_urlsafe(32)
        self._sessions.put(_digest(token), self._clock() + self.session_s)
        return token

    def log_out(self, token: str) -> None:
        """End a session."""
        self._sessions.pop(_digest(token), None)

    def is_open(self, token: str) -> bool:
        """Whether this is the token of a session that is not over."""
        digest = _digest(token)
        ends = self._sessions.get(digest, 0.0)
        if ends <= self._clock():
            self._sessions.pop(digest, None)
            return False
        return True

    def check(self, key: str, address: str) -> None:
        """Raises WrongKey, and TooManyWrongKeys without looking at the key."""
        now_s, network = self._clock(), _network(address)
        if now_s >= self._window_ends:
            self._wrong.clear()
            self._window_ends = now_s + WINDOW_S
        is_full = network not in self._wrong and len(self._wrong) >= MAX_ADDRESSES
        if is_full or self._wrong.get(network, 0) >= MAX_WRONG or sum(self._wrong.values()) >= MAX_WRONG_IN_ALL:
            raise TooManyWrongKeys("Wrong keys came too often.", retry_after_s=self._window_ends - now_s)
        if not hmac.compare_digest(key.encode("utf-8", "surrogatepass"), self._key):
            self._wrong[network] = self._wrong.get(network, 0) + 1
            raise WrongKey("That is not this console's key.")


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode("utf-8", "surrogatepass")).digest()


def _network(address: str) -> str:
    """What one person has: an IPv4 address, or the 64 bits of an IPv6 network."""
    try:
        ip = ipaddress.ip_address(address)
    except ValueError:
        return address
    return address if ip.version == 4 else str(ipaddress.ip_network((int(ip), 64), strict=False))


class Login(msgspec.Struct):
    """What the login page sends."""

    key: Annotated[str, msgspec.Meta(max_length=1024)]


def cookie_name(port: int) -> str:
    """Cookies know no ports: each console of a machine has its own."""
    return f"glowplug-console-{port}"


class Locked:
    """An app behind the key."""

    def __init__(self, app: ASGIApp, access: Access, cookie: str) -> None:
        self._app, self._access, self._cookie = app, access, cookie

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope.get("path", "")
        if scope["type"] != "http" or path in _OPEN or path.startswith(_OPEN_PREFIX):
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        token = cookie_parser(headers.get("cookie", "")).get(self._cookie, "")
        if self._access.is_open(token):
            await self._while_open(token, {**scope, BY_SESSION: True}, receive, send)
            return
        error = self._refusal(headers, _address(scope))
        if error is None:
            await self._app(scope, receive, send)
        elif path == "/":
            await RedirectResponse("/login", 303, {"Cache-Control": "no-store"})(scope, receive, send)
        else:
            answer = refused(error)
            answer.headers["WWW-Authenticate"] = "Bearer"
            await answer(scope, receive, send)

    def _refusal(self, headers: Headers, address: str) -> GlowplugError | None:
        """Why a program without a session may not pass, None when it may."""
        scheme, _, bearer = headers.get("authorization", "").partition(" ")
        given = headers.get(KEY_HEADER) or (bearer.strip() if scheme.lower() == "bearer" else "")
        if not given:
            return KeyRequired("This console asks for its key: log in at /login, or send it as a Bearer token.")
        try:
            self._access.check(given, address)
        except GlowplugError as error:
            return error
        return None

    async def _while_open(self, token: str, scope: Scope, receive: Receive, send: Send) -> None:
        """A stream ends with its session, at its next message: to the app it is as if the reader had left."""
        over = asyncio.Event()

        async def send_while_open(message: Message) -> None:
            if over.is_set():
                return
            if message.get("more_body") and not self._access.is_open(token):
                over.set()
                message = {"type": "http.response.body", "body": b"", "more_body": False}
            await send(message)

        async def receive_until_over() -> Message:
            asked, ended = asyncio.ensure_future(receive()), asyncio.ensure_future(over.wait())
            try:
                await asyncio.wait({asked, ended}, return_when=asyncio.FIRST_COMPLETED)
                return {"type": "http.disconnect"} if over.is_set() else asked.result()
            finally:
                asked.cancel()
                ended.cancel()

        await self._app(scope, receive_until_over, send_while_open)


def routes(access: Access, cookie: str) -> APIRouter:
    """Logging in and out, for the page. Where no key is set there is nothing to do."""
    router = APIRouter(tags=["login"])
    said: dict[int | str, dict[str, object]] = {
        401: {"description": "it is not the key"},
        429: {"description": "too many wrong keys; Retry-After says when to try again"},
    }

    @router.get("/session")
    async def session(request: Request) -> dict[str, bool]:
        """Whether a key is asked for, and whether this browser may read without giving it again."""
        may = not access.is_asked or access.is_open(request.cookies.get(cookie, ""))
        return {"key_asked": access.is_asked, "open": may}

    @router.post("/login", status_code=204, response_class=Response, responses=said)
    async def log_in(request: Request) -> Response:
        """Open a session with `{"key": "..."}`; its token is the cookie of the answer."""
        answer = Response(status_code=204)
        if not access.is_asked:
            return answer
        try:
            given = msgspec.json.decode(await read_body(request, MAX_LOGIN_BYTES), type=Login)
        except msgspec.DecodeError as error:
            raise BadRequest(f'expected {{"key": "..."}}: {error}', param="key") from error
        token = access.log_in(given.key, _address(request.scope))
        is_https = "https" in (request.url.scheme, request.headers.get("x-forwarded-proto", ""))
        max_age = int(access.session_s)
        answer.set_cookie(cookie, token, max_age, httponly=True, samesite="strict", secure=is_https)
        return answer

    @router.post("/logout", status_code=204, response_class=Response)
    async def log_out(request: Request) -> Response:
        """End the session of this browser."""
        access.log_out(request.cookies.get(cookie, ""))
        answer = Response(status_code=204)
        answer.delete_cookie(cookie, httponly=True, samesite="strict")
        return answer

    return router


def _address(scope: Scope) -> str:
    client = scope.get("client")
    return client[0] if client else ""
