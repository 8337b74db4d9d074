"""The journal: a router's current requests in a memory-mapped file, so that their usage survives a kill.

A request's slot, without its text or key, is written when it is held or sent, and emptied once its record is in the
spool. A plain store counts events; the engine's own counts are written before the client gets them. A kill loses no
page of the file; a power failure may lose the last seconds'. All blocks are reserved first, so a full disk cannot harm
the router later.
"""

import fcntl
import logging
import mmap
import os
import secrets
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final, Protocol

import msgspec

from glowplug.domain.model import Model
from glowplug.services.router.exchange_states import Answer, Attempt
from glowplug.services.router.http_request import HttpRequest
from glowplug.services.router.usage_spool import Line, is_locked

log = logging.getLogger(__name__)
SUFFIX: Final = ".journal"
SLOT_BYTES: Final = 1024
_MAGIC: Final = b"GPUSAGE1"
_HEADER: Final = struct.Struct("<8s16sd")  # _MAGIC, the prefix of record ids, the last sign of life (epoch s)
# A slot, in words of four bytes: its ticket (two words; 0: free), these counts, then the text. The first slot has the
# header, and counts the events of requests without a slot.
_PROMPT, _EVENTS, _COUNTED, _EXACT_PROMPT, _EXACT_CACHED, _EXACT_RESPONSE, _LENGTH = range(2, 9)
NO_SLOT: Final = SLOT_BYTES // 4 - 1
_TEXT_AT: Final = 40
ROUTER_LOST: Final = "router_lost"
STATUS: Final = 500
# Of a request: id, tenant, key's id, model, path, arrival, seconds held, cold, instance, emulated.
_Told = tuple[str, str, str, str, str, float, float, bool, str, bool]
_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(_Told).decode


class JournaledExchange(Protocol):
    """An exchange, for the journal. `slot`: the index of its event count in `Journal.words`."""

    slot: int
    ticket: int
    request: HttpRequest
    model: Model
    attempt: Attempt | None
    answer: Answer | None
    prompt_tokens: int
    queue_s: float
    cold: bool


