"""Where a web server may redirect the reader of weights."""

import ipaddress
from fnmatch import fnmatchcase
from typing import Final

import httpx

from glowplug.domain.errors import WeightsUnavailable

MAX_REDIRECTS: Final = 5
STATUSES: Final = frozenset({301, 302, 303, 307, 308})
_PORTS: Final = {"http": 80, "https": 443}


def next_url(current: httpx.URL, location: str, hosts: tuple[str, ...], shown: str) -> httpx.URL:
    """The address that a redirect from `current` leads to. `hosts` are patterns of host names; `shown` is the source
    without its secrets. Raises WeightsUnavailable where it must not be followed.

    User and password of the source go to its own host alone. A name in `hosts` that resolves to an address within the
    network is caught by its certificate: other hosts are read by https only.
    """
    try:
        target = current.join(location)
    except httpx.InvalidURL as error:
        raise WeightsUnavailable(f"{shown}: redirected to no address: {error}") from error
    where = f"{target.scheme}://{target.netloc.rpartition(b'@')[2].decode('ascii', 'replace')}"
    if target.scheme not in _PORTS or (current.scheme == "https" and target.scheme != "https"):
        raise WeightsUnavailable(f"{shown}: a redirect to {where} is not followed: it leaves https")
    if is_same_server(current, target):
        return target
    if target.scheme != "https" or _is_inside(target.host) or not _is_allowed(target.host, hosts):
        hint = "GLOWPLUG_REDIRECT_HOSTS names the https hosts that are"
        raise WeightsUnavailable(f"{shown}: a redirect to {where} is not followed; {hint}")
    return target.copy_with(userinfo=b"")


def is_same_server(current: httpx.URL, target: httpx.URL) -> bool:
    """The same host, and the same port or the step from http to https between their usual ones."""
    if current.host != target.host:
        return False
    ports = [url.port or _PORTS[url.scheme] for url in (current, target)]
    return ports == [80, 443] or (ports[0] == ports[1] and current.scheme == target.scheme)


def _is_allowed(host: str, hosts: tuple[str, ...]) -> bool:
    return any(fnmatchcase(host.lower(), pattern.lower()) for pattern in hosts)


def _is_inside(host: str) -> bool:
    """An address within a network or machine, whatever a pattern says of it."""
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        return not ipaddress.ip_address(host.strip("[]")).is_global
    except ValueError:
        return False
