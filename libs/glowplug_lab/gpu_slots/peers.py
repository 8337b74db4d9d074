"""Messages between a GPU memory owner and its clients: JSON after its length, then descriptors.

No message can run code (no pickle). Descriptors follow in batches of at most BATCH, each with one byte (SCM_MAX_FD).
"""

import array
import errno
import json
import os
import socket
import struct
import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

from glowplug_lab.gpu_slots.gpu_memory import Chunk, GpuMemory

BATCH = 250
_READ_S = 10.0
_POLL_S = 0.001
_LENGTH = struct.Struct("<I")
_MOST_BYTES = 16 << 20
_CREDENTIALS = struct.Struct("3i")
_OFFSETS = struct.Struct("<Q")


class PeerGone(ConnectionError):
    """The other side has ended or breaks the protocol."""


def peer_of(connection: socket.socket) -> tuple[int, int]:
    """(pid, uid), by the kernel."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(raw)
    return pid, uid


def send(connection: socket.socket, message: dict[str, Any]) -> None:
    """Raises OSError."""
    body = json.dumps(message).encode()
    connection.sendall(_LENGTH.pack(len(body)) + body)


def receive(connection: socket.socket) -> dict[str, Any]:
    """Raises PeerGone and OSError."""
    (length,) = _LENGTH.unpack(_exactly(connection, _LENGTH.size))
    if length > _MOST_BYTES:
        raise PeerGone(f"a message of {length} bytes")
    try:
        message = json.loads(_exactly(connection, length))
    except ValueError as error:
        raise PeerGone(f"not a message: {error}") from error
    if not isinstance(message, dict):
        raise PeerGone("not a message")
    return message


def _exactly(connection: socket.socket, num_bytes: int) -> bytes:
    parts = bytearray()
    while len(parts) < num_bytes:
        if not (part := connection.recv(num_bytes - len(parts))):
            raise PeerGone("the other side has ended")
        parts += part
    return bytes(parts)


def send_descriptors(connection: socket.socket, memory: GpuMemory, chunks: Sequence[Chunk]) -> None:
    """Raises OSError and GpuError."""
    for first in range(0, len(chunks), BATCH):
        exported = [memory.export_fd(chunk) for chunk in chunks[first : first + BATCH]]
        try:
            offsets = b"".join(_OFFSETS.pack(offset) for _, offset in exported)
            connection.sendall(offsets)
            _send_batch(connection, [descriptor for descriptor, _ in exported])
        finally:
            for descriptor, _ in exported:
                os.close(descriptor)


def _send_batch(connection: socket.socket, descriptors: Sequence[int]) -> None:
    """Wait while too many descriptors are in transit (RLIMIT_NOFILE per user), at most _READ_S."""
    deadline = time.monotonic() + _READ_S
    while True:
        try:
            socket.send_fds(connection, [b"\0"], descriptors)
            return
        except OSError as error:
            if error.errno != errno.ETOOMANYREFS or time.monotonic() > deadline:
                raise
        time.sleep(_POLL_S)


def receive_chunks(connection: socket.socket, memory: GpuMemory, num: int) -> list[Chunk]:
    """Raises PeerGone, OSError and GpuError."""
    chunks = []
    for descriptor, offset in receive_descriptors(connection, num):
        try:
            chunks.append(memory.import_fd(descriptor, offset))
        finally:
            os.close(descriptor)
    return chunks


def receive_descriptors(connection: socket.socket, num: int) -> Iterator[tuple[int, int]]:
    """Yield each (descriptor, offset), for the caller to close. Raises PeerGone and OSError."""
    for first in range(0, num, BATCH):
        size = min(BATCH, num - first)
        offsets = [one for (one,) in _OFFSETS.iter_unpack(_exactly(connection, size * _OFFSETS.size))]
        data, ancillary, _, _ = connection.recvmsg(1, socket.CMSG_SPACE(size * array.array("i").itemsize))
        descriptors = array.array("i")
        for level, kind, raw in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                descriptors.frombytes(raw[: len(raw) - len(raw) % descriptors.itemsize])
        if not data or len(descriptors) != size:
            for descriptor in descriptors:
                os.close(descriptor)
            raise PeerGone(f"{len(descriptors)} of {size} descriptors came")
        left = deque(zip(descriptors, offsets, strict=True))
        try:
            while left:
                yield left.popleft()
        finally:
            for descriptor, _ in left:
                os.close(descriptor)
