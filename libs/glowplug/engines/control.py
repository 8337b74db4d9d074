"""What a driver asks of an engine process of ours once it runs: a JSON line each way, on a socket in its run directory.

The directory belongs to the agent's user alone, so nobody else can ask; the engine's own port knows nothing of it.
Standard library only, and no asyncio, since engine processes import it on their way up.
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
_WHOLE_PATH = 100  # bytes that an address may have, less a little; longer directories are named by a descriptor

Answer = Callable[[dict[str, Any]], dict[str, Any]]


def serve(run_dir: Path, answer: Answer) -> None:
    """Answer each question with what `answer` returns, or {"error"} with what it raised; one at a time, in a thread of
    its own, for as long as the process lives."""
    listener = listen(run_dir, SOCKET)
    threading.Thread(target=_accept, args=(listener, answer), name="control", daemon=True).start()


def listen(run_dir: Path, name: str, backlog: int = 128) -> socket.socket:
    """A socket of that name there, which listens. Raises OSError."""
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
        with connection, contextlib.suppress(OSError), connection.makefile("rwb") as lines:  # it may have given up
            lines.write(json.dumps(_answered(answer, lines.readline())).encode() + b"\n")


def _answered(answer: Answer, line: bytes) -> dict[str, Any]:
    try:
        return answer(json.loads(line))
    except Exception as error:  # noqa: BLE001 - whatever it is, the driver reads the reason
        return {"error": f"{type(error).__name__}: {error}"}


@contextlib.contextmanager
def address(run_dir: Path, name: str = SOCKET) -> Iterator[str]:
    """What to bind or to connect to, inside the context."""
    path = str(run_dir / name)
    if len(os.fsencode(path)) <= _WHOLE_PATH or sys.platform != "linux":
        yield path
        return
    folder = os.open(run_dir, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{folder}/{name}"
    finally:
        os.close(folder)
