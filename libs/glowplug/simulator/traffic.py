"""Clients and engines: requests arrive at the router, run inside a batching engine, and are measured when they end."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from glowplug.controllers.router import messages as rw
from glowplug.domain.instance import InstanceState
from glowplug.domain.model import Slo
from glowplug.events.facts import RequestFinished
from glowplug.simulator.control_plane import ControlPlane
from glowplug.simulator.hardware.batching import Sequence, What
from glowplug.simulator.hardware.engine import Sharing, SimEngine
from glowplug.simulator.hardware.server import Server
from glowplug.simulator.run import Run
from glowplug.simulator.workload.arrival import Arrival

ERROR_STATUS: Final = {"context_length_exceeded": 400, "engine_failed": 502}
# Who waits, waits; an engine that is gone ends its requests itself, and no stream leaves one (`move_within_s` is 0).
UNHEEDED: Final = (rw.Hold, rw.Recall, rw.MoveStream)


@dataclass(slots=True, eq=False)
class _Request:
    ticket: int
    arrival: Arrival
    engine: SimEngine | None = None
    sequence: Sequence | None = None
    cold: bool = False
    pace: float = 1.0  # as its later tokens were measured


class Traffic:
    """Every open request, and the effects of the router. Arrivals are read one ahead, so a trace of any length takes
    the same memory. `servers` are those of the run, by node_id, once they are there. `on_end` is called with the ticket
    of each request and how it ended: "200", the status and code of an error, or what happened to the client."""

    executes = (rw.Dispatch, rw.Reject, *UNHEEDED)

    def __init__(
        self, run: Run, control: ControlPlane, servers: Mapping[str, Server], arrivals: Iterator[Arrival]
    ) -> None:
        self._run, self._control, self._servers = run, control, servers
        self.sharing = Sharing(run, self.watch)
        self.num_arrived = 0
        self.on_end: list[Callable[[int, str], None]] = []
        self._arrivals = arrivals
        self._open: dict[int, _Request] = {}
        self._tells_tokens = getattr(control.router, "tracks_tokens", True)
        control.add_router(self)

    @property
    def num_open(self) -> int:
        return len(self._open)

    def start(self) -> None:
        """The next request is on its way."""
        arrival = next(self._arrivals, None)
        if arrival is not None:
            self._run.kernel.at(self._run.began_s + arrival.at_s, self._come, arrival)

    def _come(self, arrival: Arrival) -> None:
        self.start()
        self.arrive(arrival)

    def arrive(self, arrival: Arrival) -> int:
        """A request comes, now. Returns its ticket."""
        self.num_arrived += 1
        ticket = self.num_arrived
        self._open[ticket] = _Request(ticket, arrival)
        known = self._run.models.get(arrival.model)
        self._run.results.by_model[arrival.model].arrived(known.model.slo if known else Slo())
        expected = arrival.expected_tokens
        if not expected and self._run.setup.params.exact_lengths:
            expected = arrival.response_tokens
        arrived = rw.RequestArrived(
            ticket, arrival.model, f"r{ticket}", prompt_tokens=arrival.prompt_tokens, expected_tokens=expected
        )
        self._control.give("router", arrived)
        if known:
            self._control.load_changed(arrival.model)
        return ticket

    def leave(self, ticket: int) -> None:
        """A client closes its connection; one that has its answer is gone already."""
        request = self._open.get(ticket)
        if request is not None:
            self._lose(request, "client_left")
            self._control.give("router", rw.ClientLeft(ticket))
            self._control.load_changed(request.arrival.model)

    def restarted(self, name: str) -> None:
        """The router has lost every connection."""
        for request in list(self._open.values()):
            self._lose(request, "connection_lost")

    def _lose(self, request: _Request, how: str) -> None:
        """No answer goes out any more, and the engine drops the request."""
        del self._open[request.ticket]
        engine, sequence = request.engine, request.sequence
        if engine is not None and sequence is not None:
            self._leave(engine, request)
            if engine.serving is not None:
                engine.serving.abort(sequence, self._run.kernel.now_s)
                self.watch(engine)
        self._ended(request, how)

    def _ended(self, request: _Request, how: str, status: int = 0) -> None:
        """Count one that was not answered well. `how` is an error's code, or what happened to the client."""
        self._run.results.by_model[request.arrival.model].num_refused[how] += 1
        self._report_end(request.ticket, f"{status} {how}" if status else how)

    def _report_end(self, ticket: int, how: str) -> None:
        for listener in self.on_end:
            listener(ticket, how)

    # the router's effects

    def execute(self, effect: Any) -> None:
        if isinstance(effect, rw.Dispatch):
            self._dispatch(effect)
        elif isinstance(effect, rw.Reject):
            self._ended(self._open.pop(effect.ticket), effect.code, effect.status)

    def _dispatch(self, effect: rw.Dispatch) -> None:
        request = self._open[effect.ticket]
        request.cold = request.cold or effect.cold
        server = self._servers.get(effect.instance.node_id)
        engine = server.engines.get(effect.instance.instance_id) if server else None
        self._run.kernel.after(self._run.setup.params.network_s, self._reach, request, engine)

    def _reach(self, request: _Request, engine: SimEngine | None) -> None:
        if request.ticket not in self._open:
            return
        if engine is None or engine.serving is None:
            self._control.give("router", rw.DispatchFailed(request.ticket, False, "connection refused"))
            self._control.load_changed(request.arrival.model)
            return
        arrival = request.arrival
        sequence = Sequence(request.ticket, arrival.prompt_tokens, arrival.response_tokens)
        request.engine, request.sequence = engine, sequence
        engine.tickets[request.ticket] = request
        if engine.model.pace:
            prompt, request.pace = self._run.pace_of(engine.model)
            sequence.pace = prompt / self._set_pace(engine)
        if len(engine.tickets) == 1:
            self.sharing.busy(engine)
        try:
            engine.serving.submit(sequence, self._run.kernel.now_s)
        except ValueError:
            self._end(request, "context_length_exceeded")
        self.watch(engine)

    def _set_pace(self, engine: SimEngine) -> float:
        """An engine is as slow as those it serves were measured to be, on average."""
        pace: float = sum(request.pace for request in engine.tickets.values()) / len(engine.tickets)
        self.sharing.pace(engine, pace)
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
            engine.wake = self._run.kernel.at(next_s, self._boundary, engine)

    def _boundary(self, engine: SimEngine) -> None:
        if engine.serving is None:
            return
        for what, sequence, _ in engine.serving.advance(self._run.kernel.now_s):
            request = engine.tickets.get(sequence.key)
            if request is None:
                continue
            if what is What.FINISHED:
                self._end(request, "")
            elif what is What.FIRST_TOKEN:
                if self._tells_tokens:
                    self._control.give("router", rw.FirstToken(sequence.key))
            elif what is What.PREEMPTED:
                self._run.results.by_model[request.arrival.model].num_preempted += 1
        self.watch(engine)

    def _end(self, request: _Request, code: str) -> None:
        del self._open[request.ticket]
        engine, sequence = request.engine, request.sequence
        assert engine is not None and sequence is not None
        self._leave(engine, request)
        now_s = self._run.kernel.now_s
        if code:
            self._ended(request, code, ERROR_STATUS[code])
        else:
            self._measure(request, engine, sequence, now_s)
            self._report_end(request.ticket, "200")
        took_s = now_s - sequence.submitted_at
        self._control.give("router", rw.RequestEnded(request.ticket, took_s, sequence.num_emitted))
        self._control.load_changed(request.arrival.model)
        server = self._servers[engine.node_id]
        holding = server.agent.holdings.get(engine.instance_id)
        if holding is not None and holding.instance.state is InstanceState.DRAINING:
            server.count(engine)  # an agent that drains its engine is notified at once (WarmServe section 4.1)

    def _leave(self, engine: SimEngine, request: _Request) -> None:
        del engine.tickets[request.ticket]
        if engine.model.pace and engine.tickets:
            self._set_pace(engine)
        if not engine.tickets:
            self.sharing.idle(engine)

    def _measure(self, request: _Request, engine: SimEngine, sequence: Sequence, now_s: float) -> None:
        arrival, slo = request.arrival, self._run.models[request.arrival.model].model.slo
        arrived_s = self._run.began_s + arrival.at_s
        ttft_s = sequence.first_token_at - arrived_s + self._run.setup.params.network_s
        e2e_s, decode_s = now_s - arrived_s, sequence.finished_at - sequence.first_token_at
        tokens = arrival.prompt_tokens, arrival.response_tokens
        self._run.results.by_model[arrival.model].answered(
            slo, tokens, cold=request.cold, ttft_s=ttft_s, decode_s=decode_s, e2e_s=e2e_s
        )
        self._run.results.normalised_peak.add(now_s - self._run.began_s, e2e_s / arrival.response_tokens)
        if not (self._control.reads_ends or self._control.on_event):
            return
        fact = RequestFinished(
            model_key=arrival.model,
            request_id=f"r{request.ticket}",
            router_id="router-1",
            instance_id=engine.instance_id,
            status=200,
            arrived_at=arrived_s,
            finished_at=now_s,
            queue_s=sequence.submitted_at - arrived_s,
            ttft_s=ttft_s,
            e2e_s=e2e_s,
            prompt_tokens=arrival.prompt_tokens,
            response_tokens=arrival.response_tokens,
            tokens_exact=True,
            cold=request.cold,
            emulated=True,
        )
        self._control.publish("router", fact, None)

    def engine_gone(self, engine: SimEngine) -> None:
        """Its process has ended: what it ran is lost, and each client is answered so."""
        if engine.wake is not None:
            engine.wake.cancel()
        engine.serving = None
        for request in list(engine.tickets.values()):
            self._end(request, "engine_failed")
        self.sharing.idle(engine)
