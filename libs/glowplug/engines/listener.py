"""The listening socket of a server in this process, which refuses what comes while its engine sleeps. Linux only.

A router that has not yet learned of a sleep may send one more request. llama.cpp would run it and touch the memory that
it has given back. So its accepting thread is given another socket, on a private path, and what comes to the port is
answered 503 with REFUSED: routers send such a request elsewhere (services/router/engine.py). Standard library only,
since engine processes import it.

A thread that waits in accept() keeps waiting on the socket that it was called with, whatever its descriptor is by then.
One connection of our own brings it back; nobody else accepts there until it has turned to the other socket.
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
_ACCEPT_S, _POLL_S = 5.0, 5e-4  # until the server has turned to the other socket
_WAIT_S = 1.0  # for the first bytes of a request that is refused
_READ_BYTES = 1 << 16


class Listener:
    """Of the server that listens at `port`; in `run_dir` lies the socket by which its owner reaches it meanwhile.
    Raises OSError where this process has no listening socket at that port."""

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
        """From now on no request reaches the server, but for those whose connections it has accepted already."""
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
        """Return once the server accepts there: a second connection finds no place before the first has been accepted.
        An answer would say it too, but needs a thread of the server's, and idle connections may hold all of them.
        Raises TimeoutError."""
        deadline = time.monotonic() + _ACCEPT_S
        with self._connected(private):
            while time.monotonic() < deadline:
                with contextlib.suppress(BlockingIOError):
                    self._connected(private).close()
                    return
                time.sleep(_POLL_S)
        raise TimeoutError("the server does not accept")

    def serve(self) -> None:
        """Requests reach the server again."""
        if self._public is not None and self._private is not None:
            self._stop_answering()
            os.dup2(self._public.fileno(), self._fd, inheritable=False)
            self._connected(self._private).close()
            self.close()

    def close(self) -> None:
        """Let go of what it holds: the port too, where requests are refused."""
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
        """A connection to the server, whether it refuses others or not."""
        with socket.socket(fileno=os.dup(self._fd)) as listening:
            return self._connected(listening)

    def _connected(self, listening: socket.socket) -> socket.socket:
        """A connection of our own to that socket; of a wildcard, by the loopback."""
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
    """Answer each connection until `woken` is closed at its other end."""
    public.setblocking(False)
    try:
        with woken, selectors.DefaultSelector() as selector:
            selector.register(public, selectors.EVENT_READ)
            selector.register(woken, selectors.EVENT_READ)
            while all(key.fileobj is not woken for key, _ in selector.select()):
                with contextlib.suppress(OSError):  # it may have left again
                    connected, _ = public.accept()
                    threading.Thread(target=_answer, args=(connected, server), name="refuse one", daemon=True).start()
    finally:
        public.setblocking(True)  # it is the server's again


def _answer(connected: socket.socket, server: Callable[[], socket.socket]) -> None:
    """A GET touches no memory of the engine's: how it is, and what it counts, is answered as ever. Anything else is
    refused; what has come of it is read first, else closing would reset the connection before the answer is read."""
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
    """Break off every connection that this process has accepted at `port`."""
    for _, accepted in _sockets():
        with contextlib.suppress(OSError):  # one that listens has no peer
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
    """Every socket of this process, by its descriptor."""
    for open_file in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # it was the directory's own
            copy = os.dup(int(open_file.name))
            try:
                opened = socket.socket(fileno=copy)
            except OSError:
                os.close(copy)
                continue  # it is no socket
            with opened:
                yield int(open_file.name), opened
