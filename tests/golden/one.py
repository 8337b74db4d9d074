"""Runs golden scripts of one controller (see form.py): terse stimuli, and every effect that follows.
Each folder of scripts is a controller's; the module of its name here has its class `Script`.

    python -m tests.golden.one      rewrites the traces; read the diff before the commit

The first block declares; values of fields are words without spaces, or in quotes ('...'); several have commas between:
    params FIELD=VALUE ...                    of the controller
    model NAME FIELD=VALUE ...                of Model; in the store too
Commands of the blocks after it (times in seconds):
    model NAME FIELD=VALUE ...                it changes without a fact
    after SECONDS                             time passes without a tick
    tick [SECONDS [COUNT]]                    time passes, and a tick follows; COUNT times
    TYPE [VALUE ...] [FIELD=VALUE ...]        an event: required fields in order, others by name;
                                              @epoch=N and @issuer=ID are of its envelope
    again TYPE/ID                             an event comes once more
    instance.STATE ID [MODEL] [FIELD=VALUE]   an instance's row changes, with a fact
    row ID MODEL STATE [FIELD=VALUE ...]      it changes without one; row TABLE KEY FIELD=VALUE ... edits any table
    leader SERVICE EPOCH                      the row of a leader
    lose TABLE [KEY ...]                      rows leave the store; all of them
    table NAME                                the controller reads a table of the store
    MESSAGE [VALUE ...] [FIELD=VALUE ...]     one of the controller's own (messages.py)
    restart                                   the process is killed and comes back
    fresh [DECLARATION; ...]                  all begins anew, with these declarations beside the first
An effect is a line. A row is shown by its changes since it was shown last.
"""

import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from importlib import import_module
from types import UnionType
from typing import Annotated, Any, ClassVar, Union, get_args, get_origin, get_type_hints

import msgspec

from glowplug.controllers.port import Controller
from glowplug.domain.instance import Instance, InstanceState, Worker
from glowplug.domain.lease import Leader
from glowplug.domain.model import Model, WeightsRef
from glowplug.events.envelope import COMMANDS, PAYLOADS
from glowplug.events.facts import InstanceFailed
from tests.control import Recorded
from tests.golden.form import SCRIPTS, rewrite

NODE = "node-1"
ISSUERS = {"agent.start": "placer-1", "agent.join": "placer-1", "agent": "autoscaler-1", "prefetcher": "placer-1",
           "placer": "autoscaler-1", "instance": "agent-1", "node": "agent-1", "weights": "prefetcher-1"}  # fmt: skip
INSTANCE_FACTS = {f"instance.{state.value}": state for state in InstanceState}


