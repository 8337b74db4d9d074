"""Console access by keys or OpenID Connect login, with roles.

Browsers send a session cookie, programs a key: as `Authorization: Bearer`, or as `X-Glowplug-Console-Key` if the
former is meant for the service behind the console. Sessions are random, live in memory and end with their key. Wrong
keys are counted per address. With the fleet's admin token the console calls services for people of a sufficient
role, and names them."""

import asyncio
import hashlib
import hmac
import ipaddress
import logging
import re
import secrets
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Annotated, Any, Final
from urllib.parse import quote

import msgspec
from fastapi import APIRouter, Query, Request
from fastapi.responses import JSONResponse, RedirectResponse, Response
from starlette.datastructures import Headers
from starlette.requests import cookie_parser
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from glowplug.domain.access import Role
from glowplug.domain.errors import BadRequest, Contended, GlowplugError, NoCapacity, RoleRequired, Unauthorized
from glowplug.runtime.key_reader import KeyReader
from glowplug.runtime.rest import ACTOR_HEADER, MAX_ACTOR_CHARS, refused
from glowplug.services.console.oidc import ATTEMPT_S, LoginFailed, Oidc
from glowplug.services.console.records import Newest
from glowplug.services.console.roles import WHO, Who, check_role, least_role
from glowplug.services.console.upstream import read_body

log = logging.getLogger(__name__)
MAX_SESSIONS: Final = 1000  # the oldest is dropped
WINDOW_S: Final = 60.0
MAX_WRONG: Final = 10  # from one address in a window
MAX_WRONG_IN_ALL: Final = 300  # from all addresses
MAX_ADDRESSES: Final = 4096
KEY_HEADER: Final = "x-glowplug-console-key"
PASSED_ON: Final = "/api/v1/"
MAX_LOGIN_BYTES: Final = 4096
START: Final = "/login/oidc"
BACK: Final = "/login/oidc/callback"
_VIEW: Final = re.compile(r"#/[\x21-\x7e]{0,500}")
_NOT_KEPT: Final = {"Cache-Control": "no-store"}


class KeyRequired(Unauthorized):
    """Missing console key or ended session (401)."""

    code = "console_key_required"


class WrongKey(Unauthorized):
    """Unknown key (401)."""

    code = "wrong_console_key"


class TooManyWrongKeys(Contended):
    """Too many wrong keys (429)."""

    code = "too_many_wrong_keys"


@dataclass(frozen=True, slots=True)
class Session:
    """`id_token`: of an OpenID Connect login, for the logout there."""

    who: Who
    ends_at: float
    id_token: str = ""


