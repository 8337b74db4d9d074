"""Request ids, W3C trace contexts and the way of a request, without trust in the client."""

import itertools
import os
import random
import re
from collections import deque
from dataclasses import dataclass, replace

from msgspec import Struct

from glowplug.domain.instance import Instance
from glowplug.events.facts import STAYS, StreamMove

MOVES_TOLD = 16
_SAFE_ID = re.compile(rb"[A-Za-z0-9._:/+=@-]{1,128}")
_TRACEPARENT = re.compile(rb"(?!ff)[0-9a-f]{2}-((?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-([0-9a-f]{2}))(-.*)?")
_chance = random.Random(os.urandom(16))
_bits = _chance.getrandbits
_PREFIX = f"req-{_bits(40):010x}"
_numbers = itertools.count(1)


def request_id(given: bytes | None) -> str:
    """Return the client's id if it is safe to print, else a new one."""
    if given is not None and _SAFE_ID.fullmatch(given):
        return given.decode("ascii")
    return f"{_PREFIX}{next(_numbers):06x}"


def event_id() -> str:
    """Return 128 random bits in hexadecimal."""
    return f"{_bits(128):032x}"


@dataclass(slots=True)
class Sampler:
    """A head sampler: follows the parent's decision; of the rest it takes `ratio`, at most `per_s` traces a second (a
    token bucket of that size)."""

    ratio: float = 1.0
    per_s: float = 20.0
    _tokens: float = 1.0
    _at: float = 0.0

    def root(self, now_s: float) -> bool:
        self._tokens = min(self._tokens + (now_s - self._at) * self.per_s, max(self.per_s, 1.0))
        self._at = now_s
        if self._tokens < 1.0 or (self.ratio < 1.0 and _chance.random() >= self.ratio):
            return False
        self._tokens -= 1.0
        return True


def parent_context(given: bytes | None) -> tuple[str, bool] | None:
    """Return the client's (traceparent, sampled), or None without a well-formed one. Later versions are read as 00 (W3C
    Trace Context, 3.2)."""
    match = _TRACEPARENT.fullmatch(given or b"")
    if match is None or (match[3] and match[0].startswith(b"00")):
        return None
    return f"00-{match[1].decode()}", bool(int(match[2], 16) & 1)


def new_context(parent: str = "", *, sampled: bool = False) -> str:
    """Return a traceparent of a new span, in the trace of `parent`."""
    trace_id = parent[3:35] or f"{_bits(128) | 1:032x}"
    return f"00-{trace_id}-{_bits(64) | 1:016x}-{sampled:02x}"


class Way(Struct, eq=False):
    """A request's way to its engines, for its report. Times are epoch seconds."""

    operation: str
    parent_span: str  # of the client; ""
    held: bool = False
    eta_s: float = 0.0
    dispatched_s: float = 0.0  # after the arrival; 0: it was not
    moves: deque[StreamMove] | None = None
    _is_moving: bool = False

    def hold(self, eta_s: float) -> None:
        """Note a wait before any engine; a longer one extends it."""
        if not (self.held or self.dispatched_s):
            self.held, self.eta_s = True, eta_s

    def send(self, after_s: float) -> None:
        self.dispatched_s = self.dispatched_s or after_s

    def leave(self, at: float, reason: str, message: str, num_tokens: int, instance: Instance | None) -> None:
        """Note that the stream has lost its engine, or is to leave it; the client has `num_tokens`."""
        self._end_move(at)
        self._add(at, reason, message, num_tokens, instance)
        self._is_moving = True

    def go_on(self, at: float, instance: Instance | None) -> None:
        self._end_move(at, to_instance=_id_of(instance))

    def stay(self, at: float, why: str) -> None:
        self._end_move(at, outcome=why)

    def stay_put(self, at: float, reason: str, message: str, instance: Instance | None) -> None:
        """Note that the stream was to leave, and no other engine can continue it."""
        self._end_move(at)
        self._add(at, reason, message, 0, instance, STAYS)

    def ended(self, at: float) -> tuple[StreamMove, ...]:
        """Return the moves of a request that has ended."""
        self._end_move(at)
        return tuple(self.moves or ())

    def _add(
        self, at: float, reason: str, message: str, num_tokens: int, instance: Instance | None, outcome: str = ""
    ) -> None:
        if self.moves is None:
            self.moves = deque(maxlen=MOVES_TOLD)
        made = StreamMove(at=at, until=at, reason=reason, message=message, num_tokens=num_tokens,
                          from_instance=_id_of(instance), outcome=outcome)  # fmt: skip
        self.moves.append(made)

    def _end_move(self, at: float, *, to_instance: str = "", outcome: str = "") -> None:
        if self._is_moving and self.moves:
            self.moves[-1] = replace(self.moves[-1], until=at, to_instance=to_instance, outcome=outcome)
            self._is_moving = False


def _id_of(instance: Instance | None) -> str:
    return instance.instance_id if instance is not None else ""
