"""The owner of a GPU's chunks, a process of its own: `python -m glowplug_lab.gpu_slots.owner SOCKET --help`.

It lends chunks over a Unix socket (peers.py) and never maps or copies, so no fault of a device or engine reaches it.
The end of a connection frees the chunks held by it alone. Published chunks (weights) can be attached by name.

When the owner is killed, clients keep their chunks and hand them to the next (`adopt`).
"""

import argparse
import contextlib
import fcntl
import os
import resource
import secrets
import selectors
import signal
import socket
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from glowplug.domain.units import parse_bytes
from glowplug_lab.gpu_slots.cuda_memory import CudaMemory
from glowplug_lab.gpu_slots.gpu_memory import Chunk, GpuError, GpuMemory, GpuUnavailable, OutOfGpuMemory
from glowplug_lab.gpu_slots.host_memory import HostMemory
from glowplug_lab.gpu_slots.peers import PeerGone, peer_of, receive, receive_descriptors, send, send_descriptors
from glowplug_lab.gpu_slots.pool import ChunkPool

Count = Annotated[int, Meta(ge=0)]


class Take(Struct, frozen=True, tag_field="verb", tag="take"):
    num_chunks: Count
    at_most: bool = False


class Give(Struct, frozen=True, tag_field="verb", tag="give"):
    ids: list[str]


class Publish(Struct, frozen=True, tag_field="verb", tag="publish"):
    """Chunks become weights under a name, in this order."""

    name: str
    ids: Annotated[list[str], Meta(min_length=1)]
    num_bytes: Count


class Attach(Struct, frozen=True, tag_field="verb", tag="attach"):
    name: str


class Adopt(Struct, frozen=True, tag_field="verb", tag="adopt"):
    """Report a former owner's chunks; descriptors follow. `names`: ids and bytes of published ones."""

    ids: list[str]
    names: dict[str, tuple[list[str], Count]] = {}


class Holdings(Struct, frozen=True, tag_field="verb", tag="holdings"):
    """Ask for the chunks of each process."""


Request = Take | Give | Publish | Attach | Adopt | Holdings


_STALLED_S = 10.0  # a client silent within a message is disconnected; until then others wait
_PAUSE_S = 0.01


@dataclass(frozen=True, slots=True)
class _Named:
    ids: tuple[str, ...]
    num_bytes: int


@dataclass(eq=False, slots=True)
class _Client:
    connection: socket.socket
    name: str
    pid: int


class Refused(ValueError):
    """An inadmissible request; the message says why."""


@dataclass(slots=True)
class _Answer:
    fields: dict[str, Any]
    chunks: list[Chunk] = field(default_factory=list)  # their descriptors follow


