"""Streams leave an instance that drains before its drain ends them: make before break.

The row of an instance that drains says when what still runs there is ended (`drain_ends_at`): for a node that is
drained, for one whose memory another start waits for, for one that is spare. A stream that is expected to go on beyond
that time is asked for at another READY instance of its model with a free slot, while the first one answers it still. It
leaves that one once the other has begun; where the other does not, it stays. Its first instance is free that much
sooner, and nothing waits for a start.

A stream stays that is expected to end in time, that no engine can go on with, or for which no other instance has a free
slot; with none it runs to the deadline, and is continued afterwards as one whose engine was lost. So does an answer
that is no stream. In time is before that end; while models wait for memory, which the drained instance may be asked to
give back, it is within as long as a move may take (`within_s`).

How long an answer still takes is not known: as long as answers of its model take, or as it has run already, whichever
is longer (of what has lasted, most lasts as long again).
"""

from collections.abc import Callable, Mapping

from glowplug.controllers.effects import Effect
from glowplug.controllers.router.balance import Balances
from glowplug.controllers.router.messages import MoveFailed, MoveStream, Recall, StreamMoved
from glowplug.controllers.router.overload import Overload
from glowplug.controllers.router.queue import ModelQueue, Request
from glowplug.domain.instance import Instance, InstanceState
from glowplug.fleet.tables import Fleet

RETRY_S = 1.0  # a stream that could not leave is asked no sooner


def remaining_s(ran_s: float, mean_s: float) -> float:
    """Seconds that an answer is expected to go on which has run for `ran_s`, where those of its model take `mean_s` (0:
    not known)."""
    return max(ran_s, mean_s)


class Moves:
    """Who leaves which instance, of one router. `most`: instances that may fail to take one stream; `within_s` 0: none
    leaves."""

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
        self._ends_at: dict[str, float] = {}  # instance_id -> when its drain does

    def instance_changed(self, instance: Instance) -> None:
        """Its row is another."""
        if self._is_on and instance.state is InstanceState.DRAINING and instance.drain_ends_at:
            self._ends_at[instance.instance_id] = instance.drain_ends_at
        else:
            self._ends_at.pop(instance.instance_id, None)

    def instance_gone(self, instance_id: str) -> None:
        self._ends_at.pop(instance_id, None)

    def begin(self, now_s: float) -> list[Effect]:
        """Ask for what would not end in time elsewhere, the oldest first."""
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
            return True  # a slot that is free is theirs
        if self._overload.is_short:
            ends_at = min(ends_at, now_s + self._within_s)
        mean_s = self._overload.estimates.service_s.get(request.model_key, 0.0)
        return now_s + remaining_s(now_s - request.sent_at, mean_s) <= ends_at

    def _put(self, request: Request, instance: Instance, now_s: float) -> None:
        """It counts there from now on."""
        self._balances.left(request, 0, now_s)
        request.instance_id = instance.instance_id
        self._balances.sent(request, instance, now_s)

    def done(self, request: Request, stimulus: StreamMoved, now_s: float) -> None:
        """The other instance has it, or the first one is lost and the other is to have it."""
        request.leaves, request.sent_at = None, now_s
        request.go_on_behind(stimulus.num_tokens, now_s)

    def failed(self, request: Request, stimulus: MoveFailed, now_s: float) -> list[Effect]:
        """It stays where it was, for now or for good. What became of that one meanwhile holds for it again."""
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
