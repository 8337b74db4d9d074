"""Filters of events: the same for `glowplug tap` and for the console's live view, and the one-line form of an event.

Every function reads a payload as a decoded class or as plain JSON, so that a tap shows what a newer writer sends.
"""

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from types import SimpleNamespace
from typing import Any, Final

from glowplug.events.facts import RequestFinished, RouterRequestsFinished
from glowplug.events.subjects import parse, subject

PLANES: Final = ("evt", "cmd", "tel")
DEFAULT_PLANES: Final = ("evt", "cmd")
_SHORT = ("instance_id", "model_key", "node_id", "state", "reason", "status", "num_waiting", "num_bytes", "chosen")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sighting:
    """The properties that a filter compares, "" where an event has none. `entity` of a command is the service it goes
    to."""

    plane: str
    entity: str
    kind: str  # "instance.ready"
    issuer: str
    model_key: str
    node_id: str
    entity_id: str


def sight(subject: str, issuer: str, data: Any) -> Sighting:
    """The sighting of one event. Raises ValueError when `subject` is not one of Glowplug's."""
    where = parse(subject)
    return Sighting(
        plane=where.plane,
        entity=where.entity,
        kind=f"{where.entity}.{where.verb}",
        issuer=issuer,
        model_key=where.model_key or model_of(data),
        node_id=node_of(data) or (where.entity_id if where.entity in ("agent", "prefetcher") else ""),
        entity_id=where.entity_id,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class EventFilter:
    """Conditions on an event, all of which must hold. `types` are prefixes ("instance" finds "instance.ready")."""

    planes: tuple[str, ...] = DEFAULT_PLANES
    types: tuple[str, ...] = ()
    entity: str = ""
    model: str = ""  # model_key
    node: str = ""
    service: str = ""  # the writer: a service, or one process of it ("placer", "agent-node-1")
    entity_id: str = ""
    text: str = ""  # anywhere in the event as JSON; ASCII letters in either case

    def wants(self, seen: Sighting, raw: bytes) -> bool:
        """Return whether the filter shows an event; `raw` is the event as JSON."""
        return (
            seen.plane in self.planes
            and (not self.types or any(seen.kind.startswith(kind.rstrip("*")) for kind in self.types))
            and (not self.entity or seen.entity == self.entity)
            and (not self.model or seen.model_key == self.model)
            and (not self.node or seen.node_id == self.node)
            and (not self.service or seen.issuer == self.service or seen.issuer.startswith(f"{self.service}-"))
            and (not self.entity_id or seen.entity_id == self.entity_id or self.entity_id.encode() in raw)
            and (not self.text or self.text.encode().lower() in raw.lower())
        )

    def command(self) -> str:
        """The command line that shows the same events in a terminal."""
        words = ["glowplug", "tap"]
        if set(self.planes) != set(DEFAULT_PLANES):
            words += [word for plane in self.planes for word in ("--plane", plane)]
        words += [word for kind in self.types for word in ("--type", kind)]
        named = {
            "--entity": self.entity,
            "--model": self.model,
            "--node": self.node,
            "--service": self.service,
            "--id": self.entity_id,
            "--grep": self.text,
        }
        words += [word for option, value in named.items() if value for word in (option, value)]
        return shlex.join(words)


def model_of(data: Any) -> str:
    """The model key a payload is about, or ""."""
    inner = _subject_of(data)
    return str(_get(inner, "model_key") or _get(_get(data, "model"), "key") or "")


def node_of(data: Any) -> str:
    """The node a payload is about, or ""."""
    inner = _subject_of(data)
    workers = _get(inner, "workers")
    first = workers[0] if isinstance(workers, list | tuple) and workers else None
    return str(_get(inner, "node_id") or _get(_get(data, "node"), "node_id") or _get(first, "node_id") or "")


def summary(data: Any) -> str:
    """A payload in one short line: 'instance_id=… model_key=… state=…'."""
    inner = _subject_of(data) if _subject_of(data) is not data else (_get(data, "node") or data)
    words = [f"{name}={_plain(value)}" for name in _SHORT if (value := _get(inner, name)) not in (None, "", 0)]
    if not words and (model := _get(data, "model")):
        words = [f"model={_get(model, 'key')}"]
    return " ".join(words)


def ends(report: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (subject, event) of a `request.finished` for each end in a router's report, as JSON; nothing for another
    event."""
    data = report.get("data")
    if report.get("type") != RouterRequestsFinished.TYPE or not isinstance(data, Mapping):
        return
    requests, traceparents = _rows(data.get("requests")), _rows(data.get("traceparents"))
    for number, (request, traceparent) in enumerate(zip_longest(requests, traceparents[: len(requests)], fillvalue="")):
        if not isinstance(request, Mapping):
            continue
        own = {
            "event_id": f"{report.get('event_id')}-{number}",
            "type": RequestFinished.TYPE,
            "occurred_at": request.get("finished_at"),
            "data": request,
            "cause_id": request.get("request_id"),
            "traceparent": traceparent,
        }
        yield subject(SimpleNamespace(**{**request, "TYPE": RequestFinished.TYPE})), {**report, **own}


def _rows(value: Any) -> Sequence[Any]:
    return value if isinstance(value, list) else ()


def _subject_of(data: Any) -> Any:
    return _get(data, "instance") or _get(data, "decision") or data


def _get(holder: Any, name: str) -> Any:
    return holder.get(name) if isinstance(holder, Mapping) else getattr(holder, name, None)


def _plain(value: Any) -> Any:
    return getattr(value, "value", value)
