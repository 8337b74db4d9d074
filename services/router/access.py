"""Who may use the data port: the web rules (runtime/web.py), the CORS headers of pages that are let in, the API key."""

import hmac
from typing import Final

from glowplug.domain.errors import GlowplugError
from glowplug.runtime.web import WebRules
from services.router.http_request import HttpRequest

MAX_KNOWN_HOSTS: Final = 64  # remembered as good; any address is, so there may be more: those are judged each time
_PREFLIGHT: Final = (
    b"access-control-allow-methods: GET, HEAD, POST\r\naccess-control-max-age: 600\r\n"
    b"access-control-allow-headers: %b\r\n"
)


class Access:
    """The rules of one data port. Without rules every page is answered, without a key every client is."""

    def __init__(self, rules: WebRules | None = None, api_key: str = "") -> None:
        self._rules = rules
        self._known: set[bytes] = set()
        self._key = api_key.encode()

    def refusal(self, request: HttpRequest) -> GlowplugError | None:
        """Why the web rules refuse a request; None when they do not."""
        headers = request.headers
        host = headers.get(b"host", b"")
        if self._rules is None or (
            host in self._known and b"origin" not in headers and b"sec-fetch-site" not in headers
        ):
            return None

        def header(name: str) -> str:
            return headers.get(name.encode(), b"").decode("latin-1")

        method = request.method.decode("latin-1")
        error = self._rules.refusal(method, [host.decode("latin-1")], header, only_json=False)
        if error is None and len(self._known) < MAX_KNOWN_HOSTS:
            self._known.add(host)
        return error

    def has_key(self, request: HttpRequest) -> bool:
        """Whether the request brings the API key, where one is asked for. Clients of OpenAI's API send it as a bearer
        token, those of Anthropic's in a header of its own."""
        if not self._key:
            return True
        scheme, _, given = request.headers.get(b"authorization", b"").partition(b" ")
        if scheme.lower() != b"bearer":
            given = request.headers.get(b"x-api-key", b"")
        return hmac.compare_digest(given, self._key)

    def cors(self, request: HttpRequest) -> bytes:
        """Header lines that let a page of another site read the answer."""
        origin = request.headers.get(b"origin", b"")
        if not origin or self._rules is None or not self._rules.lets_in(origin.decode("latin-1")):
            return b""
        return b"access-control-allow-origin: %b\r\naccess-control-expose-headers: *\r\nvary: origin\r\n" % origin

    def preflight(self, request: HttpRequest) -> bytes:
        """Header lines for a page that asks whether it may send a request; b"" when it is no such question."""
        headers = request.headers
        if request.method != b"OPTIONS" or b"access-control-request-method" not in headers or not self.cors(request):
            return b""
        return _PREFLIGHT % headers.get(b"access-control-request-headers", b"authorization, content-type")
