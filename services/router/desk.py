"""Where requests and facts meet the controller: each stimulus is handled at once and its effects done at once.

Nothing here waits. What is to be published goes to `publish`, which only queues it.
"""

import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from glowplug.controllers.effects import Effect, Publish
from glowplug.controllers.router.controller import RouterController
from glowplug.controllers.router.messages import (
    ClientLeft,
    Dispatch,
    DispatchFailed,
    FirstToken,
    HeadDue,
    Hold,
    Recall,
    Reject,
    RequestArrived,
    RequestEnded,
)
from glowplug.domain.model import Model

if TYPE_CHECKING:
    from services.router.proxy_exchange import Exchange


class Desk:
    """Keeps the exchanges by ticket and does what the controller says."""

    def __init__(
        self,
        controller: RouterController,
        publish: Callable[[Publish], None] = lambda effect: None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.controller, self.clock = controller, clock
        self.publish = publish
        self.exchanges: dict[int, Exchange] = {}
        self.started_at = clock()
        self.table_loaded = self.leaving = False
        self.bus_awaited_until = 0.0  # a router of a new fleet is not ready before it has reached the bus, or this time
        self.changed: Callable[[], None] = lambda: None  # told whenever loads change

    def lookup(self, name: str) -> Model | None:
        return self.controller.fleet.lookup(name)

    def eta_s(self, model_key: str) -> float:
        return self.controller.eta_s(model_key, self.clock())

    def not_ready(self) -> str:
        """Why the router cannot route yet or takes no more, or ""."""
        if self.leaving:
            return "stopping"
        if not self.table_loaded:
            return "the table of models has not been read yet"
        return "connecting to the bus" if self.clock() < self.bus_awaited_until else ""

    def arrive(self, exchange: "Exchange") -> None:
        self.exchanges[exchange.ticket] = exchange
        traceparent = exchange.traceparent if exchange.trace is not None else ""
        name, request_id = exchange.model.name, exchange.request_id
        sizes = (exchange.prompt_tokens, exchange.max_tokens) if self.controller.tracks_tokens else (0, 0)
        self.take(RequestArrived(exchange.ticket, name, request_id, traceparent, *sizes))
        self.changed()

    def first_token(self, exchange: "Exchange") -> None:
        """A streamed answer has begun."""
        self.take(FirstToken(exchange.ticket))

    def head_due(self, exchange: "Exchange") -> None:
        """A held stream is about to get its head: it is rejected now, or not any more."""
        self.take(HeadDue(exchange.ticket))

    def ended(self, exchange: "Exchange", took_s: float) -> None:
        """The answer is over. A request the controller has rejected itself is already gone there."""
        del self.exchanges[exchange.ticket]
        num_tokens = exchange.token_counts()[1] if took_s and self.controller.tracks_tokens else 0
        self.take(RequestEnded(exchange.ticket, took_s, num_tokens))
        self.changed()

    def left(self, exchange: "Exchange") -> None:
        del self.exchanges[exchange.ticket]
        self.take(ClientLeft(exchange.ticket))
        self.changed()

    def failed(self, exchange: "Exchange", *, reached: bool, reason: str) -> None:
        self.take(DispatchFailed(exchange.ticket, reached, reason))
        self.changed()

    def take(self, stimulus: Any) -> None:
        self.do(self.controller.handle(stimulus, self.clock()))

    def restore(self, table: str, rows: Mapping[str, Any], *, is_copy: bool = False) -> None:
        """Take a whole table; `is_copy`: from a copy that may be old."""
        self.do(self.controller.restore(table, rows, self.clock(), is_copy=is_copy))
        self.table_loaded = self.table_loaded or table == "models"

    EXECUTES: ClassVar = (Dispatch, Hold, Recall, Reject)

    def do(self, effects: list[Effect]) -> None:
        """Effects in order. One for a client that has left meanwhile is void: the controller knows already."""
        for effect in effects:
            if type(effect) is Dispatch:
                if (exchange := self.exchanges.get(effect.ticket)) is not None:
                    exchange.dispatch(effect.instance, effect.held_s, effect.cold)
            elif type(effect) is Publish:
                self.publish(effect)
            elif type(effect) is Hold:
                if (exchange := self.exchanges.get(effect.ticket)) is not None:
                    exchange.hold(effect.eta_s)
            elif type(effect) is Recall:
                if (exchange := self.exchanges.get(effect.ticket)) is not None:
                    exchange.recall(effect.reason, ended=effect.ended)
            elif type(effect) is Reject and (exchange := self.exchanges.get(effect.ticket)) is not None:
                exchange.reject(effect)
