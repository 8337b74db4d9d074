"""Small questions over the network: is a port free, does a service say it is ready, does a socket answer."""

import asyncio
import contextlib
import socket
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlsplit

import psutil
from redis.exceptions import RedisError

from glowplug.engines.probe import ask
from glowplug.runtime.supervisor.errors import PortInUse
from glowplug.state.address import connect

PROBE_TIMEOUT_S = 2.0
_FREE_FROM, _FREE_TO = 10000, 32000  # below the ports that Linux gives to outgoing connections


async def http_status(url: str, timeout_s: float = PROBE_TIMEOUT_S) -> int:
    """The status of one GET, 0 when no answer comes in time."""
    return (await http_answer(url, timeout_s))[0]


async def http_answer(url: str, timeout_s: float = PROBE_TIMEOUT_S) -> tuple[int, bytes]:
    """Status and body of one GET; (0, b"") when no answer comes in time."""
    try:
        parts = urlsplit(url)
        return await ask(f"{parts.scheme}://{parts.netloc}", parts.path or "/", timeout_s)
    except (OSError, TimeoutError, ValueError):  # ValueError: a port that is not known yet
        return 0, b""


async def append_only_problem(url: str) -> str:
    """Why the server at `url` refuses writes, by its own word, or ""."""
    client = connect(url, socket_timeout=PROBE_TIMEOUT_S, socket_connect_timeout=PROBE_TIMEOUT_S)
    try:
        status = str((await client.info("persistence")).get("aof_last_write_status", "ok"))
    except (RedisError, OSError, TimeoutError):
        return ""  # whether it answers at all is another question
    finally:
        await client.aclose()
    return "" if status == "ok" else f"it cannot write its append-only file ({status}) and refuses all writes"


async def redis_answers(socket_path: Path) -> bool:
    """Whether the server behind a unix socket answers PING (it does not while it reads its files).

    A server whose disk is full answers PING with MISCONF: it is alive, and `append_only_problem` says the rest.
    """
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
    """Whether `host:port` can be listened on now."""
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
    """Raises PortInUse naming the first taken port, who needs it, who has it, and the setting to change."""
    for port, owner in ports:
        if not is_free(host, port):
            raise PortInUse(
                f"port {port} on {host}, needed by {owner}, is taken{_by(port)}: "
                "free it or choose other ports with --port-base (GLOWPLUG_PORT_BASE)"
            )


def _by(port: int) -> str:
    return f" by {name}" if (name := holder(port)) else ""


def holder(port: int) -> str:
    """'<process> (pid N)' that listens on `port`, when the system lets us see it."""
    with contextlib.suppress(psutil.Error, OSError):
        for connection in psutil.net_connections("tcp"):
            if connection.status == psutil.CONN_LISTEN and connection.pid and connection.laddr[1:2] == (port,):
                return f"{psutil.Process(connection.pid).name()} (pid {connection.pid})"
    return ""


def free_block(host: str, size: int, start_at: int) -> int:
    """The first port of a free block of `size` ports. `start_at` spreads callers that ask at once."""
    first = _FREE_FROM + start_at % (_FREE_TO - _FREE_FROM - size)
    bases: list[int] = [*range(first, _FREE_TO - size, size), *range(_FREE_FROM, first, size)]
    for base in bases:
        if all(is_free(host, base + offset) for offset in range(size)):
            return base
    raise PortInUse(f"no {size} free ports in a row between {_FREE_FROM} and {_FREE_TO} on {host}")