class Script:
    """A controller and its recorder. A subclass makes it, and adds words: `declare_VERB`, `do_VERB`, `GIVEN`."""

    begin_s: ClassVar[float] = 0.0
    stimuli: ClassVar[Sequence[Any]] = ()  # modules of stimuli
    GIVEN: ClassVar[Mapping[str, Mapping[str, Any]]] = {}  # class -> fields that scripts leave out

    def __init__(self, declarations: Iterable[str]) -> None:
        self._first = tuple(declarations)
        self.params: list[str] = []
        self.models: dict[str, Model] = {}
        for line in self._first:
            verb, *words = _split(line)
            getattr(self, f"declare_{verb}")(*words)
        self.plane = Recorded(self.make(), self.begin_s, keeps=True)
        self.plane.store["models"] = dict(self.models)
        self.begin()

    def make(self) -> Controller:
        raise NotImplementedError

    def begin(self) -> None:
        """Bring the controller to where scripts start."""

    def run(self, command: str) -> list[str]:
        verb, *words = _split(command)
        self.plane.lines = []
        if verb == "fresh":
            self.fresh(command.removeprefix("fresh").strip())
        elif verb in INSTANCE_FACTS:
            self.instance(verb, *words)
        elif verb in PAYLOADS:
            self.event(verb, *words)
        elif (do := getattr(self, f"do_{verb}", None)) is not None:
            do(*words)
        else:
            self.plane.give(self.built(next(getattr(m, verb) for m in self.stimuli if hasattr(m, verb)), words))
        return self.plane.lines

    def declare_params(self, *words: str) -> None:
        self.params += words

    def declare_model(self, name: str, *words: str) -> None:
        given = {
            "name": name, "key": name, "engine": "emulated", "weights": WeightsRef(uri=f"file:/w/{name}"),
            "weights_bytes": 0, "kv_bytes": 0, "revision": 1,
        }  # fmt: skip
        self.models[name] = self.built(Model, words, self.models.get(name, given))

    def fresh(self, declarations: str) -> None:
        first = self._first
        type(self).__init__(self, [*first, *(declarations.split("; ") if declarations else [])])
        self._first = first

    def do_model(self, name: str, *words: str) -> None:
        self.declare_model(name, *words)
        self.plane.store["models"][name] = self.models[name]

    def do_after(self, seconds: str) -> None:
        self.plane.now_s += float(seconds)

    def do_tick(self, seconds: str = "0", count: str = "1") -> None:
        for _ in range(int(count)):
            self.plane.tick(float(seconds))

    def do_again(self, name: str) -> None:
        self.plane.give(self.plane.events[name])

    def do_row(self, *words: str) -> None:
        if words[0] in self.plane.store and words[0] not in self.plane.store.get("instances", {}):
            table, key, *rest = words
            rows = self.plane.store[table]
            rows[key] = self.built(type(rows[key]), rest, rows[key])
        else:
            instance_id, model, state, *rest = words
            self.put(instance_id, InstanceState(state), [model, *rest])

    def do_leader(self, service: str, epoch: str) -> None:
        leader = Leader(service=service, service_id=f"{service}-2", url="", epoch=int(epoch), since=0.0)
        self.plane.store.setdefault("leaders", {})[service] = leader

    def do_lose(self, table: str, *keys: str) -> None:
        rows = self.plane.store[table]
        for key in keys or list(rows):
            del rows[key]

    def do_table(self, name: str) -> None:
        self.plane.restore(name)

    def event(self, kind: str, *words: str) -> None:
        envelope = dict(word[1:].split("=") for word in words if word.startswith("@"))
        payload = self.built(PAYLOADS[kind], [word for word in words if not word.startswith("@")])
        is_command = kind in COMMANDS
        issuer = ISSUERS.get(kind) or ISSUERS.get(kind.partition(".")[0]) or "router-1"
        self.plane.event(
            payload,
            issuer=envelope.get("issuer", issuer),
            epoch=int(envelope.get("epoch", "1" if is_command else "0")),
            traceparent="trace" if is_command else "",
        )

    def instance(self, kind: str, instance_id: str, *words: str) -> None:
        row = self.put(instance_id, INSTANCE_FACTS[kind], words)
        more = {"code": row.reason or "engine_failed"} if PAYLOADS[kind] is InstanceFailed else {}
        self.plane.event(PAYLOADS[kind](instance=row, **more), issuer="agent-1")

    def put(self, instance_id: str, state: InstanceState, words: Sequence[str]) -> Instance:
        rows = self.plane.store.setdefault("instances", {})
        before = rows.get(instance_id)
        given = before or {
            "instance_id": instance_id, "engine": "emulated", "workers": self.workers(instance_id, "0"),
        }  # fmt: skip
        given = _fields(given) | {"state": state, "revision": (before.revision if before else 0) + 1}
        given["changed_at"] = self.plane.now_s
        if words and "=" not in words[0]:
            given["model_key"], words = words[0], words[1:]
        row: Instance = self.built(Instance, words, given)
        rows[instance_id] = row
        return row

    def workers(self, instance_id: str, places: str) -> tuple[Worker, ...]:
        """Of `GPU[:BYTES],...`; GPU is a number, of this node, or a whole id."""
        made = []
        for rank, place in enumerate(places.split(",")):
            gpu, _, num_bytes = place.partition(":")
            gpu_id = gpu if "/" in gpu else f"{NODE}/{gpu}"
            made.append(
                Worker(
                    worker_id=f"{instance_id}-{rank}", node_id=gpu_id.partition("/")[0], gpu_id=gpu_id,
                    num_bytes=int(num_bytes or 0), rank=rank,
                )
            )  # fmt: skip
        return tuple(made)

    def built(self, cls: type[Any], words: Sequence[str], given: Any = None) -> Any:
        """Make a value of fields by order and by name; `given`: another, or other fields."""
        hints, values = _hints(cls), dict(self.GIVEN.get(cls.__name__, {}))
        named = [word for word in words if _name(word, hints)]
        values |= {} if given is None else _fields(given)
        bare = [word for word in words if word not in named]
        free = [name for name in _required(cls) if name not in values]
        free += [name for name in hints if name not in free and name not in values]
        assert len(bare) <= len(free), f"{cls.__name__} has no fields for {bare[len(free) :]}"
        pairs = [*zip(free, bare, strict=False), *(word.split("=", 1) for word in named)]
        inner: dict[str, list[str]] = {}
        for name, text in pairs:
            head, _, rest = name.partition(".")
            if rest:
                inner.setdefault(head, []).append(f"{rest}={text}")
            else:
                values[head] = self.value(hints[head], text, values)
        for name, rest in inner.items():
            values[name] = self.built(hints[name], rest, values.get(name, {}))
        return cls(**values)

    def value(self, hint: Any, text: str, beside: Mapping[str, Any]) -> Any:
        """Read one word as a type; `beside`: the fields read before it."""
        origin, args = get_origin(hint), get_args(hint)
        if origin is Annotated:
            return self.value(args[0], text, beside)
        if origin in (Union, UnionType):
            return self.value(next(one for one in args if one is not type(None)), text, beside)
        if hint is Model:
            return self.models[text]
        if hint is WeightsRef:
            return self.weights(text)
        if hint == tuple[Worker, ...]:
            return self.workers(beside.get("instance_id", ""), text)
        if hint is Instance:
            return self.plane.store["instances"][text]
        if text.startswith(("[", "{")):
            return msgspec.json.decode(text, type=hint, strict=False)
        if origin in (tuple, frozenset, list):
            return origin(self.value(args[0], one, beside) for one in text.split(",") if one)
        return msgspec.convert(text, hint, strict=False)

    def weights(self, name: str) -> WeightsRef:
        model = self.models.get(name)
        return model.weights if model is not None else WeightsRef(uri=f"file:/w/{name}")


def _split(line: str) -> list[str]:
    return [word.replace("'", "") for word in re.findall(r"(?:[^\s']|'[^']*')+", line)]


def _name(word: str, hints: Mapping[str, Any]) -> str:
    name, is_named, _ = word.partition("=")
    return name if is_named and name.partition(".")[0] in hints else ""


@cache
def _hints(cls: type[Any]) -> dict[str, Any]:
    hints = get_type_hints(cls, include_extras=True)
    return {field.name: hints[field.name] for field in fields(cls)}


def _required(cls: type[Any]) -> list[str]:
    return [f.name for f in fields(cls) if f.default is MISSING and f.default_factory is MISSING]


def _fields(value: Any) -> dict[str, Any]:
    return {f.name: getattr(value, f.name) for f in fields(value)} if is_dataclass(value) else dict(value)


def begin_of(controller: str) -> type[Script]:
    found: type[Script] = import_module(f"tests.golden.{controller}").Script
    return found


CONTROLLERS = tuple(sorted(path.name for path in SCRIPTS.iterdir() if path.is_dir()))

if __name__ == "__main__":
    for name in CONTROLLERS:
        for changed in rewrite(SCRIPTS / name, begin_of(name)):
            sys.stdout.write(f"{changed}\n")
