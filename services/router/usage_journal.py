"""The journal: the requests that a router is at, in a file that it maps into its memory, so that what they used is
known after the process was killed.

One slot of SLOT_BYTES per request, no text of it and no key: written when the request is held or sent to an engine,
emptied once its usage record is in the spool. Events of its answer are counted in the slot by a plain store; the
engine's own counts are put there before the client gets the bytes that have them. The pages belong to the file, so that
a kill loses none; a machine that loses its power may lose those of the last seconds. All blocks are reserved first: a
disk that fills up later cannot harm the router.
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

from glowplug.domain.instance import Instance
from glowplug.domain.model import Model
from glowplug.services.router.http_request import HttpRequest
from glowplug.services.router.usage_spool import Line, is_locked

log = logging.getLogger(__name__)
SUFFIX: Final = ".journal"
SLOT_BYTES: Final = 1024
_MAGIC: Final = b"GPUSAGE1"
_HEADER: Final = struct.Struct("<8s16sd")  # _MAGIC, the prefix of record ids, when the router was last alive (epoch s)
# A slot, in words of four bytes: its ticket (two words; 0: it is free), these counts, then the text that says whose it
# is. The first slot has the header; where a request has no slot, its events are counted there.
_PROMPT, _EVENTS, _COUNTED, _EXACT_PROMPT, _EXACT_CACHED, _EXACT_RESPONSE, _LENGTH = range(2, 9)
NO_SLOT: Final = SLOT_BYTES // 4 - 1
_TEXT_AT: Final = 40
ROUTER_LOST: Final = "router_lost"
STATUS: Final = 500
# Of a request: its id, tenant, key's id, model, path, when it arrived, seconds held, cold, instance, emulated.
_Told = tuple[str, str, str, str, str, float, float, bool, str, bool]
_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(_Told).decode


class Journaled(Protocol):
    """An exchange, as the journal sees it. `slot`: the index in `Journal.words` at which its events are counted."""

    slot: int
    ticket: int
    num_events: int
    request: HttpRequest
    model: Model
    instance: Instance | None
    prompt_tokens: int
    queue_s: float
    cold: bool

    @property
    def request_id(self) -> str: ...

    @property
    def arrived_at(self) -> float: ...


class Journal:
    """The slots of one router process, `num_slots` of them. `prefix`: of the ids of its records. Where the folder takes
    no file, the log says so and requests have no slots; likewise with 0 slots."""

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

    def held(self, exchange: Journaled) -> None:
        """Write that a request waits, unless it was at an engine before."""
        if exchange.slot == NO_SLOT:
            self.sent(exchange)

    def sent(self, exchange: Journaled) -> None:
        """Write whose request this is and which instance has it, in a slot of its own; the one that it had before is
        emptied after that."""
        if not self._free:
            return
        instance, caller = exchange.instance, exchange.request.caller
        text = _encode(
            (
                exchange.request_id,
                caller.tenant,
                caller.key_id,
                exchange.model.key,
                exchange.request.path.decode("latin-1"),
                exchange.arrived_at,
                exchange.queue_s,
                exchange.cold,
                instance.instance_id if instance is not None else "",
                instance is not None and instance.emulated,
            )
        )
        if len(text) > SLOT_BYTES - _TEXT_AT:
            return
        number, words, before = self._free.pop(), self.words, exchange.slot
        at, first = number * SLOT_BYTES + _TEXT_AT, number * (SLOT_BYTES // 4)
        self._memory[at : at + len(text)] = text
        words[first + _PROMPT] = exchange.prompt_tokens if instance is not None else 0
        words[first + _EVENTS], words[first + _COUNTED], words[first + _LENGTH] = exchange.num_events, 0, len(text)
        self._tickets[first // 2] = exchange.ticket  # from here on the slot counts
        exchange.slot = first + _EVENTS
        if before != NO_SLOT:
            self._empty(before)

    def counted(self, slot: int, prompt: int, cached: int, response: int) -> None:
        """Write the engine's own counts."""
        words, first = self.words, slot - _EVENTS
        if slot != NO_SLOT:
            words[first + _EXACT_PROMPT], words[first + _EXACT_CACHED] = prompt, cached
            words[first + _EXACT_RESPONSE], words[first + _COUNTED] = response, 1

    def clear(self, exchange: Journaled) -> None:
        """Empty the slot of a request that is over."""
        if exchange.slot != NO_SLOT:
            self._empty(exchange.slot)
            exchange.slot = NO_SLOT

    def beat(self) -> None:
        """Write that the router lives."""
        _HEADER.pack_into(self._memory, 0, _MAGIC, self.prefix.encode(), time.time())

    def close(self, *, keeps_file: bool) -> None:
        """End the journal, whose requests are over. `keeps_file`: records wait in its folder, for any router that finds
        it to have ended."""
        self._free.clear()
        if self._fd >= 0:
            if not keeps_file:
                self._path.unlink(missing_ok=True)
            os.close(self._fd)
            self._fd = -1

    def _empty(self, slot: int) -> None:
        self._tickets[(slot - _EVENTS) // 2] = 0
        self._free.append((slot - _EVENTS) // (SLOT_BYTES // 4))

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
    """(usage records of the requests that a process which has ended was at, slots that cannot be read) of its journal;
    the file is removed at the end of the `with` block unless that raises. Nothing of a journal whose process lives, or
    that another process reads. Raises OSError."""
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
    """Return whether the folder is of a router that has ended: it has a journal, and none of a process that lives."""
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
        return [], 0  # it was killed as it began
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
        if record.instance_id or ticket not in found:  # it was moving to another slot
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
