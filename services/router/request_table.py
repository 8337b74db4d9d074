"""The request table: the requests of this router by ticket, between the controller and their connections.

Each stimulus is handled by the controller at once, and its effects are carried out at once. Nothing here waits: what is
to be published goes to `publish`, which only queues it.
"""

import asyncio
import itertools
import time
from collections.abc import Callable, Mapping
from enum import IntEnum
from typing import Any, Generic, Protocol, TypeVar

from glowplug.controllers.effects import Effect, Publish
from glowplug.controllers.router.controller import RouterController
from glowplug.controllers.router.messages import (
    ClientLeft,
    Dispatch,
    Hold,
    MoveStream,
    Recall,
    Reject,
    RequestArrived,
    RequestEnded,
)
from glowplug.domain.errors import ModelNotFound, NoCapacity
from glowplug.domain.model import Model


class Stage(IntEnum):
    """How far a router is on its way out; each stage includes the one before."""

    SERVING = 0
    LEAVING = 1  # not ready, and every answer says `connection: close`
    DRAINING = 2  # connections without a request are closed
    REFUSING = 3  # new requests get 503


EXECUTORS = {  # by type: a method of Routed
    Dispatch: "dispatch",
    Hold: "hold",
    Recall: "recall",
    MoveStream: "move",
    Reject: "reject",
}


class Routed(Protocol):
    """A request as the controller's effects find it."""

    def dispatch(self, effect: Dispatch) -> None: ...
    def hold(self, effect: Hold) -> None: ...
    def recall(self, effect: Recall) -> None: ...
    def move(self, effect: MoveStream) -> None: ...
    def reject(self, effect: Reject) -> None: ...


R = TypeVar("R", bound=Routed)


class RequestTable(Generic[R]):
    """Keeps the exchanges by ticket, notifies the controller and carries its effects out."""

    def __init__(
        self,
        controller: RouterController,
        publish: Callable[[Publish], None] = lambda effect: None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.controller, self.clock = controller, clock
        self.exchanges: dict[int, R] = {}
        self.tickets = itertools.count(1)
        self.changed = asyncio.Event()  # set whenever loads change
        self.started_at = clock()
        self.stage = Stage.SERVING
        self.table_loaded = False
        self._bus_awaited_until = 0.0
        self._publish = publish

    # -- readiness ----------------------------------------------------------------------------------------------

    def await_bus(self, for_s: float) -> None:
        """A router of a new fleet is not ready before it has reached the bus, or has waited so long for it."""
        self._bus_awaited_until = self.clock() + for_s

    def bus_reached(self) -> None:
        """Facts come in from now on, and go out."""
        self._bus_awaited_until = 0.0

    def not_ready(self) -> str:
        """Why the router cannot route yet or takes no more, or ""."""
        if self.stage:
            return "stopping"
        if not self.table_loaded:
            return "the table of models has not been read yet"
        return "connecting to the bus" if self.clock() < self._bus_awaited_until else ""

    # -- requests -----------------------------------------------------------------------------------------------

    def find(self, name: str) -> Model:
        """The model of that name, alias or key. Raises ModelNotFound, and NoCapacity while nothing is known of any."""
        model = self.controller.fleet.lookup(name)
        if model is None:
            self.models()
            raise ModelNotFound(f"The model `{name[:200]}` does not exist.", param="model")
        return model

    def models(self) -> list[Model]:
        """All of them, by key. Raises NoCapacity while nothing is known of any."""
        if not self.table_loaded:
            raise NoCapacity("The router has just started and has not read its table of models yet.", retry_after_s=1)
        return sorted(self.controller.fleet.models.values(), key=lambda model: model.key)

    def eta_s(self, model_key: str) -> float:
        return self.controller.eta_s(model_key, self.clock())

    def arrive(self, exchange: R, stimulus: RequestArrived) -> None:
        self.exchanges[stimulus.ticket] = exchange
        self.change(stimulus)

    def end(self, stimulus: RequestEnded | ClientLeft) -> None:
        """The answer is over, or its client has left. A request that the controller has rejected itself is gone there
        already."""
        del self.exchanges[stimulus.ticket]
        self.change(stimulus)

    def change(self, stimulus: Any) -> None:
        """Take a stimulus that changes the loads."""
        self.take(stimulus)
        self.changed.set()

    def take(self, stimulus: Any) -> None:
        if effects := self.controller.handle(stimulus, self.clock()):
            self.do(effects)

    def restore(self, table: str, rows: Mapping[str, Any], *, is_copy: bool = False) -> None:
        """Take a whole table; `is_copy`: from a copy that may be old."""
        self.do(self.controller.restore(table, rows, self.clock(), is_copy=is_copy))
        self.table_loaded = self.table_loaded or table == "models"

    def do(self, effects: list[Effect]) -> None:
        """Effects in order. One for a client that has left meanwhile is void: the controller knows already."""
        for effect in effects:
            if type(effect) is Publish:
                self._publish(effect)
            elif (exchange := self.exchanges.get(effect.ticket)) is not None:
                getattr(exchange, EXECUTORS[type(effect)])(effect)