class Owner:
    """Serves one request at a time. Chunk ids are unique across owners: "generation-number"."""

    def __init__(self, memory: GpuMemory, num_chunks: int, path: Path) -> None:
        self._memory, self._path = memory, path
        self._pool = ChunkPool(memory, num_chunks)
        self._generation = secrets.token_hex(6)
        self._ids: dict[Chunk, str] = {}
        self._chunks: dict[str, Chunk] = {}
        self._named: dict[str, _Named] = {}
        self._num_clients = 0
        self._clients: dict[str, _Client] = {}
        self._selector = selectors.DefaultSelector()

    def serve(self, stop: socket.socket | None = None) -> None:
        """Serve until `stop` is readable."""
        with _listening(self._path) as listener, contextlib.closing(self._selector), contextlib.ExitStack() as at_end:
            at_end.callback(self._hang_up)
            self._selector.register(listener, selectors.EVENT_READ, None)
            if stop:
                self._selector.register(stop, selectors.EVENT_READ, stop)
            while True:
                for key, _ in self._selector.select():
                    if key.data is stop and stop:
                        return
                    self._accept(listener) if key.data is None else self._serve_one(key.data)

    def _accept(self, listener: socket.socket) -> None:
        try:
            connection, _ = listener.accept()
            pid, uid = peer_of(connection)
        except OSError:  # it retries
            time.sleep(_PAUSE_S)
            return
        if uid != os.geteuid():
            connection.close()
            return
        connection.settimeout(_STALLED_S)
        self._num_clients += 1
        client = _Client(connection, f"{pid}/{self._num_clients}", pid)
        self._clients[client.name] = client
        self._selector.register(connection, selectors.EVENT_READ, client)

    def _serve_one(self, client: _Client) -> None:
        try:
            message = receive(client.connection)
            try:
                answer = self._answer(client, message)
            except OutOfGpuMemory as error:
                answer = _Answer({"error": "out_of_memory", "message": str(error)})
            except (Refused, GpuError) as error:
                answer = _Answer({"error": "refused", "message": str(error)})
            send(client.connection, answer.fields)
            send_descriptors(client.connection, self._memory, answer.chunks)
        except (OSError, GpuError):  # including PeerGone; undelivered chunks are free again
            self._end(client)

    def _answer(self, client: _Client, message: dict[str, Any]) -> _Answer:
        try:
            request: Request = msgspec.convert(message, Request)
        except msgspec.ValidationError as error:
            raise Refused(f"not a request: {error}") from error
        match request:
            case Take():
                return self._take(client, request)
            case Give():
                return self._give(client, request)
            case Publish():
                return self._publish(client, request)
            case Attach():
                return self._attach(client, request)
            case Adopt():
                return self._adopt(client, request)
            case Holdings():
                return self._holdings()

    def _hang_up(self) -> None:
        for client in self._clients.values():
            client.connection.close()

    def _end(self, client: _Client) -> None:
        self._selector.unregister(client.connection)
        client.connection.close()
        del self._clients[client.name]
        self._forget(self._pool.leave(client.name))

    def _take(self, client: _Client, request: Take) -> _Answer:
        take = self._pool.take_up_to if request.at_most else self._pool.take
        return self._lent(take(client.name, request.num_chunks))

    def _give(self, client: _Client, request: Give) -> _Answer:
        freed = self._pool.give(client.name, self._of(client, request.ids))
        self._forget(freed)
        return _Answer({"num_freed": len(freed)})

    def _publish(self, client: _Client, request: Publish) -> _Answer:
        ids = tuple(request.ids)
        if len(set(self._of(client, ids))) < len(ids):
            raise Refused(f"{request.name}: a chunk is there twice")
        if request.name in self._named and self._named[request.name].ids != ids:
            raise Refused(f"{request.name} is published already")
        self._named[request.name] = _Named(ids, request.num_bytes)
        return _Answer({})

    def _attach(self, client: _Client, request: Attach) -> _Answer:
        named = self._named.get(request.name)
        if named is None:
            raise Refused(f"nothing is published as {request.name}")
        chunks = [self._chunks[one] for one in named.ids]
        self._pool.share(chunks, client.name)
        answer = self._lent(chunks)
        answer.fields["num_bytes"] = named.num_bytes
        return answer

    def _adopt(self, client: _Client, request: Adopt) -> _Answer:
        """Several clients may bring the same chunk. Raises PeerGone, which ends the client, for this owner's own
        chunks: they were freed with the connection."""
        descriptors = receive_descriptors(client.connection, len(request.ids))
        for one, (descriptor, offset) in zip(request.ids, descriptors, strict=True):
            try:
                if one.startswith(f"{self._generation}-"):
                    raise PeerGone(f"{one} was given up when the connection ended")
                if (known := self._chunks.get(one)) is not None:
                    self._pool.share([known], client.name)
                    continue
                chunk = self._memory.import_fd(descriptor, offset)
                self._ids[chunk], self._chunks[one] = one, chunk
                self._pool.adopt(chunk, client.name)
            except GpuError as error:
                raise PeerGone(str(error)) from error
            finally:
                os.close(descriptor)
        for name, (ids, num_bytes) in request.names.items():
            if ids and set(ids) <= set(self._chunks):
                self._named.setdefault(name, _Named(tuple(ids), num_bytes))
        return _Answer({})

    def _holdings(self) -> _Answer:
        """A restarted agent fills its ledger from this. Chunks with several holders count once, as shared."""
        by_client = {one.name: self._pool.held(one.name) for one in self._clients.values()}
        num_holders = Counter(chunk for held in by_client.values() for chunk in held)
        holders = [
            {
                "pid": one.pid,
                "num_chunks": len(held := by_client[one.name]),
                "num_chunks_alone": sum(num_holders[chunk] == 1 for chunk in held),
                "names": [name for name, named in self._named.items() if self._chunks[named.ids[0]] in held],
            }
            for one in self._clients.values()
        ]
        num_shared = sum(num > 1 for num in num_holders.values())
        counts = {"num_free": self._pool.num_free, "num_held": self._pool.num_held, "num_shared": num_shared}
        return _Answer({"holders": holders, "chunk_bytes": self._memory.chunk_bytes, **counts})

    def _of(self, client: _Client, ids: Iterable[str]) -> list[Chunk]:
        held = set(self._pool.held(client.name))
        chunks = [self._chunks.get(one) for one in ids]
        if not all(chunk in held for chunk in chunks):
            raise Refused("only chunks that one holds can be given or published")
        return [chunk for chunk in chunks if chunk is not None]

    def _lent(self, chunks: list[Chunk]) -> _Answer:
        for chunk in chunks:
            if chunk not in self._ids:
                self._ids[chunk] = f"{self._generation}-{chunk}"
                self._chunks[self._ids[chunk]] = chunk
        return _Answer({"ids": [self._ids[chunk] for chunk in chunks]}, list(chunks))

    def _forget(self, freed: list[Chunk]) -> None:
        gone = {chunk: self._ids.pop(chunk) for chunk in freed}
        for one in gone.values():
            del self._chunks[one]
        ids = set(gone.values())
        self._named = {name: named for name, named in self._named.items() if not ids.intersection(named.ids)}


