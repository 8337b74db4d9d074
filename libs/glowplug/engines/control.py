"""A driver's requests to a running engine process: a JSON line each way, on a socket in its run directory.

Only the agent's user can enter it. Standard library only, and no asyncio, since engine processes import it on start.
"""

import contextlib
import json
import os
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

SOCKET = "control.sock"
_WHOLE_PATH = 100  # bytes, just below the limit; a descriptor names longer directories

Answer = Callable[[dict[str, Any]], dict[str, Any]]


def serve(run_dir: Path, answer: Answer) -> None:
    """Answer requests by `answer`, or {"error"} where it raises; one at a time, in a daemon thread."""
    listener = listen(run_dir, SOCKET)
    threading.Thread(target=_accept, args=(listener, answer), name="control", daemon=True).start()


def listen(run_dir: Path, name: str, backlog: int = 128) -> socket.socket:
    """Return a listening socket of that name. Raises OSError."""
    with address(run_dir, name) as here, contextlib.ExitStack() as unless_it_listens:
        (run_dir / name).unlink(missing_ok=True)
        listener = unless_it_listens.enter_context(socket.socket(socket.AF_UNIX))
        listener.bind(here)
        listener.listen(backlog)
        unless_it_listens.pop_all()
    return listener


def _accept(listener: socket.socket, answer: Answer) -> None:
    while True:
        connection, _ = listener.accept()
        with connection, contextlib.suppress(OSError), connection.makefile("rwb") as lines:
            lines.write(json.dumps(_answered(answer, lines.readline())).encode() + b"\n")


def _answered(answer: Answer, line: bytes) -> dict[str, Any]:
    try:
        return answer(json.loads(line))
    except Exception as error:  # noqa: BLE001 - whatever it is, the driver reads the reason
        return {"error": f"{type(error).__name__}: {error}"}


@contextlib.contextmanager
def address(run_dir: Path, name: str = SOCKET) -> Iterator[str]:
    path = str(run_dir / name)
    if len(os.fsencode(path)) <= _WHOLE_PATH or sys.platform != "linux":
        yield path
        return
    folder = os.open(run_dir, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{folder}/{name}"
    finally:
        os.close(folder)
