"""An answer's tokens, read from the engine's bytes.

The usage journal has them before the client: a router killed at the answer's end still knows them.
"""

from typing import Any, Protocol

from glowplug.services.router import wire
from glowplug.services.router.port_context import PortContext
from glowplug.services.router.resumption import Resumption


class Counted(Protocol):
    """`opening`: the first bytes of a stream that counts its prompt there; `previous` and `last`: sent last, in whole
    events. `client_counts`: the client sums several sequences."""

    slot: int
    ticket: int
    num_events: int
    prompt_tokens: int
    cached_tokens: int
    client_counts: bool
    counted: tuple[int, int, bool] | None
    resumption: Resumption | None
    opening: bytes
    previous: bytes
    last: bytes

    @property
    def context(self) -> PortContext[Any]: ...


def token_counts(exchange: Counted) -> tuple[int, int, bool]:
    """Return (prompt tokens, response tokens, exact); see wire.count_tokens. Without the engine's usage the prompt's
    tokens are an estimate."""
    if exchange.resumption is not None and exchange.resumption.usage is not None:
        return *exchange.resumption.usage, False
    if exchange.counted is None:
        exchange.counted, exchange.cached_tokens = _read(exchange)
    return exchange.counted


def note(exchange: Counted) -> None:
    """Put the engine's counts into the journal."""
    if exchange.counted is not None:
        counts, cached = exchange.counted, exchange.cached_tokens
    elif exchange.client_counts or (exchange.resumption is not None and exchange.resumption.num_times):
        return
    else:
        counts, cached = _read(exchange)
    if counts[2]:
        exchange.context.journal.counted(exchange.slot, counts[0], max(cached, 0), counts[1])


def _read(exchange: Counted) -> tuple[tuple[int, int, bool], int]:
    """Return the counts, and the prompt's cached tokens; -1 if unknown."""
    last = exchange.last[-wire.TAIL_BYTES :]
    tail = exchange.opening + (exchange.previous[-wire.TAIL_BYTES :] + last if len(last) < wire.TAIL_BYTES else last)
    prompt, response, exact = wire.count_tokens(tail, exchange.num_events)
    cached = wire.cached_tokens(tail) if exact and b"cache" in tail else -1
    return (prompt or (0 if exact else exchange.prompt_tokens), response, exact), cached
