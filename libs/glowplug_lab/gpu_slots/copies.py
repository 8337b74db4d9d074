"""Order copies to a GPU: urgent ones first, with a bound on copies under way.

HydraServe section 4.2 wants critical copies to pass others; CUDA stream priorities do not reorder copies. So each class
has a bucket of tokens, one per byte, and waits for more urgent classes. An urgent copy waits at most for the others'
tokens: 64 MiB take 1.2 ms at 55 GB/s.
"""

import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import IntEnum

from glowplug_lab.gpu_slots.gpu_memory import Copy, GpuMemory

MIB = 1 << 20


class CopyClass(IntEnum):
    """Most urgent first."""

    CRITICAL = 0  # a request waits for these bytes
    PREWARM = 1
    BACKGROUND = 2


_POLL_S = 0.0002  # a sixth of the time that 64 MiB take
UNDER_WAY_BYTES = {CopyClass.CRITICAL: 256 * MIB, CopyClass.PREWARM: 64 * MIB, CopyClass.BACKGROUND: 64 * MIB}


class CopyBuckets:
    """Pure."""

    def __init__(self, under_way_bytes: Mapping[CopyClass, int] = UNDER_WAY_BYTES) -> None:
        self._full, self._tokens = dict(under_way_bytes), dict(under_way_bytes)
        self._num_pieces = dict.fromkeys(CopyClass, 0)  # waiting or under way

    def ask(self, urgency: CopyClass) -> None:
        """Until the piece ends, no less urgent one begins."""
        self._num_pieces[urgency] += 1

    def admits(self, urgency: CopyClass, num_bytes: int) -> bool:
        """A piece larger than the bucket may begin when nothing of its class is under way."""
        if any(self._num_pieces[other] for other in CopyClass if other < urgency):
            return False
        return num_bytes <= self._tokens[urgency] or self._tokens[urgency] == self._full[urgency]

    def begin(self, urgency: CopyClass, num_bytes: int) -> None:
        self._tokens[urgency] -= num_bytes

    def end(self, urgency: CopyClass, num_bytes: int) -> None:
        self._tokens[urgency] += num_bytes
        self._num_pieces[urgency] -= 1


@dataclass(eq=False, slots=True)
class Piece:
    copy: Copy
    num_bytes: int
    urgency: CopyClass
    is_done: bool = False


class Copier:
    """Copy in pieces, from any number of threads. Raises GpuError."""

    def __init__(self, memory: GpuMemory, buckets: CopyBuckets | None = None, piece_bytes: int = 16 * MIB) -> None:
        self._memory, self._piece_bytes = memory, piece_bytes
        self._buckets = buckets or CopyBuckets()
        self._changed = threading.Condition()
        self._under_way: list[Piece] = []

    def begin(self, address: int, host_address: int, num_bytes: int, urgency: CopyClass) -> list[Piece]:
        """Return once every piece has begun; on failure, wait for the earlier ones and raise."""
        pieces: list[Piece] = []
        try:
            for at in range(0, num_bytes, self._piece_bytes):
                piece_bytes = min(self._piece_bytes, num_bytes - at)
                pieces.append(self._begin_one(address + at, host_address + at, piece_bytes, urgency))
        except BaseException:
            self.wait(pieces)  # the caller may unmap their destination
            raise
        return pieces

    def _begin_one(self, address: int, host_address: int, num_bytes: int, urgency: CopyClass) -> Piece:
        with self._changed:
            self._buckets.ask(urgency)
            while not self._buckets.admits(urgency, num_bytes):
                if not self._collect():
                    self._changed.wait(_POLL_S)
            self._buckets.begin(urgency, num_bytes)
            try:
                copy = self._memory.copy_in(address, host_address, num_bytes)
            except BaseException:
                self._buckets.end(urgency, num_bytes)
                self._changed.notify_all()
                raise
            piece = Piece(copy, num_bytes, urgency)
            self._under_way.append(piece)
            return piece

    def wait(self, pieces: Iterable[Piece]) -> None:
        with self._changed:
            for piece in pieces:
                while not piece.is_done:
                    if not self._collect():
                        self._changed.wait(_POLL_S)

    def _collect(self) -> bool:
        done = [piece for piece in self._under_way if piece.copy.is_done()]
        for piece in done:
            piece.is_done = True
            self._buckets.end(piece.urgency, piece.num_bytes)
            self._under_way.remove(piece)
        if done:
            self._changed.notify_all()
        return bool(done)
