"""The driver's side of a parked engine process (zygote_host.py).

It is a child of this process and ends with it: its imports take a tenth of a second, so outliving the agent, as vLLM's
zygote does (vllm_zygote.py), gains nothing. Requests block, as starting a process does. `start` never waits for
imports; it raises, and its caller starts a fresh interpreter.
"""

import json
import logging
import socket
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from glowplug.domain.errors import EngineFailed

_log = logging.getLogger(__name__)
_ANSWER_S = 2.0
_READ_BYTES = 65536


class ChildZygote:
    """One parked process, ended after `answer_s` without an answer: a fork takes milliseconds."""

    def __init__(
        self, python: str, module: str, environment: Mapping[str, str], *, answer_s: float = _ANSWER_S
    ) -> None:
        self._argv = [python, "-m", __name__ + "_host", module]
        self._environment, self._answer_s = environment, answer_s
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._read = b""
        self._is_parked = False
        self._refused = ""  # why it cannot be parked: another try would fail alike

    @property
    def pid(self) -> int:
        return self._process.pid if self._process else 0

    def park(self) -> None:
        """Begin to park unless begun. Raises EngineFailed."""
        if self._refused:
            raise EngineFailed(self._refused)
        if self._process is not None:
            return
        ours, its = socket.socketpair()
        with its:
            try:
                self._process = subprocess.Popen(
                    self._argv,
                    env=dict(self._environment),
                    stdin=its.fileno(),
                    stdout=subprocess.DEVNULL,
                    start_new_session=True,
                )
            except OSError as error:
                ours.close()
                raise EngineFailed(f"cannot start {self._argv[0]}: {error}") from error
        self._socket, self._read, self._is_parked = ours, b"", False
        _log.info("process %d imports %s and then parks", self.pid, self._argv[-1])

    def until_parked(self, timeout_s: float) -> None:
        """Raises EngineFailed after `timeout_s`."""
        self.park()
        if self._is_parked:
            return
        try:
            said = self._line(timeout_s)
        except (TimeoutError, BlockingIOError) as error:
            raise EngineFailed(f"{self._argv[-1]} is not parked yet") from error
        if "parked" not in said:
            why = f"{self._argv[-1]} cannot be parked: {said.get('error') or self._end()}"
            self._refused = why if said else ""
            self.close()
            raise EngineFailed(why)
        self._is_parked = True

    def start(self, run_dir: Path, log_path: Path, environment: Mapping[str, str]) -> int:
        """Fork an engine; return its pid. Raises EngineFailed, and then none has begun."""
        self.until_parked(0.0)
        log_path.parent.mkdir(parents=True, exist_ok=True)
        question = {"run_dir": str(run_dir.absolute()), "log": str(log_path.absolute()), "env": dict(environment)}
        answer, why = self._answer(question)
        if "pid" in answer:
            return int(answer["pid"])
        raise EngineFailed(f"the parked process refuses: {answer['error']}" if answer else why)

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        self._process, self._socket = None, None

    def _answer(self, question: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
        """The answer, or ({}, reason) after ending the process."""
        assert self._socket is not None and self._process is not None
        try:
            self._socket.settimeout(self._answer_s)
            self._socket.sendall(json.dumps(question).encode() + b"\n")
            if answer := self._line(self._answer_s):
                return answer, ""
            why = f"the parked process is gone: {self._end()}"
        except TimeoutError:
            why = f"the parked process has not answered for {self._answer_s:g} s, and was ended"
        except OSError as error:
            why = f"the parked process is gone: {error}"
        self._socket.shutdown(socket.SHUT_RD)  # no fork can answer from now on; a late answer is in the buffer
        answer = self._line(self._answer_s)
        self.close()
        return answer, why

    def _line(self, timeout_s: float) -> dict[str, Any]:
        """Return {} at the end. Raises TimeoutError."""
        assert self._socket is not None
        self._socket.settimeout(timeout_s)
        with suppress(ConnectionError):
            while b"\n" not in self._read and (more := self._socket.recv(_READ_BYTES)):
                self._read += more
        line, _, self._read = self._read.partition(b"\n")
        answer: dict[str, Any] = json.loads(line) if line else {}
        return answer

    def _end(self) -> str:
        assert self._process is not None
        with suppress(subprocess.TimeoutExpired):
            return f"status {self._process.wait(self._answer_s)}"
        return "it has closed its socket"
