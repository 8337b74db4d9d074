"""Clients and engines: requests arrive at the router, run inside a batching engine, and are measured when they end."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from glowplug.controllers.router import messages as rw
from glowplug.domain.model import Slo
from glowplug.events.facts import RequestFinished
from glowplug.simulator.hardware.batching import Sequence, What
from glowplug.simulator.hardware.engine import SimEngine
from glowplug.simulator.workload.arrival import Arrival

if TYPE_CHECKING:
    from glowplug.simulator.world import World


class _Request:
    __slots__ = ("arrival", "cold", "engine", "pace", "sequence", "ticket")

    def __init__(self, ticket: int, arrival: Arrival) -> None:
        self.ticket, self.arrival = ticket, arrival
        self.engine: SimEngine | None = None
        self.sequence: Sequence | None = None
        self.cold = False
        self.pace = 1.0  # as its later tokens were measured


class Traffic:
    """Every open request. Arrivals are read one ahead, so a trace of any length takes the same memory."""

    def __init__(self, world: "World", arrivals: Iterator[Arrival]) -> None:
        self.world = world
        self.num_arrived = 0
        self._arrivals = arrivals
        self._open: dict[int, _Request] = {}
        self._tells_tokens = getattr(world.fleet.router, "tracks_tokens", True)
        world.fleet.hands["router"] = self

    @property
    def num_open(self) -> int:
        return len(self._open)

    def start(self) -> None:
        self._next()

    def _next(self) -> None:
        arrival = next(self._arrivals, None)
        if arrival is not None:
            self.world.kernel.at(self.world.began_s + arrival.at_s, self._arrive, arrival)

    def _arrive(self, arrival: Arrival) -> None:
        self._next()
        self.num_arrived += 1
        ticket = self.num_arrived
        self._open[ticket] = _Request(ticket, arrival)
        slo = Slo()
        if arrival.model in self.world.models:
            slo = self.world.models[arrival.model].model.slo
        self.world.results.of(arrival.model).arrived(slo.ttft_s, slo.tpot_s)
        expected = arrival.expected_tokens
        if not expected and self.world.setup.params.exact_lengths:
            expected = arrival.response_tokens
        self.world.fleet.give(
            "router",
            rw.RequestArrived(
                ticket,
                arrival.model,
                f"r{ticket}",
                prompt_tokens=arrival.prompt_tokens,
                expected_tokens=expected,
            ),
        )
        if arrival.model in self.world.models:
            self.world.fleet.load_changed(arrival.model)

    # the router's effects

    def execute(self, effect: Any) -> None:
        if isinstance(effect, rw.Dispatch):
            self._dispatch(effect)
        elif isinstance(effect, rw.Reject):
            request = self._open.pop(effect.ticket)
            refused = self.world.results.of(request.arrival.model).num_refused
            refused[effect.code] = refused.get(effect.code, 0) + 1

    def _dispatch(self, effect: rw.Dispatch) -> None:
        request = self._open[effect.ticket]
        request.cold = request.cold or effect.cold
        engine = self.world.engine(effect.instance.node_id, effect.instance.instance_id)
        self.world.kernel.after(self.world.setup.params.network_s, self._reach, request, engine)

    def _reach(self, request: _Request, engine: SimEngine | None) -> None:
        if request.ticket not in self._open:
            return
        if engine is None or engine.serving is None:
            self.world.fleet.give("router", rw.DispatchFailed(request.ticket, False, "connection refused"))
            self.world.fleet.load_changed(request.arrival.model)
            return
        arrival = request.arrival
        sequence = Sequence(request.ticket, arrival.prompt_tokens, arrival.response_tokens)
        request.engine, request.sequence = engine, sequence
        engine.tickets[request.ticket] = request
        if engine.model.pace:
            prompt, request.pace = self.world.pace_of(engine.model)
            sequence.pace = prompt / self._set_pace(engine)
        if len(engine.tickets) == 1:
            self.world.sharing.busy(engine)
        try:
            engine.serving.submit(sequence, self.world.kernel.now_s)
        except ValueError:
            self._end(request, "context_length_exceeded")
        self.watch(engine)

    def _set_pace(self, engine: SimEngine) -> float:
        """An engine is as slow as those it serves were measured to be, on average."""
        pace: float = sum(request.pace for request in engine.tickets.values()) / len(engine.tickets)
        self.world.sharing.pace(engine, pace)
        return pace

    def watch(self, engine: SimEngine) -> None:
        """Wake up when the engine's next boundary comes."""
        serving = engine.serving
        if serving is None:
            return
        next_s = serving.due_at_s
        if engine.wake is not None:
            if engine.wake.action is not None and engine.wake.at_s == next_s:
                return
            engine.wake.cancel()
            engine.wake = None
        if next_s < float("inf"):
            engine.wake = self.world.kernel.at(next_s, self._boundary, engine)

    def _boundary(self, engine: SimEngine) -> None:
        if engine.serving is None:
            return
        for what, sequence, _ in engine.serving.advance(self.world.kernel.now_s):
            request = engine.tickets.get(sequence.key)
            if request is None:
                continue
            if what is What.FINISHED:
                self._end(request, "")
            elif what is What.FIRST_TOKEN:
                if self._tells_tokens:
                    self.world.fleet.give("router", rw.FirstToken(sequence.key))
            elif what is What.PREEMPTED:
                self.world.results.of(request.arrival.model).num_preempted += 1
        self.watch(engine)

    def _end(self, request: _Request, code: str) -> None:
        del self._open[request.ticket]
        engine, sequence = request.engine, request.sequence
        assert engine is not None and sequence is not None
        del engine.tickets[request.ticket]
        if engine.model.pace and engine.tickets:
            self._set_pace(engine)
        if not engine.tickets:
            self.world.sharing.idle(engine)
        now_s = self.world.kernel.now_s
        result = self.world.results.of(request.arrival.model)
        if code:
            result.num_refused[code] = result.num_refused.get(code, 0) + 1
        else:
            self._measure(request, sequence, now_s)
        took_s = now_s - sequence.submitted_at
        self.world.fleet.give("router", rw.RequestEnded(request.ticket, took_s, sequence.num_emitted))
        self.world.fleet.load_changed(request.arrival.model)
        self.world.drained_a_little(engine)

    def _measure(self, request: _Request, sequence: Sequence, now_s: float) -> None:
        arrival, model = request.arrival, self.world.models[request.arrival.model].model
        result = self.world.results.of(arrival.model)
        arrived_s = self.world.began_s + arrival.at_s
        ttft_s = sequence.first_token_at - arrived_s + self.world.setup.params.network_s
        after = arrival.response_tokens - 1
        tpot_s = (sequence.finished_at - sequence.first_token_at) / after if after else 0.0
        e2e_s = now_s - arrived_s
        result.num_finished += 1
        result.num_cold += request.cold
        result.prompt_tokens += arrival.prompt_tokens
        result.response_tokens += arrival.response_tokens
        result.ttft.add(ttft_s)
        result.e2e.add(e2e_s)
        result.normalised.add(e2e_s / arrival.response_tokens)
        self.world.results.normalised_peak.add(now_s - self.world.began_s, e2e_s / arrival.response_tokens)
        if after:
            result.tpot.add(tpot_s)
        result.num_ttft_met += bool(model.slo.ttft_s) and ttft_s <= model.slo.ttft_s
        result.num_tpot_met += bool(model.slo.tpot_s) and tpot_s <= model.slo.tpot_s
        if self.world.fleet.reads_ends or self.world.fleet.on_event:
            self._tell(request, sequence, ttft_s, now_s)

    def _tell(self, request: _Request, sequence: Sequence, ttft_s: float, now_s: float) -> None:
        arrival, arrived_s = request.arrival, self.world.began_s + request.arrival.at_s
        fact = RequestFinished(
            model_key=arrival.model,
            request_id=f"r{request.ticket}",
            router_id="router-1",
            instance_id=request.engine.instance_id if request.engine else "",
            status=200,
            arrived_at=arrived_s,
            finished_at=now_s,
            queue_s=sequence.submitted_at - arrived_s,
            ttft_s=ttft_s,
            e2e_s=now_s - arrived_s,
            prompt_tokens=arrival.prompt_tokens,
            response_tokens=arrival.response_tokens,
            tokens_exact=True,
            cold=request.cold,
            emulated=True,
        )
        self.world.fleet.publish("router", fact, None)

    def engine_gone(self, engine: SimEngine) -> None:
        """Its process has ended: what it ran is lost, and each client hears of it."""
        if engine.wake is not None:
            engine.wake.cancel()
        engine.serving = None
        for request in list(engine.tickets.values()):
            self._end(request, "engine_failed")
        self.world.sharing.idle(engine)
