"""Format addresses: where processes listen and are reached."""

import zlib
from dataclasses import dataclass
from ipaddress import ip_address
from urllib.parse import urlsplit

_LOOPBACK_OF = {"0.0.0.0": "127.0.0.1", "::": "::1"}
HIGHEST_PORT = 65535


def reachable(host: str) -> str:
    """Return the local host for a listener on `host`: a wildcard is not a destination."""
    return _LOOPBACK_OF.get(host, host)


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches it."""
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False


def is_wildcard(host: str) -> bool:
    return host in _LOOPBACK_OF


def http_url(host: str, port: int) -> str:
    """`http://host:port`, IPv6 in brackets."""
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def advertised(url: str, host: str) -> str:
    """Replace the host of `url`, unless either is empty."""
    return http_url(host, urlsplit(url).port or 80) if host and url else url


def host_and_port(host: str, port: object) -> str:
    """`host:port`, IPv6 in brackets. `port` may be a range."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def split_host_and_port(text: str) -> tuple[str, str]:
    """Inverse of `host_and_port`; ("", "") for other text."""
    host, colon, port = text.rpartition(":")
    return (host.strip("[]"), port) if colon and host and port else ("", "")


def rendezvous(stages_at: str, pipeline: str) -> str:
    """`host:port` where a pipeline's stages meet: a fixed port per pipeline in `stages_at` ("host:first-last"); "" if
    none.

    On a collision the later start fails, and its retry is another pipeline.
    """
    host, ports = split_host_and_port(stages_at)
    try:
        known = PortRange.parse(ports)
    except ValueError:
        known = None
    if known is None:
        return ""
    return host_and_port(host, known.first + zlib.crc32(pipeline.encode()) % len(known))


@dataclass(frozen=True, slots=True)
class PortRange:
    """`first` to `last`, inclusive."""

    first: int
    last: int

    @classmethod
    def parse(cls, text: str) -> "PortRange | None":
        """Parse "20000-20199"; "" gives None. Raises ValueError naming the form."""
        if not text:
            return None
        first, dash, last = text.strip().partition("-")
        is_numbers = bool(dash) and all(part.isascii() and part.isdigit() for part in (first, last))
        if not is_numbers or not 1 <= int(first) <= int(last) <= HIGHEST_PORT:
            raise ValueError(f"expected first-last, two ports of 1-{HIGHEST_PORT} in order such as 20000-20199")
        return cls(int(first), int(last))

    def __len__(self) -> int:
        return self.last - self.first + 1

    def __str__(self) -> str:
        return f"{self.first}-{self.last}"
