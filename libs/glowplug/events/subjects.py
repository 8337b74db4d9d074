"""The only place that builds or parses a bus subject. Fixed depth, so one wildcard shape fits all.

glowplug.v1.evt.<entity>.<fact>.<model_key|_>.<id>     facts (JetStream)
glowplug.v1.tel.<entity>.<fact>.<model_key|_>.<id>     telemetry (core)
glowplug.v1.cmd.<service>.<verb>.<target>              commands (JetStream)
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any

from glowplug.events.envelope import COMMANDS, PAYLOADS

ROOT = "glowplug.v1"
FACTS_STREAM, COMMANDS_STREAM = "GLOWPLUG_FACTS", "GLOWPLUG_COMMANDS"
FACTS, TELEMETRY, COMMANDS_ALL = f"{ROOT}.evt.>", f"{ROOT}.tel.>", f"{ROOT}.cmd.>"
_NONE = "_"
_PLAIN = re.compile(r"[A-Za-z0-9_:+=@-]+")


def _token(text: str) -> str:
    """`text` as one NATS token: dots, slashes, wildcards and what cannot be printed become dashes."""
    if _PLAIN.fullmatch(text):
        return text
    return "".join("-" if c in ".*>/ " or not c.isprintable() else c for c in text) or _NONE


@cache
def is_telemetry(event_type: str) -> bool:
    """Whether events of this type ride core subjects."""
    return bool(getattr(PAYLOADS[event_type], "TELEMETRY", False))


def is_command_filter(filter_: str) -> bool:
    """Whether a filter (or subject) is of the command plane."""
    return filter_.startswith(f"{ROOT}.cmd.")


def is_kept(name: str) -> bool:
    """Whether JetStream keeps what is published on this subject."""
    return not name.startswith(f"{ROOT}.tel.")


def subject(payload: Any) -> str:
    """The subject one payload is published on."""
    kind: str = payload.TYPE
    if kind in COMMANDS:
        return f"{ROOT}.cmd.{kind}.{_token(payload.target)}"
    plane = "tel" if is_telemetry(kind) else "evt"
    model_key, entity_id = _address(payload)
    return f"{ROOT}.{plane}.{kind}.{_token(model_key)}.{_token(entity_id)}"


def _address(payload: Any) -> tuple[str, str]:
    """(model_key, id) of a fact, from whichever of its fields name them."""
    for holder in ("instance", "model", "node", "decision"):
        inner = getattr(payload, holder, None)
        if inner is not None:
            payload = inner
            break
    model_key = getattr(payload, "model_key", "") or getattr(payload, "key", "")
    for field in ("request_id", "instance_id", "decision_id", "digest", "node_id", "router_id", "service_id", "key"):
        value = getattr(payload, field, "")
        if value:
            return model_key, value
    return model_key, model_key


def check(stream: str, service_id: str) -> str:
    """The subject of a message that only asks whether `stream` stores what it is sent."""
    if stream == COMMANDS_STREAM:
        return f"{ROOT}.cmd.bus.check.{_token(service_id)}"
    return f"{ROOT}.evt.bus.check.{_NONE}.{_token(service_id)}"


def checks(stream: str) -> str:
    """The pattern of every subject on which a client asks whether `stream` stores."""
    return f"{ROOT}.cmd.bus.check.*" if stream == COMMANDS_STREAM else f"{ROOT}.evt.bus.check.*.*"


def facts_of(event_type: str, model_key: str = "*") -> str:
    """The filter for one type of fact or telemetry: `facts_of("instance.ready")`."""
    plane = "tel" if is_telemetry(event_type) else "evt"
    return f"{ROOT}.{plane}.{event_type}.{model_key}.*"


def entity_facts(entity: str, *, telemetry: bool = False) -> str:
    """The filter for every fact of an entity: `entity_facts("instance")`."""
    return f"{ROOT}.{'tel' if telemetry else 'evt'}.{entity}.*.*.*"


def filters(payloads: Iterable[type[Any]]) -> list[str]:
    """The filters for these kinds of facts or telemetry, in their order: one for an entity whose kinds (of that plane,
    where there are several) are all among them."""
    kinds = [cls.TYPE for cls in payloads]
    found: dict[str, None] = {}
    for kind in kinds:
        entity, plane = kind.partition(".")[0], is_telemetry(kind)
        others = [k for k in PAYLOADS.keys() - COMMANDS if k.partition(".")[0] == entity and is_telemetry(k) == plane]
        is_whole = len(others) > 1 and set(others) <= set(kinds)
        found[entity_facts(entity, telemetry=plane) if is_whole else facts_of(kind)] = None
    return list(found)


def commands_to(service: str, target: str = "any") -> str:
    """The filter for every command to one reader."""
    return f"{ROOT}.cmd.{service}.*.{_token(target)}"


def of_event(event_type: str) -> str:
    """The pattern of every subject that events of this type, commands too, are published on."""
    return f"{ROOT}.cmd.{event_type}.*" if event_type in COMMANDS else facts_of(event_type)


def to_service(service: str) -> str:
    """The pattern of every subject with commands to this service, of all its processes."""
    return f"{ROOT}.cmd.{service}.>"


def is_subject_of(text: str, payload: Any) -> bool:
    """Whether a payload of this kind (a command: to this very target) belongs on this subject. Who may publish what is
    decided by subjects, so an event that came on another one is not believed."""
    try:
        come = parse(text)
    except ValueError:
        return False
    if payload.TYPE in COMMANDS:
        return text == subject(payload)
    plane = "tel" if is_telemetry(payload.TYPE) else "evt"
    return come.plane == plane and f"{come.entity}.{come.verb}" == payload.TYPE


@dataclass(frozen=True, slots=True)
class Parsed:
    """A subject taken apart. `model_key` and `entity_id` are "" where there are none."""

    plane: str
    entity: str
    verb: str
    model_key: str
    entity_id: str


def _given(token: str) -> str:
    return "" if token == _NONE else token


def parse(text: str) -> Parsed:
    """Raises ValueError when `text` is no subject of ours."""
    parts = text.split(".")
    if parts[:2] != ROOT.split("."):
        raise ValueError(f"not a glowplug subject: {text!r}")
    if len(parts) == 6 and parts[2] == "cmd":
        return Parsed("cmd", parts[3], parts[4], "", _given(parts[5]))
    if len(parts) == 7 and parts[2] in ("evt", "tel"):
        return Parsed(parts[2], parts[3], parts[4], _given(parts[5]), _given(parts[6]))
    raise ValueError(f"not a glowplug subject: {text!r}")
