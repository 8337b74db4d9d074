"""The tokens of an answer, as its exchange reads them from the engine's bytes. The journal of usage has them before the
client does: a router that is killed as the answer ends still knows them."""

from typing import Any, Protocol

from glowplug.services.router import wire
from glowplug.services.router.port_context import PortContext
from glowplug.services.router.resumption import Resumption


class Counted(Protocol):
    """An exchange, as the counts see it. `opening`: the first bytes of a stream that counts its prompt there;
    `previous` and `last`: the bytes passed on last, with whole events. `client_counts`: the client adds up the counts
    of several sequences."""

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
    """(prompt tokens, response tokens, exact) of a finished answer; see wire.count_tokens. Where the engine gives no
    usage (the client asked for none), the prompt's tokens are estimated from its body, which is not exact."""
    if exchange.resumption is not None and exchange.resumption.usage is not None:
        return *exchange.resumption.usage, False
    if exchange.counted is None:
        exchange.counted, exchange.cached_tokens = _read(exchange)
    return exchange.counted


def note(exchange: Counted) -> None:
    """Put the engine's counts, as far as the bytes passed on last have them, into the journal."""
    if exchange.counted is not None:
        counts, cached = exchange.counted, exchange.cached_tokens
    elif exchange.client_counts or (exchange.resumption is not None and exchange.resumption.num_times):
        return
    else:
        counts, cached = _read(exchange)
    if counts[2]:
        exchange.context.journal.counted(exchange.slot, counts[0], max(cached, 0), counts[1])


def _read(exchange: Counted) -> tuple[tuple[int, int, bool], int]:
    """The counts, and the tokens of the prompt that the engine had cached; -1 where it does not say."""
    last = exchange.last[-wire.TAIL_BYTES :]
    tail = exchange.opening + (exchange.previous[-wire.TAIL_BYTES :] + last if len(last) < wire.TAIL_BYTES else last)
    prompt, response, exact = wire.count_tokens(tail, exchange.num_events)
    cached = wire.cached_tokens(tail) if exact and b"cache" in tail else -1
    return (prompt or (0 if exact else exchange.prompt_tokens), response, exact), cached
