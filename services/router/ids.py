"""Request ids and W3C trace contexts for the data port: cheap, and never trusting what a client sends."""

import os
import random
import re
from dataclasses import dataclass

_SAFE_ID = re.compile(rb"[A-Za-z0-9._:/+=@-]{1,128}")
_TRACEPARENT = re.compile(rb"00-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-([0-9a-f]{2})")
_chance = random.Random(os.urandom(16))
_bits = _chance.getrandbits
_PREFIX = f"req-{_bits(40):010x}"


def request_id(given: bytes | None, ticket: int) -> str:
    """The client's id when it is safe to print, else a new one."""
    if given is not None and _SAFE_ID.fullmatch(given):
        return given.decode("ascii")
    return f"{_PREFIX}{ticket:06x}"


@dataclass(slots=True)
class Sampler:
    """Head sampling: parent-based; of the rest `ratio`, at most `per_s` traces a second (a bucket of that size)."""

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
    """(traceparent, sampled) as the client sent it, or None when it sent none that is well formed."""
    if given is None:
        return None
    match = _TRACEPARENT.fullmatch(given)
    return (given.decode("ascii"), bool(int(match[3], 16) & 1)) if match else None


def new_context() -> str:
    """A traceparent that says not sampled: a new trace that nobody records."""
    return f"00-{_bits(128) | 1:032x}-{_bits(64) | 1:016x}-00"
