"""Addresses as text: where a process listens, and the address by which others reach it."""

import zlib
from dataclasses import dataclass
from urllib.parse import urlsplit

_LOOPBACK_OF = {"0.0.0.0": "127.0.0.1", "::": "::1"}
HIGHEST_PORT = 65535


def reachable(host: str) -> str:
    """Return the host by which a process of the same machine reaches a listener on `host`: a wildcard is no
    destination."""
    return _LOOPBACK_OF.get(host, host)


def is_wildcard(host: str) -> bool:
    """Return whether a listener on `host` listens on every address of its machine."""
    return host in _LOOPBACK_OF


def http_url(host: str, port: int) -> str:
    """`http://host:port`, with the brackets that an IPv6 address needs."""
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def advertised(url: str, host: str) -> str:
    """Return `url` as others know it: its port at `host`; unchanged when either is empty."""
    return http_url(host, urlsplit(url).port or 80) if host and url else url


def host_and_port(host: str, port: object) -> str:
    """`host:port`, with the brackets that an IPv6 address needs. `port` may be a range."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def split_host_and_port(text: str) -> tuple[str, str]:
    """Split a text made by `host_and_port`; ("", "") for any other text."""
    host, colon, port = text.rpartition(":")
    return (host.strip("[]"), port) if colon and host and port else ("", "")


def rendezvous(stages_at: str, pipeline: str) -> str:
    """`host:port` where the stages of a pipeline find one another: a port of the range in `stages_at`
    ("host:first-last"), the same each time for one pipeline; "" where the node offers none. Two pipelines may draw the
    same port: the later start then fails, and its next try is another pipeline."""
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
    """Ports `first` to `last`, both included."""

    first: int
    last: int

    @classmethod
    def parse(cls, text: str) -> "PortRange | None":
        """Parse "20000-20199"; "" gives None. Raises ValueError with the expected form."""
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
