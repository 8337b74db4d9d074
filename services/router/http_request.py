"""One HTTP request: its header lines, its target, and its permission (runtime/web.py, CORS, the API key).

The parser enforces RFC 9112 (no folded lines, no bare LF or CR, names of token characters, one length or transfer
coding). This module checks the rest: fields that may come only once, Host, absolute targets, versions.
"""

import hmac
import re
from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING, Final

from msgspec import Struct, field

from glowplug.domain.access import Priority
from glowplug.domain.errors import GlowplugError
from glowplug.engines import apis
from glowplug.runtime.web import WebRules
from glowplug.services.router import paths
from glowplug.services.router.api_errors import ApiError, refused
from glowplug.services.router.batch_paths import FILES
from glowplug.services.router.keys import ANYBODY, Caller, KeyRing
from glowplug.services.router.settings import Limits

if TYPE_CHECKING:
    from glowplug.services.router.upload import Upload

# Not passed on: hop-by-hop headers, the router's own, and credentials.
_NOT_PASSED = frozenset(
    b"host connection keep-alive proxy-connection proxy-authorization authorization api-key x-api-key "
    b"transfer-encoding te trailer upgrade expect content-length x-request-id traceparent cookie origin".split()
)
# Allowed once: of two lines a proxy in front might use one and this router the other.
_ONCE = frozenset(
    b"host authorization proxy-authorization api-key x-api-key origin content-length content-type transfer-encoding "
    b"expect x-request-id traceparent".split()
)
_PLAIN_CONNECTION = (b"keep-alive", b"close")  # names no other header
_ABSOLUTE = re.compile(rb"https?://([^/?#]+)([^#]*)", re.IGNORECASE)
_HOST = re.compile(rb"[A-Za-z0-9\-._~%!$&'()*+;=:\[\]]*")  # RFC 9110, 7.2: an authority without a user
_as_host = lru_cache(maxsize=64)(_HOST.fullmatch)

MAX_KNOWN_HOSTS: Final = 64  # accepted hosts that are remembered
_PREFLIGHT: Final = (
    b"access-control-allow-methods: GET, HEAD, POST, DELETE\r\naccess-control-max-age: 600\r\n"
    b"access-control-allow-headers: %b\r\n"
)
_FORMS: Final = frozenset((FILES, apis.TRANSCRIPTIONS.encode(), apis.TRANSLATIONS.encode()))  # paths that take files


class HttpRequest(Struct, eq=False):
    __repr__ = object.__repr__  # prompts never reach a log
    method: bytes = b""
    target: bytes = b""
    path: bytes = b""
    body: bytes = b""
    headers: dict[bytes, bytes] = field(default_factory=dict)
    num_repeated: int = 0
    is_http11: bool = True
    keep_alive: bool = True
    complete: float = 0.0  # when the last byte came, monotonic
    complete_at: float = 0.0  # the same, epoch seconds
    request_id: str = ""
    notes: bytes = b""  # header lines for the answer
    caller: Caller = ANYBODY
    priority: Priority = Priority.STANDARD
    first_path: bytes = b""  # a translated request's original path
    dropped_tools: tuple[str, ...] = ()  # kinds of tools that were left out
    upload: "Upload | None" = None  # receives the body in place of `body`
    open_socket: Callable[["HttpRequest"], None] | None = None  # answers the WebSocket's handshake

    def repeat(self, name: bytes, value: bytes, limits: Limits) -> None:
        """Append a repeated line to the header's list (RFC 9110, 5.3). Raises ApiError for one allowed once."""
        if name in _ONCE:
            raise refused(400, f"The header `{name.decode()}` may be sent once.")
        self.num_repeated += 1
        if self.num_repeated > limits.num_headers:
            raise too_many_headers(limits)
        self.headers[name] = b"%b, %b" % (self.headers[name], value)

    def check_head(self, version: str, limits: Limits) -> None:
        """Check the head, and normalize target and path. Raises ApiError."""
        headers = self.headers
        if len(headers) + self.num_repeated > limits.num_headers:
            raise too_many_headers(limits)
        if len(b"".join((*headers, *headers.values(), self.target))) > limits.header_bytes:
            raise head_too_large(limits)
        if version not in ("1.1", "1.0"):
            raise refused(505, f"HTTP/{version} is not supported; send HTTP/1.1.")
        self.is_http11 = version == "1.1"
        host = headers.get(b"host")
        if host is None:
            if self.is_http11:
                raise refused(400, "The header `host` is missing.")
        elif _as_host(host) is None:
            raise refused(400, "The header `host` is not a host.")
        if not self.target.startswith(b"/"):
            self._take_absolute()
        elif b"#" in self.target:
            raise refused(400, "The request target may not have a fragment.")
        path, mark, query = self.target.partition(b"?")
        self.path = path
        if path not in paths.AS_THEY_ARE:
            self.path = paths.canonical(path)
            self.target = self.path + mark + query
        coding = headers.get(b"transfer-encoding")
        if coding is not None:
            if not self.is_http11:
                raise refused(400, "HTTP/1.0 has no transfer-encoding.")
            if coding.lower() != b"chunked":
                raise refused(501, "Only `transfer-encoding: chunked` is supported.")

    def _take_absolute(self) -> None:
        """Turn `http://host/path` into `/path` at `host`, which replaces the Host header (RFC 9112, 3.2.2). Raises
        ApiError."""
        match = _ABSOLUTE.fullmatch(self.target)
        if match is None:
            if self.target == b"*":
                return
            raise refused(400, "The request target is neither a path nor an http URL.")
        authority, rest = match.groups()
        if _HOST.fullmatch(authority) is None:
            raise refused(400, "The request target's authority is not a host.")
        self.headers[b"host"] = authority
        self.target = rest if rest.startswith(b"/") else b"/" + rest

    def passed_headers(self) -> bytes:
        """Return the engine's header lines, without those that Connection names (RFC 9110, 7.6.1)."""
        not_passed = _NOT_PASSED
        connection = self.headers.get(b"connection")
        if connection is not None and connection.lower() not in _PLAIN_CONNECTION:
            not_passed = not_passed.union(name.strip() for name in connection.lower().split(b","))
        lines = b""
        for name, value in self.headers.items():
            if name not in not_passed:
                lines += b"%b: %b\r\n" % (name, value)
        return lines


