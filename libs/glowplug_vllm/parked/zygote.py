"""The zygote's loop: one thread, one selector; forks on request, reaps, and ends without a lease.

A lease is an open connection. The last `release` ends the zygote at once; a broken connection leaves it `linger_s`,
so that an agent that was killed finds it again. Servers never depend on it."""

import fcntl
import json
import os
import selectors
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

from glowplug_vllm import __version__, process
from glowplug_vllm.parked import protocol
from glowplug_vllm.parked.protocol import BadQuestion, Question

MAX_CONNECTIONS = 256
TICK_S = 1.0


class AlreadyParked(RuntimeError):
    """Another process parks at this socket."""


def lock(socket_path: Path) -> TextIO:
    """Hold the right to park here until the file is closed. Raises AlreadyParked."""
    socket_path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    held = socket_path.with_suffix(".lock").open("w")
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        held.close()
        raise AlreadyParked(f"another process parks at {socket_path}") from error
    return held


class Zygote:
    """`boot(question)` runs in each fork and must not return; `keep(path)` keeps a tokenizer."""

    def __init__(
        self,
        socket_path: Path,
        boot: Callable[[Question], Any],
        *,
        keep: Callable[[Path], bool] = lambda path: False,
        linger_s: float = 60.0,
        parked_s: float = 0.0,
        inherited: tuple[TextIO, ...] = (),
    ) -> None:
        self._path = socket_path
        self._boot = boot
        self._keep = keep
        self._linger_s = linger_s
        self._parked_s = parked_s
        self._inherited = inherited  # closed in forks, which must not hold the lock
        self._selector = selectors.DefaultSelector()
        self._buffers: dict[socket.socket, bytes] = {}
        self._leases: set[socket.socket] = set()
        self._servers: set[int] = set()
        self._ends_at = float("inf")
        self._running = True

    def run(self) -> None:
        """Serve until asked to stop, or without a lease for `linger_s`."""
        self._path.unlink(missing_ok=True)
        self._listener = socket.socket(socket.AF_UNIX)
        before = os.umask(0o177)
        try:
            self._listener.bind(str(self._path))
        finally:
            os.umask(before)
        self._listener.listen(32)
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._wake, self._bell = socket.socketpair()
        for end in (self._wake, self._bell):
            end.setblocking(False)
        self._selector.register(self._wake, selectors.EVENT_READ)
        signal.set_wakeup_fd(self._bell.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        signal.signal(signal.SIGTERM, lambda number, frame: self._stop())
        self._ends_at = time.monotonic() + self._linger_s
        self._say(parked=os.getpid(), seconds=round(self._parked_s, 2))
        try:
            while self._running and time.monotonic() < self._ends_at:
                for key, _ in self._selector.select(TICK_S):
                    self._turn(key.fileobj)
                self._reap()
        finally:
            self._path.unlink(missing_ok=True)
            self._say(ended=os.getpid(), num_servers=len(self._servers))

    def _turn(self, ready: Any) -> None:
        if ready is self._listener:
            connection, _ = self._listener.accept()
            if len(self._buffers) >= MAX_CONNECTIONS:
                connection.close()
                return
            connection.settimeout(5.0)
            self._buffers[connection] = b""
            self._selector.register(connection, selectors.EVENT_READ)
        elif ready is self._wake:
            with suppress(BlockingIOError):
                self._wake.recv(4096)
        elif ready in self._buffers:
            self._read(ready)

    def _read(self, connection: socket.socket) -> None:
        try:
            received = connection.recv(65536)
        except OSError:
            received = b""
        data = self._buffers[connection] + received
        if not received or len(data) > protocol.MAX_LINE_BYTES:
            self._close(connection)
            return
        *lines, self._buffers[connection] = data.split(b"\n")
        for line in lines:
            try:
                connection.sendall(protocol.encode(self._answer(connection, line)))
            except OSError:
                self._close(connection)
                return

    def _answer(self, connection: socket.socket, line: bytes) -> dict[str, Any]:
        try:
            question = protocol.decode(line)
            if question.op == "start":
                return {"ok": True, "pid": self._fork(question)}
            if question.op == "keep":
                return {"ok": True, "kept": self._keep(Path(question.tokenizer))}
        except BadQuestion as error:
            return {"ok": False, "error": str(error)}
        except Exception as error:  # noqa: BLE001 (one bad directory or a full process table must not end the zygote)
            traceback.print_exc()
            return {"ok": False, "error": f"{type(error).__name__}: {error}"}
        if question.op == "hello":
            counts = {"num_servers": len(self._servers), "num_leases": len(self._leases)}
            return {"ok": True, "pid": os.getpid(), "version": __version__, "parked_s": self._parked_s, **counts}
        if question.op == "lease":
            self._leases.add(connection)
            self._ends_at = float("inf")
        elif question.op == "release" and connection in self._leases:
            self._leases.discard(connection)
            self._running = bool(self._leases)
        elif question.op == "stop":
            self._stop()
        return {"ok": True}

    def _fork(self, question: Question) -> int:
        """Return once the fork leads its own session with its own handlers: no signal to it is lost."""
        own_session, tell = os.pipe()
        pid = os.fork()
        if pid:
            os.close(tell)
            os.read(own_session, 1)
            os.close(own_session)
            self._servers.add(pid)
            self._say(started=pid, run_dir=question.run_dir)
            return pid
        try:
            os.setsid()
            process.reset_signals()
            os.close(own_session)
            os.close(tell)
            self._selector.close()
            for held in (self._listener, self._wake, self._bell, *self._buffers):
                held.close()
            for file in self._inherited:
                file.close()
            process.redirect_output(Path(question.log))
            os.chdir(question.run_dir)
            for name, value in question.env.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value
            self._boot(question)
        except BaseException:  # noqa: BLE001 (in the fork: whatever happens, this must not run the zygote's loop)
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(1)

    def _reap(self) -> None:
        while self._servers:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if not pid:
                return
            self._servers.discard(pid)
            self._say(exited=pid, code=os.waitstatus_to_exitcode(status))

    def _close(self, connection: socket.socket) -> None:
        self._selector.unregister(connection)
        self._buffers.pop(connection, None)
        if connection in self._leases:
            self._leases.discard(connection)
            if not self._leases:
                self._ends_at = time.monotonic() + self._linger_s
        connection.close()

    def _stop(self) -> None:
        self._running = False

    def _say(self, **what: Any) -> None:
        print(json.dumps(what), flush=True)
