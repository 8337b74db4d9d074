"""Client of a GPU's memory owner (owner.py): a loader or engine that borrows chunks."""

import contextlib
import socket
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from glowplug_lab.gpu_slots.gpu_memory import Chunk, GpuError, GpuMemory, OutOfGpuMemory
from glowplug_lab.gpu_slots.peers import receive, receive_chunks, send, send_descriptors

_RETRY_S = 0.01


class OwnerGone(ConnectionError):
    """Borrowed chunks stay usable; `rejoin` reports them to the next owner."""


class OwnerClient:
    """One connection, one thread, one holder: its end frees the chunks held by it alone. Chunks of the memory's own
    `create` do not belong to the owner."""

    def __init__(self, memory: GpuMemory, path: Path, timeout_s: float = 10.0) -> None:
        """Raises OwnerGone when none listens for `timeout_s`."""
        self._memory, self._path, self._timeout_s = memory, path, timeout_s
        self._ids: dict[Chunk, str] = {}
        self._names: dict[str, tuple[list[str], int]] = {}
        self._connection = self._connect()

    @property
    def memory(self) -> GpuMemory:
        return self._memory

    @property
    def num_free(self) -> int:
        return int(self.holdings()["num_free"])

    @property
    def held(self) -> list[Chunk]:
        return list(self._ids)

    def take(self, holder: str, num_chunks: int) -> list[Chunk]:
        """All or none. Raises OutOfGpuMemory and OwnerGone."""
        return self._borrow({"verb": "take", "num_chunks": num_chunks})[0]

    def take_up_to(self, holder: str, num_chunks: int) -> list[Chunk]:
        """Raises OwnerGone."""
        return self._borrow({"verb": "take", "num_chunks": num_chunks, "at_most": True})[0]

    def give(self, holder: str, chunks: Iterable[Chunk]) -> list[Chunk]:
        """Give back unmapped chunks; return them even if other clients hold them. Raises WrongMapping and OwnerGone."""
        given = list(chunks)
        ids = []
        for chunk in given:
            self._memory.release(chunk)
            ids.append(self._ids.pop(chunk))
        self._forget_names(ids)
        self._ask({"verb": "give", "ids": ids})
        return given

    def publish(self, name: str, chunks: Sequence[Chunk], num_bytes: int) -> None:
        """Let others attach these chunks: protect them first. Raises GpuError for a taken name, and OwnerGone."""
        ids = [self._ids[chunk] for chunk in chunks]
        self._ask({"verb": "publish", "name": name, "ids": ids, "num_bytes": num_bytes})
        self._names[name] = ids, num_bytes

    def attach(self, name: str) -> tuple[list[Chunk], int]:
        """Borrow published chunks with their bytes; map them with Access.READ. Raises GpuError for an unknown name, and
        OwnerGone."""
        chunks, answer = self._borrow({"verb": "attach", "name": name})
        self._names[name] = answer["ids"], answer["num_bytes"]
        return chunks, answer["num_bytes"]

    def holdings(self) -> dict[str, Any]:
        """`holders` (pid, num_chunks, num_chunks_alone, names), `num_free`, `num_held`, `num_shared` and `chunk_bytes`.
        Raises OwnerGone."""
        return self._ask({"verb": "holdings"})

    def rejoin(self, timeout_s: float | None = None) -> None:
        """Hand held chunks to the next owner. Raises OwnerGone when none comes in time, or when the old one still runs:
        it has lent them to others, so this process must stop using them."""
        self._connection.close()
        self._connection = self._connect(timeout_s)
        chunks = list(self._ids)
        message = {"verb": "adopt", "ids": [self._ids[chunk] for chunk in chunks], "names": self._names}
        try:
            send(self._connection, message)
            send_descriptors(self._connection, self._memory, chunks)
            _checked(receive(self._connection))
        except OSError as error:
            raise OwnerGone(f"{self._path}: the owner does not take what is held here: {error}") from error

    def close(self) -> None:
        """Frees chunks held here alone: unmap them before. Idempotent."""
        self._connection.close()

    def _connect(self, timeout_s: float | None = None) -> socket.socket:
        deadline = time.monotonic() + (self._timeout_s if timeout_s is None else timeout_s)
        while True:
            connection = socket.socket(socket.AF_UNIX)
            try:
                connection.connect(str(self._path))
            except OSError as error:
                connection.close()
                if time.monotonic() > deadline:
                    raise OwnerGone(f"no owner of GPU memory listens at {self._path}: {error}") from error
                time.sleep(_RETRY_S)
                continue
            connection.settimeout(self._timeout_s)
            return connection

    def _ask(self, message: dict[str, Any]) -> dict[str, Any]:
        try:
            send(self._connection, message)
            return _checked(receive(self._connection))
        except OSError as error:
            raise OwnerGone(f"{self._path}: {error}") from error

    def _borrow(self, message: dict[str, Any]) -> tuple[list[Chunk], dict[str, Any]]:
        answer = self._ask(message)
        known = {one: chunk for chunk, one in self._ids.items()}
        try:
            chunks = receive_chunks(self._connection, self._memory, len(answer["ids"]))
        except OSError as error:
            raise OwnerGone(f"{self._path}: {error}") from error
        for position, (one, chunk) in enumerate(zip(answer["ids"], chunks, strict=True)):
            if one in known:
                self._memory.release(chunk)
                chunks[position] = known[one]
            else:
                self._ids[chunk] = one
        return chunks, answer

    def _forget_names(self, ids: Iterable[str]) -> None:
        gone = set(ids)
        self._names = {name: held for name, held in self._names.items() if not gone.intersection(held[0])}

    def __enter__(self) -> "OwnerClient":
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):
            self.close()


def _checked(answer: dict[str, Any]) -> dict[str, Any]:
    if "error" not in answer:
        return answer
    kind = OutOfGpuMemory if answer["error"] == "out_of_memory" else GpuError
    raise kind("owner", str(answer.get("message")))
