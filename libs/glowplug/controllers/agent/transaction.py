"""The handling of one stimulus: changed records, granted bytes, and effects."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol

from glowplug.controllers.agent.params import AgentParams, EngineKind
from glowplug.controllers.agent.record import RULES, Holding, State
from glowplug.controllers.effects import Effect, Publish, Remove, Save
from glowplug.domain.hardware import Gpu, GrantOwner
from glowplug.domain.instance import Instance, InstanceState
from glowplug.domain.model import Model
from glowplug.events import Event, facts

INSTANCES = "instances"
_FACTS = {
    InstanceState.STARTING: facts.InstanceStarting,
    InstanceState.LOADING: facts.InstanceLoading,
    InstanceState.READY: facts.InstanceReady,
    InstanceState.DRAINING: facts.InstanceDraining,
    InstanceState.STOPPED: facts.InstanceStopped,
    InstanceState.PREWARMED: facts.InstancePrewarmed,
    InstanceState.SWAPPED_OUT: facts.InstanceSwappedOut,
}
_RANKS = {Publish: 1, Save: 2, Remove: 2}
Action = Callable[["Transaction", Any, Any], None]


class InvalidTransition(RuntimeError):
    def __init__(self, instance_id: str, state: State | None, stimulus: type) -> None:
        super().__init__(f"{instance_id} is {state or 'not known'}, and {stimulus.__name__} makes no sense there")
        self.instance_id, self.state, self.stimulus = instance_id, state, stimulus


@dataclass(frozen=True, slots=True)
class Transition:
    """A row of the table: `does` leaves the record in one of `to`, and asks for no engine effects outside `asks`."""

    does: Action
    to: frozenset[State | None]
    asks: frozenset[type] = frozenset()


@dataclass(frozen=True, slots=True)
class Ignored:
    """A row of the table that changes nothing; `why`: how the stimulus may still arrive."""

    why: str


Table = Mapping[tuple[State | None, type], Transition | Ignored]


class Step(NamedTuple):
    instance_id: str
    before: Holding | None
    stimulus: type
    after: Holding | None
    asked: tuple[type, ...]


class Ledger(Protocol):
    """GPU bytes of the node (memory/ledger.py)."""

    @property
    def gpus(self) -> tuple[Gpu, ...]: ...

    @property
    def holders(self) -> frozenset[str]: ...

    def release(self, holder: str) -> int: ...

    def exchange(
        self,
        releases: Iterable[str],
        holder: str,
        bytes_by_gpu: Mapping[str, Mapping[GrantOwner, int]],
        shared: tuple[str, int] | None = None,
    ) -> None:
        """Free and grant in one step or, raising OutOfMemory, not at all. `shared`: (key, bytes) of weights in common
        pages."""
        ...

    def shrink(self, gpu_id: str, holder: str, owner: GrantOwner, num_bytes: int) -> int:
        """Reduce a grant to `num_bytes`; return the bytes freed."""
        ...


def fact_of(instance: Instance, code: str = "") -> Any:
    if instance.state is InstanceState.FAILED:
        return facts.InstanceFailed(instance=instance, code=code or "engine_failed")
    return _FACTS[instance.state](instance=instance)


@dataclass(slots=True, kw_only=True)
class Transaction:
    """One stimulus at `now_s`. `holdings`, `overtaken`, `shared_seen` and the ledger are the controller's."""

    now_s: float
    node_id: str
    ledger: Ledger
    engines: Mapping[str, EngineKind]
    params: AgentParams
    table: Table
    holdings: dict[str, Holding]
    overtaken: dict[str, tuple[float, str]]  # early stops: id -> when, why
    shared_seen: dict[str, int]  # share_key -> bytes of weights
    node_stops: str = ""
    event: Event | None = None
    effects: list[Effect] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    is_dirty: bool = False  # to be remembered over a restart
    _asked: list[type] = field(default_factory=list)

    def step(self, instance_id: str, stimulus: Any) -> None:
        """Apply a stimulus to one record. Raises InvalidTransition, with nothing changed."""
        holding, kind = self.holdings.get(instance_id), type(stimulus)
        state = holding.state if holding is not None else None
        row = self.table.get((state, kind))
        if row is None:
            raise InvalidTransition(instance_id, state, kind)
        if isinstance(row, Transition):
            outer, self._asked = self._asked, []
            row.does(self, holding, stimulus)
            asked, self._asked = tuple(self._asked), outer
            self.steps.append(Step(instance_id, holding, kind, self.holdings.get(instance_id), asked))

    def ask(self, *effects: Effect) -> None:
        self.effects.extend(effects)
        self._asked.extend(map(type, effects))

    def keep(self, holding: Holding) -> Holding:
        """Replace a record and remember it over a restart."""
        self.is_dirty = True
        return self.note(holding)

    def note(self, holding: Holding) -> Holding:
        """Replace a record without remembering the change."""
        self.holdings[holding.instance.instance_id] = holding
        return holding

    def publish(self, holding: Holding, code: str = "", **changes: Any) -> Holding:
        """Change an instance, raise its revision, and publish and save it with its record's public state."""
        was = holding.instance
        if was.consolidating and holding.consolidation is None:
            changes["consolidating"] = False
        changes |= {"state": RULES[holding.state].public, "changed_at": self.now_s, "revision": was.revision + 1}
        instance = replace(was, **changes)
        cause = None if self.event is not None else holding.cause  # None: the shell takes the present event
        self.effects += (Publish(fact_of(instance, code), cause), Save(INSTANCES, instance.instance_id, instance))
        return self.keep(replace(holding, instance=instance))

    def in_order(self) -> list[Effect]:
        """Return the effects, those without bus or store first, so that a slow one delays no engine."""
        return sorted(self.effects, key=lambda effect: _RANKS.get(type(effect), 0))

    def grant(self, holding: Holding, releases: Iterable[str] = ()) -> Holding:
        """Grant a record's bytes and release those of `releases` in one step.

        Raises OutOfMemory, with nothing changed.
        """
        shares = holding.shares or holding.shares_on(self.node_id)
        self.ledger.exchange(releases, holding.instance.instance_id, shares, holding.shared)
        return replace(holding, shares=shares)

    def ungrant(self, holding: Holding) -> Holding:
        self.ledger.release(holding.instance.instance_id)
        return replace(holding, shares={})

    def refuses(self, engine: str) -> bool:
        """Return whether engines refuse requests while they sleep or fall asleep."""
        kind = self.engines.get(engine)
        return kind is not None and kind.refuses

    def can(self, model: Model, ability: str) -> bool:
        """Return whether the model has the ability here, on its number of GPUs."""
        kind = self.engines.get(model.engine)
        if kind is None or kind.unavailable or ability not in kind.abilities:
            return False
        return model.num_gpus == 1 or ability not in kind.groups_lack
