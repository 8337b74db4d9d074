"""The driver's side of vLLM's zygote, shared by a fleet's agents on this machine, one per interpreter.

Its messages are in glowplug_vllm/parked/protocol.py, in the other environment.
"""

import asyncio
import hashlib
import json
import logging
import os
import subprocess
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

from glowplug.domain.errors import EngineFailed
from glowplug.engines import process

_log = logging.getLogger(__name__)
_ALREADY_PARKED = 75  # exit status: another zygote is parking
_POLL_S = 0.05
_ANSWER_S = 30.0  # a zygote is busy for a second while it keeps a tokenizer
_SOCKET, _LOG = "zygote.sock", "zygote.log"


def default_dir(python: Path, version: str = "") -> Path:
    """A private directory for each interpreter and `version`. Short, since a socket's path is limited to about 100
    characters."""
    digest = hashlib.sha256(f"{python} {version}".encode()).hexdigest()[:12]
    return Path(tempfile.gettempdir()) / f"glowplug-{os.getuid()}" / f"vllm-{digest}"


class ZygoteLease:
    """A lease on one interpreter's parked process. Every method raises EngineFailed without one."""

    def __init__(self, python: Path, directory: Path, environment: dict[str, str], timeout_s: float) -> None:
        self._python = python
        self._directory = directory
        self._environment = environment
        self._timeout_s = timeout_s
        self._turn = asyncio.Lock()
        self._lease: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        self._parking: subprocess.Popen[bytes] | None = None

    @property
    def socket_path(self) -> Path:
        return self._directory / _SOCKET

    async def ensure(self) -> None:
        """Lease a parked zygote; start one if need be (15-25 s on two cores)."""
        async with self._turn:
            if self._lease is not None and not self._lease[0].at_eof():
                return
            loop = asyncio.get_running_loop()
            deadline = loop.time() + self._timeout_s
            while (lease := await self._connect()) is None:
                self._park_unless_parking()
                if loop.time() > deadline:
                    raise EngineFailed(f"vLLM did not park within {self._timeout_s:g} s\n{self._log_tail()}")
                await asyncio.sleep(_POLL_S)
            await _exchange(*lease, {"op": "lease"})
            self._lease = lease

    async def start(self, run_dir: Path, log: Path, env: dict[str, str]) -> int:
        question = {"op": "start", "run_dir": str(run_dir.absolute()), "log": str(log.absolute()), "env": env}
        return int((await self._ask(question))["pid"])

    async def keep_tokenizer(self, directory: Path) -> None:
        await self._ask({"op": "keep", "tokenizer": str(directory)})

    async def close(self) -> None:
        """Release the lease. The last release ends the zygote; its servers live on."""
        if self._lease is None:
            return
        reader, writer = self._lease
        self._lease = None
        with suppress(OSError, TimeoutError, EngineFailed):
            await _exchange(reader, writer, {"op": "release"})
        writer.close()
        if self._parking is not None:
            with suppress(subprocess.TimeoutExpired):
                await asyncio.to_thread(self._parking.wait, 5.0)

    async def _ask(self, question: dict[str, Any]) -> dict[str, Any]:
        await self.ensure()
        connection = await self._connect()
        if connection is None:
            raise EngineFailed(f"the parked vLLM process is gone\n{self._log_tail()}")
        try:
            return await _exchange(*connection, question)
        finally:
            connection[1].close()

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter] | None:
        try:
            return await asyncio.open_unix_connection(self.socket_path)
        except (FileNotFoundError, ConnectionRefusedError):
            return None

    def _park_unless_parking(self) -> None:
        if self._parking is not None:
            status = self._parking.poll()
            if status is None:
                return
            self._parking = None
            if status != _ALREADY_PARKED:
                raise EngineFailed(f"vLLM could not be parked (status {status})\n{self._log_tail()}")
        make_private(self._directory)
        argv = [str(self._python), "-m", "glowplug_vllm.parked", "park", "--socket", str(self.socket_path)]
        with (self._directory / _LOG).open("ab") as log:
            self._parking = subprocess.Popen(
                argv,
                cwd=self._directory,
                env=process.engine_environment(self._environment),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        _log.info(
            "process %d imports vLLM with %s and then parks; its log is %s",
            self._parking.pid,
            self._python,
            self._directory / _LOG,
        )

    def _log_tail(self) -> str:
        return process.log_tail(self._directory / _LOG)


def make_private(directory: Path) -> None:
    """Raises EngineFailed when another user owns it or can enter it."""
    directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    status = directory.stat()
    if status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise EngineFailed(f"{directory} belongs to, or is open to, another user: remove it")


async def _exchange(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, question: dict[str, Any]
) -> dict[str, Any]:
    try:
        writer.write(json.dumps(question).encode() + b"\n")
        async with asyncio.timeout(_ANSWER_S):
            await writer.drain()
            line = await reader.readline()
        answer: dict[str, Any] = json.loads(line)
    except (OSError, TimeoutError, ValueError) as error:
        raise EngineFailed(f"the parked vLLM process does not answer: {type(error).__name__} {error}") from error
    if not answer.get("ok"):
        raise EngineFailed(f"the parked vLLM process refuses: {answer.get('error', 'no reason given')}")
    return answer
