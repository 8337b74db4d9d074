"""The request table: requests by ticket, between the controller and their connections. Nothing here waits."""

import asyncio
import itertools
from collections.abc import Callable, Mapping
from enum import IntEnum
from typing import Any, Generic, Protocol, TypeVar

from glowplug.controllers.effects import Effect, Publish
from glowplug.controllers.router.controller import RouterController
from glowplug.controllers.router.messages import (
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
from glowplug.runtime.clock import now_s
from glowplug.services.router.keys import ANYBODY, Caller, KeyRing
from glowplug.services.router.limits import CallerLimits
from glowplug.services.router.nearest import LATEST, nearest


class PortStage(IntEnum):
    """Each stage of a shutdown includes the one before."""

    SERVING = 0
    LEAVING = 1  # not ready, and every answer says `connection: close`
    DRAINING = 2  # connections without a request are closed
    REFUSING = 3  # new requests get 503


EXECUTORS = {  # by type of effect: RequestExecutor's method
    Dispatch: "dispatch",
    Hold: "hold",
    Recall: "recall",
    MoveStream: "move",
    Reject: "reject",
}


class RequestExecutor(Protocol):
    def dispatch(self, effect: Dispatch) -> None: ...
    def hold(self, effect: Hold) -> None: ...
    def recall(self, effect: Recall) -> None: ...
    def move(self, effect: MoveStream) -> None: ...
    def reject(self, effect: Reject) -> None: ...


R = TypeVar("R", bound=RequestExecutor)


class RequestTable(Generic[R]):
    def __init__(
        self,
        controller: RouterController,
        publish: Callable[[Publish], None] = lambda effect: None,
        clock: Callable[[], float] = now_s,
    ) -> None:
        self.controller, self.clock = controller, clock
        self._handlers = controller.handlers
        self.keys = KeyRing()
        lengths_of, learned = controller.balances.lengths_of, controller.tracks_tokens
        self.limits = CallerLimits(controller.params.router_id, lengths_of, clock, learned=learned)
        self.exchanges: dict[int, R] = {}
        self.tickets = itertools.count(1)
        self.changed = asyncio.Event()  # set whenever loads change
        self.started_at = clock()
        self.stage = PortStage.SERVING
        self.table_loaded = False
        self._bus_awaited_until = 0.0
        self._publish = publish

    # -- readiness ----------------------------------------------------------------------------------------------

    def await_bus(self, for_s: float) -> None:
        """Stay unready until the bus is reached, or for `for_s` seconds."""
        self._bus_awaited_until = self.clock() + for_s

    def bus_reached(self) -> None:
        self._bus_awaited_until = 0.0

    def not_ready(self) -> str:
        """Return the reason for not being ready, or ""."""
        if self.stage:
            return "stopping"
        if not self.table_loaded:
            return "the table of models has not been read yet"
        return "connecting to the bus" if self.clock() < self._bus_awaited_until else ""

    # -- requests -----------------------------------------------------------------------------------------------

    def find(self, name: str, caller: Caller = ANYBODY) -> Model:
        """Find a model open to the caller by name or alias. Raises ModelNotFound, and NoCapacity before the models are
        loaded."""
        lookup = self.controller.fleet.lookup
        model = lookup(name)
        if model is None and name.endswith(LATEST):
            model = lookup(name.removesuffix(LATEST))
        if model is None or not (caller.models.has_all or caller.may_use(model)):
            near = nearest(name, (one for model in self.models(caller) for one in model.names))
            hint = f" Did you mean `{near}`?" if near else ""
            raise ModelNotFound(f"The model `{name[:200]}` does not exist.{hint}", param="model")
        return model

    def models(self, caller: Caller = ANYBODY) -> list[Model]:
        """Return the models open to the caller, by key. Raises NoCapacity before they are loaded."""
        if not self.table_loaded:
            raise NoCapacity("The router has just started and has not read its table of models yet.", retry_after_s=1)
        return sorted(caller.those_of(self.controller.fleet.models.values()), key=lambda model: model.key)

    def eta_s(self, model_key: str) -> float:
        return self.controller.eta_s(model_key, self.clock())

    def arrive(self, exchange: R, stimulus: RequestArrived) -> None:
        self.exchanges[stimulus.ticket] = exchange
        self.take(stimulus)
        self.changed.set()

    def end(self, stimulus: RequestEnded) -> None:
        """Remove an ended exchange; the controller has already dropped its rejected requests."""
        del self.exchanges[stimulus.ticket]
        self.take(stimulus)
        self.changed.set()

    def change(self, stimulus: Any) -> None:
        self.take(stimulus)
        self.changed.set()

    def take(self, stimulus: Any) -> None:
        """Have the controller handle one of its own messages."""
        if effects := self._handlers[type(stimulus)](stimulus, self.clock()):
            self.do(effects)

    def restore(self, table: str, rows: Mapping[str, Any], *, is_copy: bool = False) -> None:
        """`is_copy`: the copy on disk, possibly old."""
        self.keys.restore(table, rows, is_copy=is_copy)
        self.do(self.controller.restore(table, rows, self.clock(), is_copy=is_copy))
        self.table_loaded = self.table_loaded or table == "models"

    def publish(self, payload: Any) -> None:
        self._publish(Publish(payload))

    def do(self, effects: list[Effect]) -> None:
        """Carry out effects in order, except those for ended requests."""
        for effect in effects:
            if type(effect) is Publish:
                self._publish(effect)
            elif (exchange := self.exchanges.get(effect.ticket)) is not None:
                if (reservation := self.limits.reserved.get(effect.ticket)) is not None:
                    if type(effect) is Dispatch and not reservation.is_held:
                        reservation.was_sent = True
                    else:
                        effect = self.limits.effect(effect, reservation)
                getattr(exchange, EXECUTORS[type(effect)])(effect)