@contextlib.contextmanager
def _listening(path: Path) -> Iterator[socket.socket]:
    """Replace a dead owner's socket. Raises BlockingIOError while another owner serves."""
    with path.with_suffix(".lock").open("w") as lock, socket.socket(socket.AF_UNIX) as listener:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        path.unlink(missing_ok=True)
        before = os.umask(0o177)
        try:
            listener.bind(str(path))
        finally:
            os.umask(before)
        listener.listen(64)
        yield listener


def _memory_of(kind: str, total: str, chunk: str, device: int) -> GpuMemory:
    if kind == "host":
        return HostMemory(parse_bytes(total), parse_bytes(chunk))
    return CudaMemory(device, parse_bytes(chunk))


def main() -> int:
    """Return 2 without such a GPU."""
    parser = argparse.ArgumentParser(description="the owner of one GPU's memory")
    parser.add_argument("socket", type=Path)
    parser.add_argument("--kind", choices=("host", "cuda"), default="cuda")
    parser.add_argument("--device", type=int, default=0)
    parser.add_argument("--chunk", default="32MiB")
    parser.add_argument("--total", required=True, help="how much of the GPU, e.g. 110GiB: engines' contexts need some")
    args = parser.parse_args()
    _, most_files = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most_files, most_files))  # also bounds descriptors in transit
    bell, stop = socket.socketpair()
    bell.setblocking(False)
    # Python's handler waits for the interpreter: a signal just before the select would go unnoticed.
    signal.set_wakeup_fd(bell.fileno())
    signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        memory = _memory_of(args.kind, args.total, args.chunk, args.device)
    except GpuUnavailable as error:
        sys.stderr.write(f"{error}\n")
        return 2
    Owner(memory, parse_bytes(args.total) // memory.chunk_bytes, args.socket).serve(stop)
    return 0


if __name__ == "__main__":
    sys.exit(main())