class Journal:
    """The slots of one router process. `prefix`: of its record ids. With 0 slots, or a folder that takes no file,
    requests have none."""

    def __init__(self, folder: Path | None = None, num_slots: int = 0) -> None:
        self.prefix, self._path = secrets.token_hex(8), Path()
        self._fd, self._memory = -1, memoryview(bytearray(SLOT_BYTES))
        num_bytes = (num_slots + 1) * SLOT_BYTES
        if folder is not None and num_slots:
            try:
                self._memory = memoryview(self._open(folder, num_bytes))
            except OSError as error:
                log.error("the router keeps no journal in %s, so a kill would lose running requests: %s", folder, error)
        self.words = self._memory.cast("I")
        self._tickets = self._memory.cast("Q")
        self._free = list(range(len(self._memory) // SLOT_BYTES - 1, 0, -1))  # the lowest last: few pages are written

    def held(self, exchange: JournaledExchange) -> None:
        if exchange.slot == NO_SLOT:
            self.sent(exchange)

    def sent(self, exchange: JournaledExchange) -> None:
        """Write the request in a new slot, then empty its old one."""
        if not self._free:
            return
        attempt, answer, request = exchange.attempt, exchange.answer, exchange.request
        instance, caller = attempt.instance if attempt is not None else None, request.caller
        text = _encode(
            (
                request.request_id,
                caller.tenant,
                caller.key_id,
                exchange.model.key,
                request.path.decode("latin-1"),
                request.complete_at,
                exchange.queue_s,
                exchange.cold,
                instance.instance_id if instance is not None else "",
                instance is not None and instance.emulated,
            )
        )
        if len(text) > SLOT_BYTES - _TEXT_AT:
            return
        number, words = self._free.pop(), self.words
        at, first = number * SLOT_BYTES + _TEXT_AT, number * (SLOT_BYTES // 4)
        self._memory[at : at + len(text)] = text
        words[first + _PROMPT] = exchange.prompt_tokens if instance is not None else 0
        words[first + _EVENTS] = answer.num_events if answer is not None else 0
        words[first + _COUNTED], words[first + _LENGTH] = 0, len(text)
        self._tickets[first // 2] = exchange.ticket  # the slot counts from here on
        if exchange.slot != NO_SLOT:
            self.clear(exchange)
        exchange.slot = first + _EVENTS

    def counted(self, slot: int, prompt: int, cached: int, response: int) -> None:
        words, first = self.words, slot - _EVENTS
        if slot != NO_SLOT:
            words[first + _EXACT_PROMPT], words[first + _EXACT_CACHED] = prompt, cached
            words[first + _EXACT_RESPONSE], words[first + _COUNTED] = response, 1

    def clear(self, exchange: JournaledExchange) -> None:
        slot, exchange.slot = exchange.slot, NO_SLOT
        if slot != NO_SLOT:
            self._tickets[(slot - _EVENTS) // 2] = 0
            self._free.append((slot - _EVENTS) // (SLOT_BYTES // 4))

    def beat(self) -> None:
        _HEADER.pack_into(self._memory, 0, _MAGIC, self.prefix.encode(), time.time())

    def close(self, *, keeps_file: bool) -> None:
        """`keeps_file`: records wait in the folder, and the journal tells other routers that this one has ended."""
        self._free.clear()
        if self._fd >= 0:
            if not keeps_file:
                self._path.unlink(missing_ok=True)
            os.close(self._fd)
            self._fd = -1

    def _open(self, folder: Path, num_bytes: int) -> mmap.mmap:
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / f"{time.time_ns():020d}-{self.prefix}{SUFFIX}"
        fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.posix_fallocate(fd, 0, num_bytes)
            memory = mmap.mmap(fd, num_bytes)
            _HEADER.pack_into(memory, 0, _MAGIC, self.prefix.encode(), time.time())
        except OSError:
            os.close(fd)
            self._path.unlink(missing_ok=True)
            raise
        self._fd = fd
        return memory


@contextmanager
def left_in(path: Path) -> Iterator[tuple[list[Any], int]]:
    """Yield (usage records, unreadable slots) of an ended process's journal, and remove the file after the `with` block
    unless that raises. Nothing for a living process's journal, or one that another process reads. Raises OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        if is_locked(fd):
            yield [], 0
            return
        yield _records(path.read_bytes())
        path.unlink(missing_ok=True)
    finally:
        os.close(fd)


def has_ended(folder: Path) -> bool:
    """Return whether the folder's router has ended: it has journals, none of a living process."""
    found = False
    for path in folder.glob(f"*{SUFFIX}"):
        with suppress(FileNotFoundError):
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                if is_locked(fd):
                    return False
            finally:
                os.close(fd)
            found = True
    return found


def _records(data: bytes) -> tuple[list[Any], int]:
    if len(data) < SLOT_BYTES or not data.startswith(_MAGIC):
        return [], 0  # killed at its beginning
    _, prefix, alive_at = _HEADER.unpack_from(data)
    found: dict[int, Any] = {}
    num_bad = 0
    for at in range(SLOT_BYTES, len(data) - SLOT_BYTES + 1, SLOT_BYTES):
        (ticket,) = struct.unpack_from("<Q", data, at)
        if not ticket:
            continue
        try:
            record = _record(data[at : at + SLOT_BYTES], f"{prefix.decode()}-{ticket}", alive_at)
        except msgspec.MsgspecError:
            num_bad += 1
            continue
        if record.instance_id or ticket not in found:  # else it was changing slots
            found[ticket] = record
    return list(found.values()), num_bad


def _record(slot: bytes, record_id: str, alive_at: float) -> Any:
    words = memoryview(slot).cast("I")
    request_id, tenant, key_id, model_key, path, arrived_at, held_s, cold, instance_id, emulated = _decode(
        slot[_TEXT_AT : _TEXT_AT + words[_LENGTH]]
    )
    is_exact = bool(words[_COUNTED])
    counts = words[_EXACT_PROMPT], words[_EXACT_CACHED], words[_EXACT_RESPONSE]
    prompt, cached, response = counts if is_exact else (words[_PROMPT], 0, words[_EVENTS])
    finished_at = max(arrived_at, alive_at)
    return Line(
        record_id=record_id,
        request_id=request_id,
        tenant=tenant,
        key_id=key_id,
        model_key=model_key,
        path=path,
        arrived_at=arrived_at,
        finished_at=finished_at,
        prompt_tokens=prompt,
        cached_tokens=min(cached, prompt),
        response_tokens=response,
        tokens_exact=is_exact,
        held_s=held_s if instance_id else finished_at - arrived_at,
        cold=cold,
        instance_id=instance_id,
        status=STATUS,
        error_code=ROUTER_LOST,
        emulated=emulated,
    )
