"""Refuse requests to a server of this process while its engine sleeps. Linux only; standard library only.

A late request would make llama.cpp touch memory just given back. So its accepting thread gets another socket, on a
private path, and requests to the port are answered 503 with REFUSED: routers send those elsewhere
(services/router/engine.py).
A thread in accept() keeps waiting on its original socket, even after dup2. One connection of our own wakes it.
"""

import contextlib
import os
import selectors
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from glowplug.engines import control

REFUSED = "x-glowplug-refused"  # telemetry/semconv.py: HEADER_REFUSED
_BODY = b'{"error":{"message":"the engine sleeps","type":"server_error","code":"engine_asleep","param":null}}'
_ANSWER = (
    b"HTTP/1.1 503 Service Unavailable\r\n" + REFUSED.encode() + b": asleep\r\nContent-Type: application/json\r\n"
    b"Connection: close\r\nContent-Length: %d\r\n\r\n%b" % (len(_BODY), _BODY)
)
_INET = (socket.AF_INET, socket.AF_INET6)
_SOCKET = "server.sock"
_ACCEPT_S, _POLL_S = 5.0, 5e-4
_WAIT_S = 1.0
_READ_BYTES = 1 << 16


class Listener:
    """The server's owner meanwhile uses a socket in `run_dir`. Raises OSError where this process does not listen at
    `port`."""

    def __init__(self, port: int, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._fd = _listening_fd(port)
        self._public: socket.socket | None = None  # ours while requests are refused
        self._private: socket.socket | None = None
        self._wake: socket.socket | None = None
        self._thread: threading.Thread | None = None

    @property
    def refuses(self) -> bool:
        return self._public is not None

    def refuse(self) -> None:
        """Keep requests from the server, except on accepted connections."""
        if self._public is not None:
            return
        private = control.listen(self._run_dir, _SOCKET, 0)
        public = socket.socket(fileno=os.dup(self._fd))
        os.dup2(private.fileno(), self._fd, inheritable=False)
        try:
            self._connected(public).close()
            self._await_accept(private)
        except OSError:
            os.dup2(public.fileno(), self._fd, inheritable=False)
            public.close()
            private.close()
            raise
        private.listen()
        woken, self._wake = socket.socketpair()
        self._public, self._private = public, private
        answered = public, woken, self.connected
        self._thread = threading.Thread(target=_answer_all, args=answered, name="refuse", daemon=True)
        self._thread.start()

    def _await_accept(self, private: socket.socket) -> None:
        """Return once the server accepts there: a second connection is queued only after the first was accepted. An
        answer would need a server thread, and idle connections may hold all. Raises TimeoutError."""
        deadline = time.monotonic() + _ACCEPT_S
        with self._connected(private):
            while time.monotonic() < deadline:
                with contextlib.suppress(BlockingIOError):
                    self._connected(private).close()
                    return
                time.sleep(_POLL_S)
        raise TimeoutError("the server does not accept")

    def serve(self) -> None:
        if self._public is not None and self._private is not None:
            self._stop_answering()
            os.dup2(self._public.fileno(), self._fd, inheritable=False)
            self._connected(self._private).close()
            self.close()

    def close(self) -> None:
        self._stop_answering()
        for held in (self._public, self._private):
            if held is not None:
                held.close()
        self._public = self._private = None
        (self._run_dir / _SOCKET).unlink(missing_ok=True)

    def _stop_answering(self) -> None:
        if self._wake is not None and self._thread is not None:
            self._wake.close()
            self._thread.join()
        self._wake = self._thread = None

    def connected(self) -> socket.socket:
        """Connect to the server, even while it refuses others."""
        with socket.socket(fileno=os.dup(self._fd)) as listening:
            return self._connected(listening)

    def _connected(self, listening: socket.socket) -> socket.socket:
        """Connect to that socket, through the loopback for a wildcard address."""
        connected = socket.socket(listening.family)
        try:
            if listening.family is socket.AF_UNIX:
                connected.setblocking(False)
                with control.address(self._run_dir, _SOCKET) as path:
                    connected.connect(path)
                connected.setblocking(True)
            else:
                host, port = listening.getsockname()[:2]
                connected.connect(({"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host), port))
        except OSError:
            connected.close()
            raise
        return connected


def _answer_all(public: socket.socket, woken: socket.socket, server: Callable[[], socket.socket]) -> None:
    public.setblocking(False)
    try:
        with woken, selectors.DefaultSelector() as selector:
            selector.register(public, selectors.EVENT_READ)
            selector.register(woken, selectors.EVENT_READ)
            while all(key.fileobj is not woken for key, _ in selector.select()):
                with contextlib.suppress(OSError):
                    connected, _ = public.accept()
                    threading.Thread(target=_answer, args=(connected, server), name="refuse one", daemon=True).start()
    finally:
        public.setblocking(True)


def _answer(connected: socket.socket, server: Callable[[], socket.socket]) -> None:
    """Serve GETs (health, metrics), which touch no engine memory. Read a refused request first, else closing resets
    the connection before the client reads the answer."""
    with connected, contextlib.suppress(OSError):
        connected.settimeout(_WAIT_S)
        asked = connected.recv(_READ_BYTES)
        if asked.startswith(b"GET "):
            with server() as answering:
                answering.settimeout(_WAIT_S)
                answering.sendall(asked)
                while part := answering.recv(_READ_BYTES):
                    connected.sendall(part)
        elif asked:
            connected.sendall(_ANSWER)
            connected.shutdown(socket.SHUT_WR)
            while connected.recv(_READ_BYTES):
                pass


def end_connections(port: int) -> None:
    """Close all accepted connections at `port`."""
    for _, accepted in _sockets():
        with contextlib.suppress(OSError):  # a listening one has no peer
            if accepted.family in _INET and accepted.getsockname()[1] == port:
                accepted.getpeername()
                accepted.shutdown(socket.SHUT_RDWR)


def _listening_fd(port: int) -> int:
    found = -1
    for fd, opened in _sockets():
        if opened.family in _INET and opened.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            found = fd if opened.getsockname()[1] == port else found
    if found < 0:
        raise OSError(f"this process does not listen at port {port}")
    return found


def _sockets() -> Iterator[tuple[int, socket.socket]]:
    for open_file in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            copy = os.dup(int(open_file.name))
            try:
                opened = socket.socket(fileno=copy)
            except OSError:
                os.close(copy)
                continue
            with opened:
                yield int(open_file.name), opened