class ConsoleAccess:
    """Roles by key, and open sessions.

    `key`: the console's own, else the router's API key (`is_api_key`); `keys`: reads named keys; `has_oidc`: people
    may log in elsewhere. Without `key` and `has_oidc` every client may read.

    The admin token gives the role admin. `key` gives viewer if the console has the fleet's admin token, else admin,
    and each service asks for the token itself."""

    def __init__(
        self,
        key: str,
        session_s: float,
        clock: Callable[[], float],
        *,
        admin_token: str = "",
        keys: KeyReader | None = None,
        is_api_key: bool = False,
        has_oidc: bool = False,
    ) -> None:
        self.is_asked = bool(key) or has_oidc
        self.session_s, self.admin_token = session_s, admin_token
        role = Role.VIEWER if admin_token else Role.ADMIN
        shared = Who(name="the API key" if is_api_key else "the console key", role=role, has_api_key=is_api_key)
        by_token = Who(name="the admin token", role=Role.ADMIN)
        self._shared = [(k.encode(), who) for k, who in ((admin_token, by_token), (key, shared)) if k]
        self._keys, self._clock = keys, clock
        self._sessions: Newest[bytes, Session] = Newest(MAX_SESSIONS)
        self._wrong: dict[str, int] = {}  # network -> wrong keys in this window
        self._window_ends = 0.0

    def log_in(self, who: Who, id_token: str = "") -> str:
        token = secrets.token_urlsafe(32)
        self._sessions.put(_digest(token), Session(who, self._clock() + self.session_s, id_token))
        log.info("%s logged in, with the role %s", who.name, who.role)
        return token

    def log_out(self, token: str) -> Session | None:
        return self._sessions.pop(_digest(token), None)

    async def session(self, token: str) -> Session | None:
        """A session opened with a named key ends with the key."""
        digest = _digest(token)
        found = self._sessions.get(digest)
        if found is None:
            return None
        if found.ends_at <= self._clock() or not await self.lives(found.who):
            self._sessions.pop(digest, None)
            return None
        return found

    async def lives(self, who: Who) -> bool:
        if self._keys is None or not who.key_id:
            return True
        key = await self._keys.row(who.key_id)
        return key is not None and not key.ended(self._clock()) and key.role is who.role

    async def who(self, presented: str, address: str) -> Who:
        """Raises WrongKey, RoleRequired for a key without a role, and TooManyWrongKeys before it looks at the key."""
        now_s, network = self._clock(), _network(address)
        if now_s >= self._window_ends:
            self._wrong.clear()
            self._window_ends = now_s + WINDOW_S
        is_full = network not in self._wrong and len(self._wrong) >= MAX_ADDRESSES
        if is_full or self._wrong.get(network, 0) >= MAX_WRONG or sum(self._wrong.values()) >= MAX_WRONG_IN_ALL:
            raise TooManyWrongKeys("Too many wrong keys were tried.", retry_after_s=self._window_ends - now_s)
        for own, who in self._shared:
            if hmac.compare_digest(presented.encode("utf-8", "surrogatepass"), own):
                return who
        self._wrong[network] = self._wrong.get(network, 0) + 1  # before the store answers: guesses may be concurrent
        key = await self._keys.find(presented) if self._keys else None
        if key is None:
            raise WrongKey("That is not this console's key.")
        self._wrong[network] = max(0, self._wrong.get(network, 0) - 1)
        if key.role is Role.NONE:
            raise RoleRequired(f"The key {key.prefix} has no role here: it opens neither read, operate nor admin.")
        return Who(name=f"key {key.prefix} ({key.tenant}/{key.name})", role=key.role, key_id=key.key_id)

    def is_admin_token(self, presented: str) -> bool:
        return bool(self.admin_token) and hmac.compare_digest(
            presented.encode("utf-8", "surrogatepass"), self.admin_token.encode()
        )


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode("utf-8", "surrogatepass")).digest()


def _network(address: str) -> str:
    """One IPv4 address or IPv6 /64."""
    try:
        ip = ipaddress.ip_address(address)
    except ValueError:
        return address
    return address if ip.version == 4 else str(ipaddress.ip_network((int(ip), 64), strict=False))


class Login(msgspec.Struct):
    key: Annotated[str, msgspec.Meta(max_length=1024)]


def cookie_name(port: int) -> str:
    """Name the port: cookies of one host ignore ports."""
    return f"glowplug-console-{port}"


