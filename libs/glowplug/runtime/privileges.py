"""Generate the access rules of bus and store from one declaration.

Each service is one user, of its own name and password, at NATS and Valkey; `reader` is for read-only commands
(`glowplug tap`, `record`, `doctor`, `backup`). privileges.toml declares the rights.
tests/unit/runtime/test_privileges.py compares it with the services' wiring in both directions,
tests/contract/test_privileges.py tries forbidden actions on real servers, and docs/adr/0016-least-privilege.md lists
the remaining gaps. Configurations of containers:

    python -m glowplug.runtime.privileges nats > deploy/k8s/base/nats-users.conf       # compose reads them too
    python -m glowplug.runtime.privileges valkey > deploy/k8s/base/valkey-users.sh

NATS checks the subject of each message and subscription of a client. Receivers rely on three consequences:

- A reply goes wherever its request says. JetStream answers on the client's own subjects, `_INBOX_<user>`, and a user
  that may read facts could redirect them. They keep their stored subject, so receivers compare it with the event's
  content (`subjects.is_subject_of`).
- Creating or updating a stream allows its republication on any subject, so only one user may.
- A reader's filter is checked only if single, as for commands. Readers of several kinds of facts may read all facts.

In Valkey a table is one hash and a log one list: write access covers every row.
"""

import json
import sys
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from glowplug.events import subjects
from glowplug.events.subjects import COMMANDS_STREAM, FACTS_STREAM, USAGE_STREAM, stream_of
from glowplug.state.keys import PREFIX

STREAMS_OWNER: Final = "placer"  # sole maker of streams; it commands agents anyway
STREAMS: Final = (FACTS_STREAM, COMMANDS_STREAM, USAGE_STREAM)
CHECKED: Final = (FACTS_STREAM, COMMANDS_STREAM)  # streams that clients probe
LOGS: Final = ("decisions",)  # tables that are logs

# Valkey commands; the connection needs the first. No user gets CONFIG, KEYS, SCAN, FLUSHALL, DEBUG, ACL or another
# user's keys.
_CONNECTING: Final = ("ping", "hello", "auth", "client|setinfo", "client|setname")
_COUNTING: Final = ("eval", "get", "set")  # redis_store.py; scripts run with the caller's rights
_LEADING: Final = ("hget", "hset", "hmget", "pttl", "pexpire", "del")
_INSPECTING: Final = ("info", "get", "multi", "exec", "discard")
# For health checks, without password or rights.
ANONYMOUS: Final = "user default on nopass resetkeys resetchannels -@all +ping"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rights:
    """One service's rights: bus filters, event types, names of tables and logs."""

    follows: tuple[str, ...] = ()  # facts, durably
    watches: tuple[str, ...] = ()  # telemetry; everything, for observers
    obeys: bool = False
    publishes: tuple[str, ...] = ()
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()  # and reads
    has_epoch: bool = False
    leads: bool = False
    inspects: bool = False  # server state: streams, readers, epochs, store


def _filters(kind: str) -> Iterator[str]:
    if kind == "everything":
        yield from (subjects.FACTS, subjects.USAGE, subjects.TELEMETRY, subjects.COMMANDS_ALL)
    elif kind.endswith(".*"):
        yield subjects.entity_facts(kind.removesuffix(".*"))
    else:
        yield subjects.facts_of(kind)
        if subjects.is_usage(kind):
            yield subjects.among_facts(kind)


def _declared() -> dict[str, Rights]:
    found = {}
    for user, rights in tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8")).items():
        given: dict[str, Any] = {
            key: tuple(value) if isinstance(value, list) else value for key, value in rights.items()
        }
        for key in given.keys() & {"follows", "watches"}:
            given[key] = tuple(filter_ for kind in given[key] for filter_ in _filters(kind))
        found[user] = Rights(**given)
    return found


RIGHTS: Final[Mapping[str, Rights]] = _declared()
USERS: Final = tuple(RIGHTS)
READER: Final = "reader"
# Durable command readers with known names: services with one reading process.
_COMMAND_READERS: Final = {user: f"{user}-commands" for user, rights in RIGHTS.items() if rights.obeys and rights.leads}


def user_of(url: str) -> str:
    """Return the declared user in an address, or "": an external server, a token or another user."""
    user = urlsplit(url).username or ""
    return user if user in RIGHTS else ""


def inbox_of(url: str) -> str:
    """Prefix of a client's reply subjects, closed to other users."""
    return f"_INBOX_{user}" if (user := user_of(url)) else "_INBOX"


def makes_streams(url: str) -> bool:
    """Return whether the address's client may make streams; on external servers all may."""
    return user_of(url) in ("", STREAMS_OWNER)


