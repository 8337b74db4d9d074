"""Copies below READY: a model deployed or pinned asleep keeps one, and an operator may ask for one of any model.

SwapServeLLM section 3.2: an engine is started once when its model is configured, leaves its GPU in a snapshot, and is
swapped in at a request (section 3.3). Here such a start waits for free GPU memory and displaces no serving instance;
once READY it is put away unless a request has arrived.

Departures: the paper starts its engines before it serves, ours start while others serve. A lost copy (its agent was
killed, its engine stopped for keeping too much memory) is made again, after a pause that grows until a copy has lasted.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

from glowplug.controllers import backoff
from glowplug.domain.errors import EngineMisconfigured
from glowplug.domain.hardware import Node
from glowplug.domain.instance import Becomes, Instance, InstanceState
from glowplug.domain.model import Model, Rung
from glowplug.fleet.status import rung_of

BECOMES: Final[Mapping[Rung, Becomes]] = {Rung.ASLEEP: "swapped_out", Rung.PREWARMED: "prewarmed"}
_ABILITIES: Final = {Rung.ASLEEP: ("swap", "sleep"), Rung.PREWARMED: ("prewarm", "be prewarmed")}
_AT_LEAST: Final = {  # dormant states at least as near as a rung
    Rung.ASLEEP: (InstanceState.SWAPPED_OUT, InstanceState.PREWARMED),
    Rung.PREWARMED: (InstanceState.PREWARMED,),
}


@dataclass(slots=True)
class KeptCopy:
    """One model's copy below READY. Times are epoch seconds."""

    asked: Rung | None = None  # an operator's one-time wish
    node_id: str = ""  # of `asked`; "": any
    put_away: dict[str, Rung] = field(default_factory=dict)  # instance_id -> the rung it was started for
    asleep_since: dict[str, float] = field(default_factory=dict)
    num_lost: int = 0  # in a row before any lasted
    last_lost: str = ""
    not_before: float = 0.0  # of the next start

    def forget_unknown(self, rows: Mapping[str, Instance]) -> None:
        """Forget sleepers whose row vanished without an end."""
        for instance_id in [name for name in self.asleep_since if name not in rows]:
            del self.asleep_since[instance_id]

    def may_try_again(self) -> None:
        self.num_lost, self.not_before = 0, 0.0

    def rest_until(self, now_s: float, rest_s: float) -> float:
        return min(now_s + rest_s, self.not_before) if self.not_before > now_s else now_s + rest_s

    def wanted(self, model: Model) -> Rung | None:
        """Return the rung for an unused model's copy."""
        if model.suspended:
            return None
        return self.asked or (Rung.ASLEEP if model.pinned_at is Rung.ASLEEP else None)

    def is_at(self, row: Instance, rung: Rung | None) -> bool:
        """Return whether it is on the rung, or was started for it; None: any rung."""
        return rung is None or rung_of(row) is rung or self.put_away.get(row.instance_id) is rung

    def is_there(self, rung: Rung, rows: Mapping[str, Instance], is_leaving: Callable[[str], bool]) -> bool:
        """Return whether a copy is as near as `rung`; a replica counts only where one was asked for."""
        enough = _AT_LEAST[rung] if self.asked else (InstanceState.SWAPPED_OUT,)
        for row in rows.values():
            if row.state in enough and not is_leaving(row.instance_id):
                return True
            if row.serves and row.instance_id not in self.put_away and not is_leaving(row.instance_id):
                return True
        return False

    def is_coming(self, rows: Mapping[str, Instance], is_leaving: Callable[[str], bool]) -> bool:
        """Return whether an instance to put away starts or drains, or any engine falls asleep or is to."""
        return any(
            i in self.put_away or row.state is InstanceState.DRAINING or (is_leaving(i) and not row.state.is_dormant)
            for i, row in rows.items()
        )

    def saw(self, row: Instance, is_replaced: bool, now_s: float, backoff_s: float, max_backoff_s: float) -> bool:
        """Return whether the copy was lost, so that the next one waits. `is_replaced`: another instance serves or
        starts."""
        known = row.instance_id in self.put_away or row.instance_id in self.asleep_since
        if row.state.is_dormant:
            rung = self.put_away.pop(row.instance_id, None)
            self.asked = None if rung is not None and rung is self.asked else self.asked
            if row.state is InstanceState.SWAPPED_OUT:
                self.asleep_since.setdefault(row.instance_id, now_s)
        if not (row.state.is_gone and known):
            return False
        self.put_away.pop(row.instance_id, None)
        since = self.asleep_since.pop(row.instance_id, None)
        if is_replaced:
            self.num_lost = 0
            return False
        if since is not None and now_s - since >= max_backoff_s:
            self.num_lost = 0
        self.num_lost, self.last_lost, self.asked = self.num_lost + 1, row.instance_id, None
        self.not_before = now_s + backoff.backoff_s(self.num_lost, backoff_s, max_backoff_s)
        return True


def why_unable(model: Model, rung: Rung, nodes: Mapping[str, Node], node_id: str = "") -> str:
    """Return why no node can hold a copy on the rung; "" where one can, or none with the engine is known."""
    if rung not in _ABILITIES:
        return ""
    ability, verb = _ABILITIES[rung]
    having = [n for n in nodes.values() if model.engine in n.engines and node_id in ("", n.node_id)]
    if not having or any(node.can(model.engine, ability) for node in having):
        return ""
    kinds = sorted({gpu.kind for node in having for gpu in node.gpus})
    where = ", ".join(sorted(node.node_id for node in having)[:3])
    return f"{model.engine} cannot {verb} on {' or '.join(kinds) or 'no GPU'} ({where}), and no other node has it"


def check_able(model: Model, rung: Rung, nodes: Mapping[str, Node], param: str, node_id: str = "") -> None:
    """Raise EngineMisconfigured where no node can hold a copy on the rung."""
    if why := why_unable(model, rung, nodes, node_id):
        raise EngineMisconfigured(f"{param}: {why}", param=param)
