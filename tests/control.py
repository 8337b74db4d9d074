"""A control plane of one controller that records: its stimuli come under a clock, its effects are kept and shown."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, fields, is_dataclass
from enum import Enum
from typing import Any, TypeVar

from glowplug.controllers.agent.messages import Remember
from glowplug.controllers.agent.transaction import InvalidTransition
from glowplug.controllers.effects import Effect, Publish, Record, Remove, Save, Tick
from glowplug.domain.errors import GlowplugError
from glowplug.domain.hardware import Gpu
from glowplug.domain.model import Model
from glowplug.events.envelope import Event

T = TypeVar("T")
ROWS = {"instance": "instances", "node": "nodes", "model": "models"}  # field of a fact -> table of its row
MOMENTS = frozenset({"changed_at", "heartbeat_at", "made_at", "revision"})  # hidden where they are the present


class Effects(list[Any]):
    """The effects of one stimulus, in order."""

    def of(self, kind: type[T]) -> list[T]:
        """Return the effects, published payloads and saved rows of this class."""
        found = []
        for effect in self:
            inner = {Publish: "payload", Save: "value", Record: "decision"}.get(type(effect), "")
            found += [one for one in (effect, getattr(effect, inner, None)) if isinstance(one, kind)]
        return found

    def one(self, kind: type[T]) -> T:
        (only,) = self.of(kind)
        return only

    @property
    def names(self) -> list[str]:
        return [effect.payload.TYPE if isinstance(effect, Publish) else type(effect).__name__ for effect in self]


class Recorded:
    """One controller with its clock. `lines`: its effects, `store`: the tables as the controller and a test wrote them.
    A refusal is recorded, and raised unless the recorder `keeps` it as a line alone."""

    def __init__(self, controller: Any, now_s: float = 0.0, *, keeps: bool = False) -> None:
        self.controller, self.now_s, self.keeps = controller, now_s, keeps
        self.lines: list[str] = []
        self.store: dict[str, dict[str, Any]] = {}
        self.given: list[Any] = []  # payloads, shown by their ids
        self.events: dict[str, Event] = {}
        self.last: dict[type, Any] = {}  # the last effect of each class
        self._published: list[Any] = []  # rows that the present effects publish
        self._shown: dict[tuple[str, str], Any] = {}  # rows as last shown: later ones are shown as their changes

    def event(self, payload: Any, *, issuer: str = "", epoch: int = 0, traceparent: str = "") -> Effects:
        first = next(_ids(payload), "")
        name = f"{payload.TYPE}/{first}" if first else payload.TYPE
        name += "" if name not in self.events else f"#{sum(known.split('#')[0] == name for known in self.events) + 1}"
        event = self.events[name] = Event(
            event_id=name, type=payload.TYPE, occurred_at=self.now_s, issuer=issuer or "router-1", data=payload,
            epoch=epoch, traceparent=traceparent,
        )  # fmt: skip
        self.given.append(payload)
        return self.give(event)

    def give(self, stimulus: Any, after_s: float = 0.0) -> Effects:
        self.now_s += after_s
        try:
            return self.took(self.controller.handle(stimulus, self.now_s))
        except (GlowplugError, InvalidTransition) as error:
            self.say(f"refused: {type(error).__name__}: {error}")
            if not self.keeps:
                raise
            return Effects()

    def tick(self, after_s: float = 0.0) -> Effects:
        return self.give(Tick(), after_s)

    def restore(self, table: str, rows: Mapping[str, Any] | None = None) -> Effects:
        """Let the controller read a table: these rows, or the store's."""
        read = self.store.get(table, {}) if rows is None else rows
        return self.took(self.controller.restore(table, dict(read), self.now_s))

    def replaced_by(self, controller: Any) -> None:
        """Go on with another process, which has nothing of this one but its store."""
        self.controller = controller

    def took(self, effects: list[Effect]) -> Effects:
        published = (effect.payload for effect in effects if isinstance(effect, Publish))
        self._published = [row for payload in published for _, row in _rows(payload)]
        saved = [effect.value for effect in effects if isinstance(effect, Save)]
        for effect in effects:
            self.last[type(effect)] = effect
            if isinstance(effect, Save):
                self.store.setdefault(effect.table, {})[effect.key] = effect.value
                if effect.value in self._published:
                    continue
            elif isinstance(effect, Remove):
                self.store.get(effect.table, {}).pop(effect.key, None)
            for line in self.shown(effect, saved):
                self.say(line)
        if (validate := getattr(self.controller, "validate", None)) is not None:
            validate()
        return Effects(effects)

    def say(self, line: str) -> None:
        self.lines.append(f"{self.now_s:7.2f}  {line}")

    def shown(self, effect: Effect, saved: Sequence[Any] = ()) -> Iterator[str]:
        """Return the lines of an effect. A fact of a row that is `saved` with it says so."""
        match effect:
            case Publish(payload, cause):
                rows = list(_rows(payload))
                words = [f"{payload.TYPE} {' '.join(self._changes(*row) for row in rows)}".rstrip()]
                words += [more] if (more := self.words(payload, without=ROWS if rows else (), lists=False)) else []
                words += [f"(<- {cause.event_id})"] if cause is not None else []
                words += ["(saved)"] if any(row in saved for _, row in rows) else []
                yield " ".join(words)
                yield from (f"    {name}: {self.words(one)}" for name, many in _lists(payload) for one in many)
            case Save(table, _, value):
                yield f"save {table} {self._changes(table, value)}"
            case Remove(table, key):
                yield f"remove {table} {key}"
            case Record(decision):
                yield f"decide {self.words(decision, lists=False)}"
                yield from (f"    {self.words(rival)}" for rival in decision.rivals)
            case Remember():
                yield "Remember"
            case _:
                yield f"{type(effect).__name__} {self.words(effect)}".rstrip()

    def words(self, value: Any, *, without: Collection[str] = (), lists: bool = True) -> str:
        """Show the fields of a dataclass that differ from their defaults; its leading ids without their names."""
        words, is_bare = [], True
        for field in fields(value):
            found = getattr(value, field.name)
            is_bare = is_bare and _default(field) is MISSING and (isinstance(found, str | Event) or self._known(found))
            is_hidden = field.name in without or (field.name in MOMENTS and found == self.now_s)
            if _rounded(found) == _default(field) or is_hidden or (_is_list(found) and not lists):
                continue
            words.append(self.text(found) if is_bare else f"{field.name}={self.text(found)}")
        return " ".join(words)

    def _known(self, value: Any) -> bool:
        """Return whether an id says all: an input shows it, or a fact of these effects."""
        return any(type(value) is type(one) and value == one for one in (*self.given, *self._published))

    def text(self, value: Any) -> str:
        if self._known(value):
            return next(_ids(value), type(value).__name__)
        match value:
            case bool():
                return str(value).lower()
            case Enum():
                return str(value.value)
            case float():
                return repr(_rounded(value)).removesuffix(".0")
            case str():
                return repr(value) if " " in value or not value else value
            case Event():
                return value.event_id
            case Model():
                return value.key
            case Gpu():
                return self._gpu(value)
            case GlowplugError():
                again = f" again in {round(value.retry_after_s, 3):g} s" if value.retry_after_s is not None else ""
                return f"({value.status} {value.code}: {str(value)!r}{again})"
            case Exception():
                return repr(f"{type(value).__name__}: {value}")
            case Mapping():
                return "{" + ", ".join(f"{self.text(k)}: {self.text(v)}" for k, v in sorted(value.items())) + "}"
            case set() | frozenset():
                return "[" + ", ".join(sorted(map(self.text, value))) + "]"
            case list() | tuple():
                return "[" + ", ".join(map(self.text, value)) + "]"
            case _ if is_dataclass(value):
                return f"({self.words(value)})"
            case _:
                return str(value)

    def _gpu(self, gpu: Gpu) -> str:
        held = [f"{g.holder}.{g.owner.value}={g.num_bytes}" for g in gpu.all_grants]
        held += [f"{'+'.join(one.holders)}.shared={one.num_bytes}" for one in gpu.shared]
        return f"{gpu.gpu_id}({' '.join([f'{gpu.used_bytes}/{gpu.total_bytes}', gpu.role.value, *held])})"

    def _changes(self, table: str, row: Any) -> str:
        """Show a row's fields that have changed since it was shown last."""
        key = next(_ids(row))
        before, self._shown[table, key] = self._shown.get((table, key)), row
        words = [key]
        for field in fields(row):
            found = getattr(row, field.name)
            known = _default(field) if before is None else getattr(before, field.name)
            is_moment = field.name in MOMENTS and found in (self.now_s, int(self.now_s * 1000))
            if found not in (known, key) and not is_moment:
                words.append(f"{field.name}={self.text(found)}")
        return " ".join(words)


def _rows(payload: Any) -> Iterator[tuple[str, Any]]:
    """Return the rows that a fact tells, with their tables."""
    found = ((table, getattr(payload, name, None)) for name, table in ROWS.items())
    yield from ((table, row) for table, row in found if is_dataclass(row))


def _ids(value: Any) -> Iterator[str]:
    inner = (getattr(value, name, None) for name in (*ROWS, "command"))
    for one in (value, *filter(is_dataclass, inner)):
        for name in ("instance_id", "digest", "model_key", "node_id", "key", "router_id"):
            if isinstance(found := getattr(one, name, ""), str) and found:
                yield found


def _default(field: "Field[Any]") -> Any:
    return field.default_factory() if field.default_factory is not MISSING else field.default


def _rounded(value: Any) -> Any:
    """Round a float, so that a trace does not depend on the machine."""
    return round(value, 3) + 0.0 if isinstance(value, float) else value


def _is_list(value: Any) -> bool:
    return isinstance(value, list | tuple) and len(value) > 0 and is_dataclass(value[0])


def _lists(value: Any) -> Iterator[tuple[str, Any]]:
    found = ((field.name, getattr(value, field.name)) for field in fields(value))
    yield from ((name, many) for name, many in found if _is_list(many))
