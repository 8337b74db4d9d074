"""Probe the network: free ports, ready services, answering sockets."""

import asyncio
import contextlib
import socket
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlsplit

import psutil
from redis.exceptions import RedisError

from glowplug.engines.probe import ask
from glowplug.runtime.errors import PortInUse
from glowplug.state.address import connect

PROBE_TIMEOUT_S = 2.0
_FREE_FROM, _FREE_TO = 10000, 32000  # below Linux' ports for outgoing connections


async def http_status(url: str, timeout_s: float = PROBE_TIMEOUT_S) -> int:
    return (await http_answer(url, timeout_s))[0]


async def http_answer(url: str, timeout_s: float = PROBE_TIMEOUT_S) -> tuple[int, bytes]:
    """GET status and body; (0, b"") without a timely answer."""
    try:
        parts = urlsplit(url)
        return await ask(f"{parts.scheme}://{parts.netloc}", parts.path or "/", timeout_s)
    except (OSError, TimeoutError, ValueError):  # a port not known yet
        return 0, b""


async def append_only_problem(url: str) -> str:
    """Why the server says it refuses writes, or ""."""
    client = connect(url, socket_timeout=PROBE_TIMEOUT_S, socket_connect_timeout=PROBE_TIMEOUT_S)
    try:
        status = str((await client.info("persistence")).get("aof_last_write_status", "ok"))
    except (RedisError, OSError, TimeoutError):
        return ""  # a question for `redis_answers`
    finally:
        await client.aclose()
    return "" if status == "ok" else f"it cannot write its append-only file ({status}) and refuses all writes"


async def redis_answers(socket_path: Path) -> bool:
    """Return whether the server on a unix socket answers PING (not while it loads). MISCONF means a full disk, but
    alive; see `append_only_problem`."""
    writer = None
    try:
        async with asyncio.timeout(PROBE_TIMEOUT_S):
            reader, writer = await asyncio.open_unix_connection(str(socket_path))
            writer.write(b"PING\r\n")
            return (await reader.readline()).startswith((b"+PONG", b"-MISCONF"))
    except (OSError, TimeoutError):
        return False
    finally:
        if writer is not None:
            writer.close()


def is_free(host: str, port: int) -> bool:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind((host, port))
            sock.listen(1)
        except OSError:
            return False
    return True


def check_ports(host: str, ports: Sequence[tuple[int, str]]) -> None:
    """Raises PortInUse with the first taken port, its user, its holder, and the setting."""
    for port, owner in ports:
        if not is_free(host, port):
            raise PortInUse(
                f"port {port} on {host}, needed by {owner}, is taken{_by(port)}: "
                "free it or choose other ports with --port-base (GLOWPLUG_PORT_BASE)"
            )


def _by(port: int) -> str:
    return f" by {name}" if (name := holder(port)) else ""


def holder(port: int) -> str:
    """'<process> (pid N)', if visible."""
    with contextlib.suppress(psutil.Error, OSError):
        for connection in psutil.net_connections("tcp"):
            if connection.status == psutil.CONN_LISTEN and connection.pid and connection.laddr[1:2] == (port,):
                return f"{psutil.Process(connection.pid).name()} (pid {connection.pid})"
    return ""


def free_block(host: str, size: int, start_at: int) -> int:
    """First port of a free block. `start_at` spreads simultaneous callers."""
    first = _FREE_FROM + start_at % (_FREE_TO - _FREE_FROM - size)
    bases: list[int] = [*range(first, _FREE_TO - size, size), *range(_FREE_FROM, first, size)]
    for base in bases:
        if all(is_free(host, base + offset) for offset in range(size)):
            return base
    raise PortInUse(f"no {size} free ports in a row between {_FREE_FROM} and {_FREE_TO} on {host}")
