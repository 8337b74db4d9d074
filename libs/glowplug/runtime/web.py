"""Decide which requests a port answers, against DNS rebinding and pages of other sites.

A foreign page can make its reader's browser send requests here, but cannot forge Host, Origin or Sec-Fetch-Site.
Programs send no Origin and pass. A page that rebinds its name to our address is same-origin to the browser, but its
name is in Host.
"""

import ipaddress
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final
from urllib.parse import urlsplit

from glowplug.domain.errors import GlowplugError

EVERY: Final = "*"
MAX_BODY_BYTES: Final = 8 << 20  # of an admin port: a body is read whole before the token is checked
_HOST: Final = re.compile(r"(?:\[([0-9a-z:.%_-]+)\]|([a-z0-9._-]+))(?::[0-9]*)?", re.IGNORECASE | re.ASCII)
_PATTERN: Final = re.compile(r"(?:\*\.)?[a-z0-9_-]+(?:\.[a-z0-9_-]+)*\.?", re.ASCII)
_DEFAULT_PORTS: Final = {"http": 80, "https": 443}
_READS: Final = frozenset(("GET", "HEAD"))
_OWN_SITES: Final = frozenset(("same-origin", "none"))  # none: address bar or bookmark
# Types that a page may send to another site without asking it first (a "simple" request).
FORM: Final = "multipart/form-data"
_SIMPLE_TYPES: Final = frozenset(("text/plain", "application/x-www-form-urlencoded", FORM))
Header = Callable[[str], str | None]


class HostNotAllowed(GlowplugError):
    """The port has no such name (421)."""

    status, type, code = 421, "invalid_request_error", "host_not_allowed"


class ForeignOrigin(GlowplugError):
    """A page of another site sent this (403)."""

    status, type, code = 403, "invalid_request_error", "foreign_origin"


class UnsupportedMediaType(GlowplugError):
    """The route does not read this Content-Type (415)."""

    status, type, code = 415, "invalid_request_error", "unsupported_media_type"


def host_name(host: str) -> str:
    """Return the host in a Host header, bare; "" if it is none."""
    found = _HOST.fullmatch(host.strip())
    if not found or (found[1] and not is_address(found[1])):
        return ""
    return (found[1] or found[2]).rstrip(".").lower()


def is_address(name: str) -> bool:
    """Return whether it is an IP address, which cannot be rebound."""
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


@dataclass(frozen=True, slots=True)
class AllowedHosts:
    """Names of a port, besides IP addresses and localhost."""

    exact: frozenset[str] = frozenset(("localhost",))
    suffixes: tuple[str, ...] = (".localhost",)
    every: bool = False

    @classmethod
    def parse(cls, text: str, own: Iterable[str] = ()) -> "AllowedHosts":
        """Parse "a.example,*.example.org" or "*" and add the process's `own` names. Raises ValueError."""
        names = [part.strip().lower() for part in text.split(",") if part.strip()]
        for name in names:
            if name != EVERY and not _PATTERN.fullmatch(name) and not is_address(name):
                raise ValueError(
                    f"expected names without scheme and port, such as a.example or *.example.org: {name!r}"
                )
        wild = tuple(name[1:].rstrip(".") for name in names if name.startswith("*."))
        exact = {name.rstrip(".") for name in names if not name.startswith("*")} | {host_name(name) for name in own}
        return cls(cls().exact | exact - {""}, cls().suffixes + wild, EVERY in names)

    def allows(self, host: str) -> bool:
        """Return whether to answer this Host. None at all passes: browsers always send one."""
        if self.every or not host:
            return True
        name = host_name(host)
        return bool(name) and (name in self.exact or name.endswith(self.suffixes) or is_address(name))


def parse_origins(text: str) -> frozenset[str]:
    """Parse "https://a.example,http://b.example:3000" or "*". Raises ValueError."""
    found = [part.strip().lower().rstrip("/") for part in text.split(",") if part.strip()]
    for origin in found:
        parts = urlsplit(origin)
        if origin != EVERY and (
            not parts.scheme or not parts.netloc or parts.path or parts.query or "@" in parts.netloc
        ):
            raise ValueError(f"expected scheme://host[:port], such as https://a.example: {origin!r}")
    return frozenset(found)


@dataclass(frozen=True, slots=True)
class WebRules:
    """`hosts`: names of this port; `origins`: other sites whose pages may use it."""

    hosts: AllowedHosts = AllowedHosts()
    origins: frozenset[str] = frozenset()

    def refusal(
        self, method: str, hosts: Iterable[str], header: Header, *, only_json: bool = True, reads_forms: bool = False
    ) -> GlowplugError | None:
        """Return why a request is refused, or None. `hosts`: its Host headers; `header` gets others by lower-case name.
        `only_json`: refuse changes as text or form from any sender, else only from pages. `reads_forms`: forms with a
        file are expected."""
        hosts = list(hosts)
        for host in hosts:
            if not self.hosts.allows(host):
                return HostNotAllowed(
                    f"This port does not answer to the name {host_name(host)[:100]!r}. "
                    "Add it to GLOWPLUG_ALLOWED_HOSTS, or use an IP address.",
                    param="Host",
                )
        origin, site = header("origin") or "", header("sec-fetch-site") or ""
        is_of_page = bool(origin or site)
        if is_of_page and not self._may(method, hosts, header, origin, site):
            who = f"A page of {origin[:100]}" if origin else "A page of another site"
            let_in = f"GLOWPLUG_ALLOWED_ORIGINS={origin[:100] or 'https://its.address'}"
            text = f"{who} may not use this port. Start Glowplug with {let_in} to let it in; `*` lets in every site."
            return ForeignOrigin(text, param="Origin")
        kind = (header("content-type") or "").partition(";")[0].strip().lower()
        is_form = reads_forms and kind == FORM
        if kind in _SIMPLE_TYPES and not is_form and (is_of_page or only_json) and method not in _READS:
            return UnsupportedMediaType(f"Send it as application/json, not as {kind}.", param="Content-Type")
        return None

    def lets_in(self, origin: str) -> bool:
        return bool(self.origins) and (EVERY in self.origins or origin.lower() in self.origins)

    def _may(self, method: str, hosts: list[str], header: Header, origin: str, site: str) -> bool:
        """Return whether the page is ours or let in, or a link was followed."""
        if site in _OWN_SITES or (origin and self.lets_in(origin)):
            return True
        if not site:  # a browser that omits it, or plain http to another machine
            return _authority(origin) in {*hosts, header("x-forwarded-host") or ""} - {""}
        is_link = header("sec-fetch-mode") == "navigate" and header("sec-fetch-dest") == "document"
        return is_link and not origin and method in _READS


def _authority(origin: str) -> str:
    """Host and port of an origin, as in Host; "" if none."""
    try:
        parts = urlsplit(origin)
        is_default = parts.port == _DEFAULT_PORTS.get(parts.scheme)
    except ValueError:
        return ""
    return parts.netloc.rpartition(":")[0] if is_default else parts.netloc