class Locked:
    def __init__(self, app: ASGIApp, access: ConsoleAccess, cookie: str) -> None:
        self._app, self._access, self._cookie = app, access, cookie

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path, method = scope.get("path", ""), scope.get("method", "")
        if scope["type"] != "http" or least_role(method, path) is Role.NONE:
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        token = cookie_parser(headers.get("cookie", "")).get(self._cookie, "")
        try:
            session = await self._access.session(token)
            who = session.who if session else await self._by_key(headers, _address(scope))
            if self._access.is_admin_token(_bearer(headers)) and not who.role.includes(Role.ADMIN):
                who = Who(name=f"{who.name}, with the admin token", role=Role.ADMIN)
            check_role(who, method, path)
        except KeyRequired as error:
            if path == "/":
                await RedirectResponse("/login", 303, {"Cache-Control": "no-store"})(scope, receive, send)
                return
            await self._refuse(error, scope, receive, send)
        except GlowplugError as error:
            await self._refuse(error, scope, receive, send)
        else:
            inner = {**scope, WHO: who, "headers": self._passed_on(scope, headers, who, by_session=bool(session))}
            lives = self._session_lives(token) if session else self._key_lives(who)
            await _while_alive(lives, self._app, inner, receive, send)

    async def _refuse(self, error: GlowplugError, scope: Scope, receive: Receive, send: Send) -> None:
        answer = refused(error)
        if answer.status_code == Unauthorized.status:
            answer.headers["WWW-Authenticate"] = "Bearer"
        await answer(scope, receive, send)

    async def _by_key(self, headers: Headers, address: str) -> Who:
        """Raises KeyRequired, and as `ConsoleAccess.who`."""
        given = headers.get(KEY_HEADER) or _bearer(headers)
        if not given:
            raise KeyRequired("This console asks for its key: log in at /login, or send it as a Bearer token.")
        return await self._access.who(given, address)

    def _passed_on(self, scope: Scope, headers: Headers, who: Who, *, by_session: bool) -> list[tuple[bytes, bytes]]:
        """Return the headers for the app: the caller's name, and the admin token unless the caller authenticates to the
        service."""
        path: str = scope["path"]
        kept = [(name, value) for name, value in scope["headers"] if name != ACTOR_HEADER.encode()]
        kept.append((ACTOR_HEADER.encode(), _header_text(who.name)))
        is_for_service = "authorization" in headers and (by_session or KEY_HEADER in headers)
        if self._access.admin_token and path.startswith(PASSED_ON) and not is_for_service:
            kept = [(name, value) for name, value in kept if name != b"authorization"]
            kept.append((b"authorization", f"Bearer {self._access.admin_token}".encode()))
        return kept

    def _session_lives(self, token: str) -> Callable[[], Awaitable[bool]]:
        async def lives() -> bool:
            return await self._access.session(token) is not None

        return lives

    def _key_lives(self, who: Who) -> Callable[[], Awaitable[bool]]:
        async def lives() -> bool:
            return await self._access.lives(who)

        return lives


async def _while_alive(
    lives: Callable[[], Awaitable[bool]], app: ASGIApp, scope: Scope, receive: Receive, send: Send
) -> None:
    """End a stream at its next message once its session or key has ended; the app sees a disconnect."""
    over = asyncio.Event()

    async def send_while_open(message: Message) -> None:
        if over.is_set():
            return
        if message.get("more_body") and not await _is_true(lives):
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

    await app(scope, receive_until_over, send_while_open)


async def _is_true(lives: Callable[[], Awaitable[bool]]) -> bool:
    try:
        return await lives()
    except NoCapacity:
        return False


def _bearer(headers: Headers) -> str:
    scheme, _, bearer = headers.get("authorization", "").partition(" ")
    return bearer.strip() if scheme.lower() == "bearer" else ""


def _header_text(name: str) -> bytes:
    return "".join(c if " " <= c <= "~" else "?" for c in name)[:MAX_ACTOR_CHARS].encode()


def is_https(request: Request) -> bool:
    return "https" in (request.url.scheme, request.headers.get("x-forwarded-proto", ""))


def open_session(
    answer: Response, request: Request, access: ConsoleAccess, cookie: str, who: Who, id_token: str = ""
) -> None:
    token, max_age = access.log_in(who, id_token), int(access.session_s)
    answer.set_cookie(cookie, token, max_age, httponly=True, samesite="strict", secure=is_https(request))


