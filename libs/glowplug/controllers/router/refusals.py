"""Why a request that cannot run now may not wait either."""

from collections.abc import Callable, Iterator
from itertools import takewhile

from glowplug.controllers.router.failures import BusWatch, Failures, coded, suspended
from glowplug.controllers.router.overload import Overload, retry_after_s
from glowplug.controllers.router.queue import ModelQueue, Request
from glowplug.domain.errors import Contended, EngineFailed, GlowplugError, NoCapacity
from glowplug.domain.model import Model, OnCold
from glowplug.fleet.tables import Fleet


class Refusals:
    """The refusals of one router. `eta_s`: seconds until a model serves a request that arrives now."""

    def __init__(
        self,
        fleet: Fleet,
        failures: Failures,
        bus: BusWatch,
        overload: Overload,
        eta_s: Callable[[str, float], float],
    ) -> None:
        self._fleet, self._failures, self._bus, self._overload, self._eta_s = fleet, failures, bus, overload, eta_s

    def of(self, model: Model, queue: ModelQueue, num_ahead: int, now_s: float) -> GlowplugError | None:
        """The error for a request that can neither run now nor wait behind `num_ahead` of the queue's; None when it may
        wait."""
        is_cold = not self._fleet.ready(model.key)
        if is_cold and (known := self.no_start(model, now_s)) is not None:
            return known
        if is_cold and model.on_cold is OnCold.REFUSE:
            retry_s = retry_after_s(self._eta_s(model.key, now_s))
            text = f"The model `{model.name}` is not running and is set to refuse rather than hold (on_cold: refuse)."
            return coded(NoCapacity(text, retry_after_s=retry_s), "model_cold")
        if len(queue.waiting) >= model.max_queue:
            text = f"{len(queue.waiting)} requests already wait for `{model.name}` (max_queue {model.max_queue})."
            return Contended(text, retry_after_s=self._overload.ask_back_s(model, queue, now_s))
        if self._overload.is_late(model, num_ahead, 0.0, now_s):
            return self._overload.error(model, queue, now_s)
        return None

    def no_start(self, model: Model, now_s: float) -> GlowplugError | None:
        """The error that says why no instance of a cold model will start; None when one may."""
        base = self._fleet.models.get(model.base) if model.base else None
        if model.suspended or (base is not None and base.suspended):
            return suspended(model if model.suspended or base is None else base)
        known = self._failures.refusal(model.key, now_s) or self._bus.refusal(model)
        if base is not None and not self._fleet.ready(base.key) and not self._fleet.coming(base.key):
            known = known or self._failures.refusal(base.key, now_s)
        return known if known is not None and not self._fleet.coming(model.key) else None

    def expired(
        self, model: Model, queue: ModelQueue, continue_within_s: float, now_s: float
    ) -> Iterator[tuple[Request, GlowplugError]]:
        """The held requests whose time has run out, each taken out of the queue, and what to answer them."""
        bounds = model.max_wait_s, continue_within_s, now_s
        for request in list(takewhile(lambda r: r.is_back or r.is_over(*bounds), queue.waiting.values())):
            if not request.is_over(*bounds):
                continue  # its time runs from the break of its stream, though it stands before later arrivals
            queue.remove(request.ticket)
            most_s = request.most_s(model.max_wait_s, continue_within_s)
            failure = self._failures.of(model.key)
            why = f" The last start failed: {failure.message}" if failure is not None else ""
            if request.broken_at:
                text = f"No instance of `{model.name}` could go on with the stream within {most_s:g} s.{why}"
                yield request, EngineFailed(text)
                continue
            text = f"No instance of `{model.name}` could take the request within {most_s:g} s.{why}"
            retry_s = self._overload.ask_back_s(model, queue, now_s)
            yield request, coded(NoCapacity(text, retry_after_s=retry_s), "wait_timeout")
