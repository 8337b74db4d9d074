"""Requests arrive at the router, run in a batching engine, and are measured at their end."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from glowplug.controllers.router import messages as rw
from glowplug.domain.access import Priority, Tenant
from glowplug.domain.instance import InstanceState
from glowplug.domain.model import Slo
from glowplug.events.facts import RequestFinished
from glowplug_lab.simulator.control_plane import ControlPlane
from glowplug_lab.simulator.hardware.batching import Sequence, What
from glowplug_lab.simulator.hardware.engine import Sharing, SimEngine
from glowplug_lab.simulator.hardware.server import Server
from glowplug_lab.simulator.run import Run
from glowplug_lab.simulator.workload.arrival import Arrival

ERROR_STATUS: Final = {"context_length_exceeded": 400, "engine_failed": 502}
# Held requests wait, and no stream moves (`move_within_s` is 0). Only recalls that give way need work: a broken engine
# ends its own requests.
UNHEEDED: Final = (rw.Hold, rw.MoveStream)


@dataclass(slots=True, eq=False)
class _Request:
    ticket: int
    arrival: Arrival
    engine: SimEngine | None = None
    sequence: Sequence | None = None
    cold: bool = False
    pace: float = 1.0  # measured factor for later tokens
    num_dispatches: int = 0
    instance_id: str = ""  # last sent to: an adapter's, not its host's
    num_emitted: int = 0  # by engines it has left
    first_token_at: float = -1.0


class Traffic:
    """The executor of the router's effects. Arrivals are read one ahead, for constant memory. `servers`, by node_id,
    may be filled later. `on_end` gets each ticket and its end: "200", an error's status and code, or the client's
    fate."""

    executes = (rw.Dispatch, rw.Reject, rw.Recall, *UNHEEDED)

    def __init__(
        self, run: Run, control: ControlPlane, servers: Mapping[str, Server], arrivals: Iterator[Arrival]
    ) -> None:
        self._run, self._control, self._servers = run, control, servers
        self.sharing = Sharing(run, self.watch)
        self.num_arrived = 0
        self.on_end: list[Callable[[int, str], None]] = []
        self._arrivals = arrivals
        self._open: dict[int, _Request] = {}
        self._tenants = {tenant.name: tenant for tenant in run.setup.tenants}
        self._tells_tokens = getattr(control.router, "tracks_tokens", True)
        self._tells_prefixes = getattr(control.router, "reads_prefixes", False)
        control.add_router(self)

    @property
    def num_open(self) -> int:
        return len(self._open)

    def start(self) -> None:
        arrival = next(self._arrivals, None)
        if arrival is not None:
            self._run.kernel.at(self._run.began_s + arrival.at_s, self._come, arrival)

    def _come(self, arrival: Arrival) -> None:
        self.start()
        self.arrive(arrival)

    def arrive(self, arrival: Arrival) -> int:
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
        if arrival.prefix and self._tells_prefixes:
            arrived = replace(arrived, prefix=arrival.prefix)
        if arrival.tenant:
            arrived = self._by_tenant(arrived, self._tenants[arrival.tenant], known.model.slo if known else Slo())
        self._control.give("router", arrived)
        if known:
            self._control.load_changed(arrival.model)
        return ticket

    def _by_tenant(self, arrived: rw.RequestArrived, tenant: Tenant, slo: Slo) -> rw.RequestArrived:
        self._run.results.by_tenant[tenant.name].arrived(slo)
        return replace(arrived, tenant=tenant.name, weight=tenant.weight, priority=tenant.priority)

    def leave(self, ticket: int) -> None:
        request = self._open.get(ticket)
        if request is not None:
            self._lose(request, "client_left")
            self._control.give("router", rw.RequestEnded(ticket))
            self._control.load_changed(request.arrival.model)

    def restarted(self, name: str) -> None:
        """The restarted router has lost its connections."""
        for request in list(self._open.values()):
            self._lose(request, "connection_lost")

    def _lose(self, request: _Request, how: str) -> None:
        del self._open[request.ticket]
        engine, sequence = request.engine, request.sequence
        if engine is not None and sequence is not None:
            self._leave(engine, request)
            if engine.serving is not None:
                engine.serving.abort(sequence, self._run.kernel.now_s)
                self.watch(engine)
        self._ended(request, how)

    def _ended(self, request: _Request, how: str, status: int = 0) -> None:
        self._run.results.by_model[request.arrival.model].num_refused[how] += 1
        if request.arrival.tenant:
            self._run.results.by_tenant[request.arrival.tenant].num_refused[how] += 1
        self._report_end(request.ticket, f"{status} {how}" if status else how)

    def _report_end(self, ticket: int, how: str) -> None:
        for listener in self.on_end:
            listener(ticket, how)

    def execute(self, effect: Any) -> None:
        if isinstance(effect, rw.Dispatch):
            self._dispatch(effect)
        elif isinstance(effect, rw.Reject):
            self._ended(self._open.pop(effect.ticket), effect.error.code, effect.error.status)
        elif isinstance(effect, rw.Recall) and effect.gives_way:
            self._run.kernel.after(0.0, self._give_way, self._open[effect.ticket], effect.reason)

    def _give_way(self, request: _Request, reason: str) -> None:
        """The request resumes later after its emitted tokens."""
        if request.ticket not in self._open:
            return
        engine, sequence, now_s = request.engine, request.sequence, self._run.kernel.now_s
        request.engine, request.sequence = None, None
        request.num_dispatches += 1  # drops a dispatch under way
        num_emitted = 0
        if engine is not None and sequence is not None and engine.serving is not None:
            num_emitted = engine.serving.num_emitted(sequence, now_s)
            engine.serving.abort(sequence, now_s)
            self._leave(engine, request)
            self.watch(engine)
            if num_emitted and request.first_token_at < 0:
                request.first_token_at = sequence.first_token_at
            request.num_emitted += num_emitted
        if num_emitted:
            self._control.give("router", rw.StreamBroken(request.ticket, reason, request.num_emitted, is_lost=False))
        else:
            self._control.give("router", rw.DispatchFailed(request.ticket, False, reason))
        self._control.load_changed(request.arrival.model)
        if engine is not None:
            self._tell_agent(engine)

    def _dispatch(self, effect: rw.Dispatch) -> None:
        request = self._open[effect.ticket]
        request.cold, request.instance_id = request.cold or effect.cold, effect.instance.instance_id
        server = self._servers.get(effect.instance.node_id)
        engine = server.engines.get(effect.instance.engine_id) if server else None
        request.num_dispatches += 1
        self._run.kernel.after(self._run.setup.params.network_s, self._reach, request, engine, request.num_dispatches)

    def _reach(self, request: _Request, engine: SimEngine | None, num_dispatches: int) -> None:
        if request.ticket not in self._open or request.num_dispatches != num_dispatches:
            return
        if engine is None or engine.serving is None:
            self._control.give("router", rw.DispatchFailed(request.ticket, False, "connection refused"))
            self._control.load_changed(request.arrival.model)
            return
        arrival = request.arrival
        done = request.num_emitted
        sequence = Sequence(
            request.ticket, arrival.prompt_tokens + done, arrival.response_tokens - done, prefix=arrival.prefix
        )
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
        pace: float = sum(request.pace for request in engine.tickets.values()) / len(engine.tickets)
        self.sharing.pace(engine, pace)
        return pace

    def watch(self, engine: SimEngine) -> None:
        """Schedule the engine's next boundary."""
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
        took_s = now_s - sequence.submitted_at if not request.num_emitted else 0.0
        num_tokens = request.num_emitted + sequence.num_emitted
        self._control.give("router", rw.RequestEnded(request.ticket, took_s, num_tokens, sequence.cached_tokens))
        self._control.load_changed(request.arrival.model)
        self._tell_agent(engine)

    def _tell_agent(self, engine: SimEngine) -> None:
        """A draining agent hears of ends at once (WarmServe section 4.1)."""
        server = self._servers[engine.node_id]
        holding = server.agent.holdings.get(engine.instance_id)
        if holding is not None and holding.instance.state is InstanceState.DRAINING:
            server.count(engine)

    def _leave(self, engine: SimEngine, request: _Request) -> None:
        del engine.tickets[request.ticket]
        if engine.model.pace and engine.tickets:
            self._set_pace(engine)
        if not engine.tickets:
            self.sharing.idle(engine)

    def _measure(self, request: _Request, engine: SimEngine, sequence: Sequence, now_s: float) -> None:
        arrival, slo = request.arrival, self._run.models[request.arrival.model].model.slo
        arrived_s = self._run.began_s + arrival.at_s
        first_at = request.first_token_at if request.num_emitted else sequence.first_token_at
        ttft_s = first_at - arrived_s + self._run.setup.params.network_s
        e2e_s, decode_s = now_s - arrived_s, sequence.finished_at - first_at
        tokens = arrival.prompt_tokens, arrival.response_tokens
        self._run.results.by_model[arrival.model].answered(
            slo,
            tokens,
            cold=request.cold,
            ttft_s=ttft_s,
            decode_s=decode_s,
            e2e_s=e2e_s,
            cached_tokens=sequence.cached_tokens,
        )
        if arrival.tenant:
            self._run.results.by_tenant[arrival.tenant].answered(
                slo, tokens, cold=request.cold, ttft_s=ttft_s, decode_s=decode_s, e2e_s=e2e_s
            )
        self._run.results.normalised_peak.add(now_s - self._run.began_s, e2e_s / arrival.response_tokens)
        if not (self._control.reads_ends or self._control.on_event):
            return
        known = self._control.router.requests.get(request.ticket)
        fact = RequestFinished(
            model_key=arrival.model,
            request_id=f"r{request.ticket}",
            router_id="router-1",
            instance_id=request.instance_id,
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
            priority="" if known is None or known.counts_as is Priority.STANDARD else known.counts_as.value,
        )
        self._control.ended(fact)

    def engine_gone(self, engine: SimEngine) -> None:
        if engine.wake is not None:
            engine.wake.cancel()
        engine.serving = None
        for request in list(engine.tickets.values()):
            self._end(request, "engine_failed")
        self.sharing.idle(engine)