def head_too_large(limits: Limits) -> ApiError:
    message = f"The request's headers are larger than {limits.header_bytes} bytes."
    return refused(431, message, "headers_too_large")


def too_many_headers(limits: Limits) -> ApiError:
    message = f"The request has more than {limits.num_headers} header or trailer lines."
    return refused(431, message, "headers_too_large")


def body_too_large(limits: Limits) -> ApiError:
    return refused(413, f"The request's body is larger than {limits.max_body_bytes} bytes.", "request_too_large")


class Access:
    """The access rules of one data port. `rules` None admits every web page; without `api_key` and named `keys` every
    client is admitted."""

    def __init__(self, rules: WebRules | None = None, api_key: str = "", keys: KeyRing | None = None) -> None:
        self._rules, self._keys = rules, keys or KeyRing()
        self._known: set[bytes] = set()
        self._key = api_key.encode()

    def refusal(self, request: HttpRequest) -> GlowplugError | None:
        """Return the web rules' error, or None."""
        headers = request.headers
        host = headers.get(b"host", b"")
        if self._rules is None or (
            host in self._known and b"origin" not in headers and b"sec-fetch-site" not in headers
        ):
            return None

        def header(name: str) -> str:
            return headers.get(name.encode(), b"").decode("latin-1")

        method = request.method.decode("latin-1")
        hosts, reads_forms = [host.decode("latin-1")], request.path in _FORMS
        error = self._rules.refusal(method, hosts, header, only_json=False, reads_forms=reads_forms)
        if error is None and len(self._known) < MAX_KNOWN_HOSTS:
            self._known.add(host)
        return error

    def caller(self, request: HttpRequest) -> Caller:
        """Return the caller, by OpenAI's bearer token or Anthropic's x-api-key. Raises ApiError: 401, or 403 for a key
        of other ports only."""
        keys = self._keys
        if not (self._key or keys.asks_for_key):
            return keys.shared
        scheme, _, given = request.headers.get(b"authorization", b"").partition(b" ")
        if scheme.lower() != b"bearer":
            given = request.headers.get(b"x-api-key", b"")
        if self._key and hmac.compare_digest(given, self._key):
            return keys.shared
        return keys.find(given)

    def admits(self, request: HttpRequest) -> bool:
        try:
            self.caller(request)
        except ApiError:
            return False
        return True

    def cors(self, request: HttpRequest) -> bytes:
        """Return the header lines that let another site's page read the answer, or b""."""
        origin = request.headers.get(b"origin", b"")
        if not origin or self._rules is None or not self._rules.lets_in(origin.decode("latin-1")):
            return b""
        return b"access-control-allow-origin: %b\r\naccess-control-expose-headers: *\r\nvary: origin\r\n" % origin

    def preflight(self, request: HttpRequest) -> bytes:
        """Return the header lines for a CORS preflight request, b"" for any other request."""
        headers = request.headers
        if request.method != b"OPTIONS" or b"access-control-request-method" not in headers or not self.cors(request):
            return b""
        return _PREFLIGHT % headers.get(b"access-control-request-headers", b"authorization, content-type")
