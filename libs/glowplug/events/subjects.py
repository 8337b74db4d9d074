"""Bus subjects, built and parsed only here. Fixed depth, so one wildcard shape fits all.

glowplug.v1.evt.<entity>.<fact>.<model_key|_>.<id>     facts (JetStream)
glowplug.v1.use.<entity>.<fact>.<model_key|_>.<id>     facts that have a stream of their own, which is kept longer
glowplug.v1.tel.<entity>.<fact>.<model_key|_>.<id>     telemetry (core)
glowplug.v1.cmd.<service>.<verb>.<target>              commands (JetStream)
"""

import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any

from glowplug.events.envelope import COMMANDS, PAYLOADS

ROOT = "glowplug.v1"
FACTS_STREAM, COMMANDS_STREAM, USAGE_STREAM = "GLOWPLUG_FACTS", "GLOWPLUG_COMMANDS", "GLOWPLUG_USAGE"
FACTS, USAGE, TELEMETRY, COMMANDS_ALL = f"{ROOT}.evt.>", f"{ROOT}.use.>", f"{ROOT}.tel.>", f"{ROOT}.cmd.>"
EVERYTHING = {"evt": (FACTS, USAGE), "tel": (TELEMETRY,), "cmd": (COMMANDS_ALL,)}  # by plane
MAX_TOKEN_CHARS = 256
_NONE = "_"
_PLAIN = re.compile(r"[A-Za-z0-9_:+=@-]+")


def _token(text: str) -> str:
    """`text` as one NATS token: dots, slashes, wildcards and unprintable characters become dashes. A long one ends in
    its digest: servers end connections with too long a subject."""
    if len(text) > MAX_TOKEN_CHARS:
        text = f"{text[: MAX_TOKEN_CHARS - 33]}-{hashlib.sha256(text.encode(errors='replace')).hexdigest()[:32]}"
    if _PLAIN.fullmatch(text):
        return text
    return "".join("-" if c in ".*>/ " or not c.isprintable() else c for c in text) or _NONE


@cache
def is_telemetry(event_type: str) -> bool:
    """Return whether events of this type use core subjects."""
    return bool(getattr(PAYLOADS[event_type], "TELEMETRY", False))


@cache
def is_usage(event_type: str) -> bool:
    """Return whether facts of this type go to the stream of usage."""
    return bool(getattr(PAYLOADS[event_type], "USAGE", False))


def stream_of(filter_: str) -> str:
    """The stream of JetStream that holds the events of a filter or subject; "" for telemetry."""
    plane = filter_.removeprefix(f"{ROOT}.")[:4]
    return {"evt.": FACTS_STREAM, "use.": USAGE_STREAM, "cmd.": COMMANDS_STREAM}.get(plane, "")


def is_command_filter(filter_: str) -> bool:
    """Return whether a filter (or subject) is of the command plane."""
    return filter_.startswith(f"{ROOT}.cmd.")


def is_kept(name: str) -> bool:
    """Return whether JetStream keeps messages on this subject."""
    return not name.startswith(f"{ROOT}.tel.")


def subject(payload: Any) -> str:
    """The subject on which a payload is published."""
    kind: str = payload.TYPE
    if kind in COMMANDS:
        return f"{ROOT}.cmd.{kind}.{_token(payload.target)}"
    model_key, entity_id = _address(payload)
    return f"{ROOT}.{_first(kind)}.{kind}.{_token(model_key)}.{_token(entity_id)}"


def _first(kind: str) -> str:
    """The beginning of the subjects of this type of fact or telemetry, after ROOT."""
    return "tel" if is_telemetry(kind) else "use" if is_usage(kind) else "evt"


def _address(payload: Any) -> tuple[str, str]:
    """(model_key, id) of a fact, from the fields that name them."""
    for holder in ("instance", "model", "node", "decision", "api_key"):
        inner = getattr(payload, holder, None)
        if inner is not None:
            payload = inner
            break
    model_key = getattr(payload, "model_key", "") or getattr(payload, "key", "")
    for field in (
        "request_id",
        "instance_id",
        "decision_id",
        "digest",
        "node_id",
        "router_id",
        "service_id",
        "key",
        "key_id",
        "tenant_name",
    ):
        value = getattr(payload, field, "")
        if value:
            return model_key, value
    return model_key, model_key


def check(stream: str, service_id: str) -> str:
    """The subject of a message that only tests whether `stream` stores messages."""
    if stream == COMMANDS_STREAM:
        return f"{ROOT}.cmd.bus.check.{_token(service_id)}"
    return f"{ROOT}.evt.bus.check.{_NONE}.{_token(service_id)}"


def checks(stream: str) -> str:
    """The pattern of every subject on which a client tests whether `stream` stores messages."""
    return f"{ROOT}.cmd.bus.check.*" if stream == COMMANDS_STREAM else f"{ROOT}.evt.bus.check.*.*"


def facts_of(event_type: str, model_key: str = "*") -> str:
    """The filter for one type of fact or telemetry: `facts_of("instance.ready")`."""
    return f"{ROOT}.{_first(event_type)}.{event_type}.{model_key}.*"


def among_facts(event_type: str) -> str:
    """The filter for one type of fact in the stream of all facts, where versions up to 0.2 published usage too."""
    return f"{ROOT}.evt.{event_type}.*.*"


def entity_facts(entity: str, *, telemetry: bool = False) -> str:
    """The filter for every fact of an entity: `entity_facts("instance")`."""
    return f"{ROOT}.{'tel' if telemetry else 'evt'}.{entity}.*.*.*"


def filters(payloads: Iterable[type[Any]]) -> list[str]:
    """The filters for these types of facts or telemetry, in their order; a single one for an entity all of whose types
    of that plane (if there are several) are among them."""
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
    """The pattern of every subject on which events of this type, commands too, are published."""
    return f"{ROOT}.cmd.{event_type}.*" if event_type in COMMANDS else facts_of(event_type)


def to_service(service: str) -> str:
    """The pattern of every subject with commands to this service, for all its processes."""
    return f"{ROOT}.cmd.{service}.>"


def is_subject_of(text: str, payload: Any) -> bool:
    """Return whether a payload of this type (a command: to this very target) belongs on this subject. Permissions to
    publish are given by subject, so an event on another subject is not trusted."""
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
    """A parsed subject. `model_key` and `entity_id` are "" where there are none. `plane`: evt, for usage too, tel or
    cmd."""

    plane: str
    entity: str
    verb: str
    model_key: str
    entity_id: str


def _given(token: str) -> str:
    return "" if token == _NONE else token


def parse(text: str) -> Parsed:
    """Parse a subject. Raises ValueError when `text` is not one of Glowplug's."""
    parts = text.split(".")
    if parts[:2] != ROOT.split("."):
        raise ValueError(f"not a glowplug subject: {text!r}")
    if len(parts) == 6 and parts[2] == "cmd":
        return Parsed("cmd", parts[3], parts[4], "", _given(parts[5]))
    if len(parts) == 7 and parts[2] in ("evt", "use", "tel"):
        return Parsed("evt" if parts[2] == "use" else parts[2], parts[3], parts[4], _given(parts[5]), _given(parts[6]))
    raise ValueError(f"not a glowplug subject: {text!r}")
