"""runtime/web.py at the data port: asked once per request, and the CORS headers of pages that are let in."""

from typing import TYPE_CHECKING, Final

from glowplug.domain.errors import GlowplugError
from glowplug.runtime.web import WebRules

if TYPE_CHECKING:
    from services.router.request_head import Parsed

MAX_KNOWN_HOSTS: Final = 64  # remembered as good; any address is, so there may be more: those are judged each time
_PREFLIGHT: Final = (
    b"access-control-allow-methods: GET, HEAD, POST\r\naccess-control-max-age: 600\r\n"
    b"access-control-allow-headers: %b\r\n"
)


class WebAccess:
    """The rules of one data port. Without any everybody is answered."""

    def __init__(self, rules: WebRules | None) -> None:
        self._rules = rules
        self._known: set[bytes] = set()

    def refusal(self, parsed: "Parsed") -> GlowplugError | None:
        """Why a request is not answered, None when it is."""
        headers = parsed.headers
        host = headers.get(b"host", b"")
        if self._rules is None:
            return None
        if host in self._known and b"origin" not in headers and b"sec-fetch-site" not in headers:
            return None

        def header(name: str) -> str:
            return headers.get(name.encode(), b"").decode("latin-1")

        method = parsed.method.decode("latin-1")
        error = self._rules.refusal(method, [host.decode("latin-1")], header, only_json=False)
        if error is None and len(self._known) < MAX_KNOWN_HOSTS:
            self._known.add(host)
        return error

    def cors(self, parsed: "Parsed") -> bytes:
        """Header lines that let a page of another site read the answer."""
        origin = parsed.headers.get(b"origin", b"")
        if not origin or self._rules is None or not self._rules.lets_in(origin.decode("latin-1")):
            return b""
        return b"access-control-allow-origin: %b\r\naccess-control-expose-headers: *\r\nvary: origin\r\n" % origin

    def preflight(self, parsed: "Parsed") -> bytes:
        """Header lines for a page that asks whether it may send a request; b"" when it is no such question."""
        headers = parsed.headers
        if parsed.method != b"OPTIONS" or b"access-control-request-method" not in headers or not self.cors(parsed):
            return b""
        return _PREFLIGHT % headers.get(b"access-control-request-headers", b"authorization, content-type")
