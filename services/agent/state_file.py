"""An agent's state on disk, for a restart after kill -9: `<state_dir>/<node_id>/agent.json` and its lock."""

import fcntl
import logging
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import msgspec

from glowplug.controllers.agent.messages import AgentMemory
from glowplug.domain.moment import moved
from glowplug.engines.port import EngineHandle
from glowplug.events.envelope import MalformedEvent, from_json
from glowplug.runtime.clock import now_s

log = logging.getLogger(__name__)
SCHEMA = 4  # 1 knew an instance by flags, 2 by twenty states; 3 kept fields of a start, 4 keeps its command
MAX_STATE_BYTES = 64 << 20  # instances of one node, each with its model: a few KiB apiece


class NodeTaken(RuntimeError):
    """Another agent serves this node."""


class NodeLock:
    """One per node, held until its process ends in any way."""

    def __init__(self, node_dir: Path, node_id: str) -> None:
        """Raises NodeTaken."""
        node_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._fd = os.open(node_dir / "agent.lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            owner = os.pread(self._fd, 32, 0).decode("ascii", "replace").strip() or "unknown"
            os.close(self._fd)
            raise NodeTaken(f"node {node_id} has an agent already (pid {owner}, state in {node_dir})") from error
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, str(os.getpid()).encode(), 0)

    def release(self) -> None:
        os.close(self._fd)


class _Schema(msgspec.Struct):
    schema: int = 1


class _Contents(msgspec.Struct):
    schema: int = SCHEMA
    written_at: float = 0.0
    memory: AgentMemory = AgentMemory()
    handles: dict[str, EngineHandle] = {}


class StateFile:
    """Contents in memory, written atomically at each change. An unreadable file, or one of another schema, counts as
    none: the agent then ends all engines here at its start."""

    def __init__(self, path: Path, clock: Callable[[], float] = now_s) -> None:
        self._path, self._clock = path, clock
        self._contents = self._read()
        if (ahead_s := self._contents.written_at - clock()) > 0:  # the clock was set back since
            self._contents.memory = moved(self._contents.memory, -ahead_s)
        self.failure = ""

    @property
    def memory(self) -> AgentMemory:
        return self._contents.memory

    @property
    def handles(self) -> dict[str, EngineHandle]:
        return dict(self._contents.handles)

    def _read(self) -> _Contents:
        try:
            raw = self._path.read_bytes()
            schema = from_json(raw, _Schema, max_bytes=MAX_STATE_BYTES).schema
            if schema == SCHEMA:
                return from_json(raw, _Contents, max_bytes=MAX_STATE_BYTES)
            log.error(
                "the state file %s has schema %s and this version reads schema %s: the agent starts without it and "
                "ends the engines that the earlier version left running",
                self._path,
                schema,
                SCHEMA,
            )
            return _Contents()
        except FileNotFoundError:
            return _Contents()
        except (OSError, MalformedEvent) as error:
            log.error("the agent cannot read its state file %s and starts without it: %s", self._path, error)
            return _Contents()

    def remember(self, memory: AgentMemory) -> None:
        self._contents.memory = memory
        self._write()

    def put_handle(self, handle: EngineHandle) -> None:
        self._contents.handles[handle.instance_id] = handle
        self._write()

    def rename_handle(self, old_id: str, new_id: str) -> EngineHandle | None:
        """Give an instance's process to another instance; None if it has none."""
        handle = self._contents.handles.pop(old_id, None)
        if handle is not None:
            handle = self._contents.handles[new_id] = replace(handle, instance_id=new_id)
            self._write()
        return handle

    def drop_handle(self, instance_id: str) -> None:
        if self._contents.handles.pop(instance_id, None) is not None:
            self._write()

    def retry(self) -> None:
        if self.failure:
            self._write()

    def _write(self) -> None:
        """A full disk loses the memory of a restart, never an engine, and leaves the file unchanged: logged once,
        retried at each change and `retry`."""
        scratch = self._path.with_suffix(".tmp")
        self._contents.written_at = self._clock()
        try:
            scratch.write_bytes(msgspec.json.encode(self._contents))
            scratch.replace(self._path)
        except OSError as error:
            if not self.failure:
                log.error("the agent cannot write its state file %s: %s", self._path, error)
            self.failure = str(error)
        else:
            self.failure = ""
