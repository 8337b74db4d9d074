"""Moves of streams off a draining instance before its drain ends them: make before break.

The row of a draining instance says when its remaining requests are ended (`drain_ends_at`): because its node is
drained, because another start waits for its memory, or because it is not needed. The router asks another READY instance
of the model with a free slot to take each stream that is expected to outlast the drain, while the first instance still
answers it. The stream leaves the first instance once the other has begun, and stays where the other does not begin.
The first instance is free that much sooner, and nothing waits for a start.

A stream stays when it is expected to end in time, when no engine can continue it, or when no other instance has a free
slot. It then runs to the deadline, and is continued afterwards like one whose engine was lost. An answer that is no
stream stays too. "In time" means before `drain_ends_at`; while models wait for memory, which the drained instance may
be asked to give back, it means within the time that a move may take (`within_s`).

How long an answer still takes is not known. It is expected to take as long as the model's answers do, or as long as it
has already run, whichever is longer (most things that have lasted last as long again).
"""

from collections.abc import Callable, Mapping

from glowplug.controllers.effects import Effect
from glowplug.controllers.router.balance import Balances
from glowplug.controllers.router.messages import MoveFailed, MoveStream, Recall, StreamMoved
from glowplug.controllers.router.overload import Overload
from glowplug.controllers.router.queue import ModelQueue, Request
from glowplug.domain.instance import Instance, InstanceState
from glowplug.fleet.tables import Fleet

RETRY_S = 1.0  # least time between two tries to move one stream


def remaining_s(ran_s: float, mean_s: float) -> float:
    """Expected seconds until an answer ends that has run for `ran_s`. `mean_s`: of its model's answers, 0: unknown."""
    return max(ran_s, mean_s)


class Moves:
    """Moves of one router's streams. `most`: instances that may fail to take one stream; `within_s` 0: no moves."""

    def __init__(
        self,
        fleet: Fleet,
        balances: Balances,
        overload: Overload,
        requests: Mapping[int, Request],
        queue: Callable[[str], ModelQueue],
        *,
        most: int,
        within_s: float,
    ) -> None:
        self._fleet, self._balances, self._overload = fleet, balances, overload
        self._requests, self._queue, self._most, self._within_s = requests, queue, most, within_s
        self._is_on = bool(most and within_s)
        self._ends_at: dict[str, float] = {}  # instance_id -> when its drain ends

    def instance_changed(self, instance: Instance) -> None:
        """Note from an instance's new row when its drain ends, if it drains."""
        if self._is_on and instance.state is InstanceState.DRAINING and instance.drain_ends_at:
            self._ends_at[instance.instance_id] = instance.drain_ends_at
        else:
            self._ends_at.pop(instance.instance_id, None)

    def instance_gone(self, instance_id: str) -> None:
        self._ends_at.pop(instance_id, None)

    def begin(self, now_s: float) -> list[Effect]:
        """Ask other instances to take the streams that would outlast their drains, the oldest first."""
        late = {i: at for i, at in self._ends_at.items() if self._balances.in_flight.get(i)}
        if not late:
            return []
        effects: list[Effect] = []
        for request in [r for r in self._requests.values() if r.instance_id in late]:
            if self._stays(request, late[request.instance_id], now_s):
                continue
            first, other = self._fleet.instances.get(request.instance_id), self._balances.choose(request, now_s)
            if first is not None and other is not None:
                request.leaves = first
                why = f"{request.instance_id} drains and ends in {late[request.instance_id] - now_s:.1f} s"
                self._put(request, other, now_s)
                effects.append(MoveStream(request.ticket, other, why))
        return effects

    def _stays(self, request: Request, ends_at: float, now_s: float) -> bool:
        if request.leaves is not None or request.stays or now_s < request.no_move_before:
            return True
        if self._queue(request.model_key).waiting:
            return True  # free slots go to the waiting requests
        if self._overload.is_short:
            ends_at = min(ends_at, now_s + self._within_s)
        mean_s = self._overload.estimates.service_s.get(request.model_key, 0.0)
        return now_s + remaining_s(now_s - request.sent_at, mean_s) <= ends_at

    def _put(self, request: Request, instance: Instance, now_s: float) -> None:
        """Count a moved stream at its new instance."""
        self._balances.left(request, 0, now_s)
        request.instance_id = instance.instance_id
        self._balances.sent(request, instance, now_s)

    def done(self, request: Request, stimulus: StreamMoved, now_s: float) -> None:
        """Take note that a stream moved, or that the other instance is to take it since the first one is lost."""
        request.leaves, request.sent_at = None, now_s
        request.go_on_behind(stimulus.num_tokens, now_s)

    def failed(self, request: Request, stimulus: MoveFailed, now_s: float) -> list[Effect]:
        """Count a stream at its first instance again after a failed move, for now or for good. Where that instance has
        ended meanwhile, recall the stream."""
        first, other = request.leaves, request.instance_id
        if first is None:
            return []
        request.leaves, request.no_move_before = None, now_s + RETRY_S
        request.num_moves_failed += stimulus.is_asked
        request.stays = stimulus.is_refused or request.num_moves_failed > self._most
        if stimulus.is_unreachable:
            self._balances.unreachable(other, request.model_key, now_s)
        self._put(request, first, now_s)
        row = self._fleet.instances.get(first.instance_id)
        if row is not None and not row.state.is_dormant:
            return []
        return [Recall(request.ticket, f"{first.instance_id} has ended meanwhile", ended=True)]