def permissions(user: str) -> dict[str, dict[str, list[str]]]:
    """NATS: {"publish": {"allow": ..., "deny": ...}, "subscribe": ...}."""
    rights = RIGHTS[user]
    allow = [subjects.of_event(kind) for kind in rights.publishes]
    allow += [subjects.among_facts(kind) for kind in rights.publishes if subjects.is_usage(kind)]  # for older services
    if rights.publishes:
        allow += [subjects.checks(stream) for stream in CHECKED]
    if rights.inspects:  # STREAM.INFO may ask for each subject: sixty such requests delay every publish
        allow += ["$JS.API.STREAM.LIST", *(f"$JS.API.CONSUMER.LIST.{stream}" for stream in STREAMS)]
    else:
        allow += [f"$JS.API.STREAM.INFO.{stream}" for stream in STREAMS]
    deny: list[str] = []
    if user == STREAMS_OWNER:
        allow += [f"$JS.API.STREAM.{verb}.{stream}" for stream in STREAMS for verb in ("CREATE", "UPDATE")]
    for stream in (FACTS_STREAM, USAGE_STREAM):
        followed = [filter_ for filter_ in rights.follows if stream_of(filter_) == stream]
        if followed:
            only = f".{followed[0]}" if len(followed) == 1 else ""  # in the call's subject
            allow += [f"$JS.API.CONSUMER.CREATE.{stream}.*{only}", *_reading(stream, "*")]
    if rights.obeys:
        name = _COMMAND_READERS.get(user, "*")
        allow.append(f"$JS.API.CONSUMER.CREATE.{COMMANDS_STREAM}.{name}.{subjects.to_service(user)}")
        allow += _reading(COMMANDS_STREAM, name)
        for other in _COMMAND_READERS.values() if name == "*" else ():
            deny.append(f"$JS.API.CONSUMER.CREATE.{COMMANDS_STREAM}.{other}.>")
            deny += _reading(COMMANDS_STREAM, other)
    return {
        "publish": {"allow": allow, **({"deny": deny} if deny else {})},
        "subscribe": {"allow": [*rights.watches, f"_INBOX_{user}.>"]},
    }


def _reading(stream: str, reader: str) -> list[str]:
    return [f"$JS.API.CONSUMER.MSG.NEXT.{stream}.{reader}", f"$JS.ACK.{stream}.{reader}.>"]


def store_rules(user: str) -> list[str]:
    """Valkey ACL rules after name and password."""
    rights = RIGHTS[user]
    writes, logs = set(rights.writes), set(LOGS)
    reads = writes | set(rights.reads)
    commands = {*_CONNECTING}
    commands |= {"eval_ro", "hget", "hgetall"} if reads - logs else set()
    commands |= {"lrange"} if reads & logs else set()
    commands |= {"hset", "hdel"} if writes - logs else set()
    commands |= {"wait"} if writes else set()  # for a replica, if any
    commands |= {"lpush", "ltrim"} if writes & logs else set()
    keys = [f"%R~{PREFIX}:{name}" for name in sorted(reads - writes)]
    keys += [f"~{PREFIX}:{name}" for name in sorted(writes)]
    if rights.has_epoch:
        commands |= {*_COUNTING}
        keys.append(f"~{PREFIX}:epoch:{user}")
    if rights.leads:
        commands |= {*_LEADING}
        keys.append(f"~{PREFIX}:lease:{user}")
    if rights.inspects:
        commands |= {*_INSPECTING}
        keys += [f"%R~{PREFIX}:epoch:{name}" for name, other in RIGHTS.items() if other.has_epoch]
    return ["resetkeys", "resetchannels", *keys, "-@all", *(f"+{command}" for command in sorted(commands))]


def nats_users(passwords: Mapping[str, str]) -> list[dict[str, Any]]:
    """`authorization.users` of NATS. `passwords`: by user."""
    return [{"user": user, "password": passwords[user], "permissions": permissions(user)} for user in USERS]


def valkey_users(passwords: Mapping[str, str]) -> list[str]:
    """Lines of a Valkey ACL file. `passwords`: by user."""
    return [ANONYMOUS, *(" ".join(["user", user, "on", f">{passwords[user]}", *store_rules(user)]) for user in USERS)]


def variable(user: str) -> str:
    """Environment variable of this user's password in containers."""
    return f"{user.upper()}_PASSWORD"


_MADE = "# Made by python -m glowplug.runtime.privileges {}; do not edit. Source: libs/glowplug/runtime/privileges.py"


def nats_document() -> str:
    """Users as an include for NATS, with passwords from the server's environment."""
    lines = [_MADE.format("nats"), "authorization {", "  users: ["]
    for user in USERS:
        allowed = json.dumps(permissions(user), indent=2).replace("\n", "\n      ")
        lines += ["    {", f"      user: {user}", f"      password: ${variable(user)}", f"      permissions: {allowed}"]
        lines.append("    }")
    return "\n".join([*lines, "  ]", "}"]) + "\n"


def valkey_document() -> str:
    """Script that writes Valkey's ACL file to its first argument; passwords come from its environment, never the
    command line."""
    lines = valkey_users({user: f"${{{variable(user)}:?}}" for user in USERS})
    return "\n".join([_MADE.format("valkey"), "umask 077", 'cat >"$1" <<END', *lines, "END"]) + "\n"


if __name__ == "__main__":
    documents = {"nats": nats_document, "valkey": valkey_document}
    if sys.argv[1:] not in [[name] for name in documents]:
        raise SystemExit("usage: python -m glowplug.runtime.privileges nats|valkey")
    sys.stdout.write(documents[sys.argv[1]]())
