"""Send tensors from one pipeline stage to the next: one message a step, over an own connection.

vLLM sends a layer's output as four messages of gloo, which asks the receiver before each: a hop takes four round
trips, through links that may be full of weights. Here one message has all:

    length of the list (4 bytes), [[name, type, shape], ...] as JSON, the bytes of each tensor

Workers meet through the pipeline's store and show the key kept there. A receiver prepares its step meanwhile."""

import hmac
import json
import secrets
import socket
import struct
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

INLINE_BYTES = 256 << 10  # larger messages are sent in parallel with the next step
BUFFER_BYTES = 4 << 20
MEET_S = 60.0
KEY_S = 5.0  # for a connection to show the key
_KEY_BYTES = 32
_LENGTH = struct.Struct("<I")
_MAX_LIST_BYTES = 1 << 20

Described = tuple[str, str, list[int]]


class HopBroken(ConnectionError):
    """The other stage is gone, or sends no valid message."""


class ToNext:
    def __init__(self, connection: socket.socket) -> None:
        self._connection, self._aside = connection, ThreadPoolExecutor(1, "HopToNext")
        self._sending: Future[None] | None = None

    def send(self, tensors: Iterable[tuple[Described, bytes | memoryview]]) -> None:
        """Return once the tensors may be overwritten. Raises HopBroken, of this message or of the one before."""
        if self._sending is not None:
            self._sending.result()
            self._sending = None
        listed, parts = zip(*tensors, strict=True)
        head = json.dumps(listed).encode()
        message = b"".join([_LENGTH.pack(len(head)), head, *parts])
        if len(message) <= INLINE_BYTES:
            self._send(message)
        else:
            self._sending = self._aside.submit(self._send, message)

    def _send(self, message: bytes) -> None:
        try:
            self._connection.sendall(message)
        except OSError as error:
            raise HopBroken(f"the next stage is gone: {error}") from error


class FromPrevious:
    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection

    def receive(self, buffer_of: Callable[[Described], bytearray | memoryview]) -> None:
        """Wait for one message, each tensor into its buffer. Raises HopBroken."""
        (num_bytes,) = _LENGTH.unpack(self._read(bytearray(_LENGTH.size)))
        if num_bytes > _MAX_LIST_BYTES:
            raise HopBroken(f"the previous stage sends a list of {num_bytes} bytes")
        for name, kind, shape in json.loads(bytes(self._read(bytearray(num_bytes)))):
            self._read(buffer_of((name, kind, shape)))

    def _read(self, into: bytearray | memoryview) -> bytearray | memoryview:
        left = memoryview(into)
        try:
            while left:
                taken = self._connection.recv_into(left)
                if not taken:
                    raise HopBroken("the previous stage has closed its connection")
                left = left[taken:]
        except OSError as error:
            raise error if isinstance(error, HopBroken) else HopBroken(f"the last stage is gone: {error}") from error
        return into


def meet(
    store: Any, rank: int, before: int | None, after: int | None, host: str, timeout_s: float = MEET_S
) -> tuple[FromPrevious | None, ToNext | None]:
    """Connect this worker with those before and after it, by rank; None for none. `get` of `store` waits. Raises
    OSError, TimeoutError, HopBroken."""
    with ExitStack() as until_met:
        if before is not None:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            listening = until_met.enter_context(socket.create_server((host, 0), family=family))
            key = secrets.token_hex(_KEY_BYTES // 2)
            store.set(_name(rank), json.dumps([host, listening.getsockname()[1], key]))
        onward = _connect(json.loads(store.get(_name(after))), timeout_s) if after is not None else None
        with _closed_on_failure(onward):
            back = _accept(listening, key, timeout_s) if before is not None else None
    return FromPrevious(back) if back is not None else None, ToNext(onward) if onward is not None else None


def _connect(address: tuple[str, int, str], timeout_s: float) -> socket.socket:
    host, port, key = address
    connection = socket.create_connection((host, port), timeout_s)
    with _closed_on_failure(connection):
        connection.sendall(key.encode())
        return _ready(connection)


@contextmanager
def _closed_on_failure(connection: socket.socket | None) -> Iterator[None]:
    try:
        yield
    except BaseException:
        if connection is not None:
            connection.close()
        raise


def _accept(listening: socket.socket, key: str, timeout_s: float) -> socket.socket:
    ends_at = time.monotonic() + timeout_s
    while (left_s := ends_at - time.monotonic()) > 0:
        listening.settimeout(left_s)
        try:
            connection, _ = listening.accept()
        except TimeoutError:
            break
        if hmac.compare_digest(_shown(connection, min(ends_at, time.monotonic() + KEY_S)), key.encode()):
            return _ready(connection)
        connection.close()
    raise TimeoutError(f"the previous stage has not connected within {timeout_s:g} s")


def _shown(connection: socket.socket, ends_at: float) -> bytes:
    shown = b""
    with suppress(OSError):
        while len(shown) < _KEY_BYTES and (left_s := ends_at - time.monotonic()) > 0:
            connection.settimeout(left_s)
            if not (more := connection.recv(_KEY_BYTES - len(shown))):
                break
            shown += more
    return shown


def _ready(connection: socket.socket) -> socket.socket:
    connection.settimeout(None)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER_BYTES)
    return connection


def _name(rank: int) -> str:
    return f"glowplug-hop-{rank}"


def install(group: Any, store: Any, host: str) -> None:
    """Replace vLLM's sends and receives between the stages of `group`."""
    import torch

    ranks, own = list(group.ranks), group.rank_in_group
    before = ranks[own - 1] if own else None
    after = ranks[own + 1] if own + 1 < len(ranks) else None
    from_previous, to_next = meet(store, ranks[own], before, after, host)

    def isend(tensors: Mapping[str, Any], *_: Any, **__: Any) -> list[Any]:
        assert to_next is not None, "the last stage has no next one"
        described = ((name, str(one.dtype).removeprefix("torch."), list(one.shape)) for name, one in tensors.items())
        to_next.send(zip(described, map(_bytes_of, tensors.values()), strict=True))
        return []

    def irecv(*_: Any, **__: Any) -> tuple[dict[str, Any], list[Any], list[Callable[[], None]]]:
        """Tensors enter the dictionary once the returned function is called, which waits for them."""
        assert from_previous is not None, "the first stage has no previous one"
        tensors: dict[str, Any] = {}

        def buffer_of(described: Described) -> memoryview:
            name, kind, shape = described
            tensors[name] = torch.empty(shape, dtype=getattr(torch, kind))
            return _bytes_of(tensors[name])

        return tensors, [], [lambda: from_previous.receive(buffer_of)]

    group.isend_tensor_dict, group.irecv_tensor_dict = isend, irecv


def _bytes_of(tensor: Any) -> memoryview:
    import torch

    return memoryview(tensor.contiguous().view(-1).view(torch.uint8).numpy()) if tensor.numel() else memoryview(b"")