def routes(access: ConsoleAccess, cookie: str, oidc: Oidc | None) -> APIRouter:
    """Return the routes to log in and out, without effect on a console that asks for no login."""
    router = APIRouter(tags=["login"])
    said: dict[int | str, dict[str, object]] = {
        401: {"description": "it is not the key"},
        403: {"description": "the key gives no role"},
        429: {"description": "too many wrong keys; Retry-After says when to try again"},
    }

    @router.get("/session")
    async def session(request: Request) -> dict[str, Any]:
        """Whether a login is asked for, whether this browser may read without one, who it is and with which role; and
        where people may log in (`oidc`, a host)."""
        found = await access.session(request.cookies.get(cookie, ""))
        who = found.who if found else Who(name="", role=Role.NONE if access.is_asked else Role.ADMIN)
        may = not access.is_asked or found is not None
        named = {"name": who.name, "role": who.role}
        return {"key_asked": access.is_asked, "open": may, **named, "oidc": oidc.host if oidc else ""}

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
        who = await access.who(given.key, _address(request.scope))
        open_session(answer, request, access, cookie, who)
        return answer

    @router.post("/logout", responses={204: {"description": "the session is over"}})
    async def log_out(request: Request) -> Response:
        """End the session of this browser. `next`: where the login elsewhere is ended, too."""
        ended = access.log_out(request.cookies.get(cookie, ""))
        then = await oidc.logout_url(ended.id_token, own_url(request, "/login")) if oidc and ended else ""
        answer = JSONResponse({"next": then}) if then else Response(status_code=204)
        answer.delete_cookie(cookie, httponly=True, samesite="strict")
        return answer

    return router


def own_url(request: Request, path: str) -> str:
    host = request.headers.get("host", "")
    return f"{'https' if is_https(request) else 'http'}://{host}{path}"


def _address(scope: Scope) -> str:
    client = scope.get("client")
    return client[0] if client else ""


def oidc_routes(access: ConsoleAccess, cookie: str, oidc: Oidc) -> APIRouter:
    """Return the two steps of an OpenID Connect login: to the issuer, and back with a code. After a failure the login
    page says why; the log says more."""
    router = APIRouter(tags=["login"])
    under_way = f"{cookie}-login"

    @router.get(START, response_class=RedirectResponse, status_code=303)
    async def begin(request: Request, view: str = Query("", max_length=512)) -> RedirectResponse:
        """Go to the issuer; `view` is shown after the login."""
        try:
            url, attempt = await oidc.begin(own_url(request, BACK), view if _VIEW.fullmatch(view) else "")
        except LoginFailed as error:
            return failed(error)
        answer = RedirectResponse(url, 303, _NOT_KEPT)
        answer.set_cookie(
            under_way, attempt, int(ATTEMPT_S), path=START, httponly=True, samesite="lax", secure=is_https(request)
        )
        return answer

    @router.get(BACK, response_class=RedirectResponse, status_code=303)
    async def back(
        request: Request,
        code: str = Query("", max_length=4096),
        state: str = Query("", max_length=256),
        error: str = Query("", max_length=100),
    ) -> RedirectResponse:
        """Come back from the issuer with a code, and open a session."""
        try:
            attempt = oidc.attempt(request.cookies.get(under_way, ""), state)
            if error or not code:
                raise LoginFailed("refused", f"the issuer answered {error!r}")
            person = await oidc.finish(attempt, code, own_url(request, BACK))
        except LoginFailed as why:
            return failed(why)
        # From a page of the issuer the browser does not send the new cookie along: the login page goes on.
        answer = RedirectResponse(f"/login{attempt.view}", 303, _NOT_KEPT)
        open_session(answer, request, access, cookie, Who(name=person.name, role=person.role), person.id_token)
        answer.delete_cookie(under_way, path=START, httponly=True, samesite="lax")
        return answer

    def failed(error: LoginFailed) -> RedirectResponse:
        log.warning("a login by OpenID Connect failed: %s", error.message)
        answer = RedirectResponse(f"/login?failed={quote(error.code)}", 303, _NOT_KEPT)
        answer.delete_cookie(under_way, path=START, httponly=True, samesite="lax")
        return answer

    return router
