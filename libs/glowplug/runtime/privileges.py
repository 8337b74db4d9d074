"""Who may do what on the bus and in the store: one declaration, from which the servers' configurations are made.

Each service has one user of its own name at NATS and at Valkey, with one password; `reader` is for commands that look
(`glowplug tap`, `record`, `doctor`, `backup`). tests/unit/runtime/test_privileges.py holds the declaration against the
services' wiring in both directions, tests/contract/test_*_privileges.py try what it forbids on real servers, and
docs/adr/0016-least-privilege.md says what it does not separate. The configurations of containers:

    python -m glowplug.runtime.privileges nats > deploy/docker/nats-users.conf       # and deploy/k8s/base
    python -m glowplug.runtime.privileges valkey > deploy/docker/valkey-users.sh     # and deploy/k8s/base
"""

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import urlsplit

from glowplug.bus import access as bus
from glowplug.events.subjects import COMMANDS_ALL, FACTS, TELEMETRY, entity_facts, facts_of
from glowplug.state import access as store

STREAMS_OWNER: Final = "placer"  # the one user that makes and changes streams; it commands agents anyway
# Named where they are used; importing that for a name would cost every command its time.
LEADERS: Final = "leaders"  # controllers/fencing.py
CORDONS: Final = "cordons"  # controllers/placer/controller.py
START_TIMES: Final = "start_times"  # policies/start_times.py
PROCESSES: Final = "processes"  # runtime/identity.py
DECISIONS: Final = "decisions"  # runtime/shell.py
LOGS: Final = (DECISIONS,)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rights:
    """What one service does. Filters of the bus, types of events, names of tables and logs."""

    follows: tuple[str, ...] = ()  # facts, durably
    watches: tuple[str, ...] = ()  # telemetry; for those that look, everything
    obeys: bool = False  # takes commands addressed to it
    publishes: tuple[str, ...] = ()
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()  # reads them too
    has_epoch: bool = False
    leads: bool = False  # its processes elect a leader
    inspects: bool = False  # the servers themselves


RIGHTS: Final[Mapping[str, Rights]] = {
    "router": Rights(
        follows=(entity_facts("instance"), entity_facts("model"), facts_of("weights.fetch_failed")),
        watches=(facts_of("router.load_reported"),),
        publishes=(
            "request.waiting",
            "request.rejected",
            "request.finished",
            "router.load_reported",
            "router.requests_reported",
            "service.started",
        ),
        reads=("models", "instances", START_TIMES),
        writes=(PROCESSES,),
    ),
    "predictor": Rights(
        follows=(facts_of("model.deployed"),),
        watches=(facts_of("router.load_reported"), facts_of("request.finished")),
        publishes=("forecast.made", "service.started"),
        reads=("models",),
        writes=(LEADERS, PROCESSES),
        has_epoch=True,
        leads=True,
    ),
    "placer": Rights(
        follows=(
            entity_facts("instance"),
            entity_facts("node"),
            facts_of("model.deployed"),
            facts_of("weights.fetched"),
            facts_of("weights.fetch_failed"),
            facts_of("forecast.made"),
        ),
        watches=(facts_of("router.load_reported"), facts_of("node.beat"), facts_of("request.finished")),
        obeys=True,
        publishes=(
            "agent.start",
            "agent.stop",
            "agent.join",
            "prefetcher.fetch",
            "instance.failed",
            "node.left",
            "decision.made",
            "service.started",
        ),
        reads=("models",),
        writes=("instances", "nodes", CORDONS, START_TIMES, LEADERS, PROCESSES, DECISIONS),
        has_epoch=True,
        leads=True,
    ),
    "autoscaler": Rights(
        follows=(
            entity_facts("instance"),
            facts_of("request.waiting"),
            facts_of("model.undeployed"),
            facts_of("forecast.made"),
        ),
        watches=(facts_of("router.load_reported"),),
        publishes=(
            "placer.place",
            "placer.cancel",
            "agent.stop",
            "agent.resume",
            "agent.consolidate",
            "model.deployed",
            "model.undeployed",
            "decision.made",
            "service.started",
        ),
        reads=("instances",),
        writes=("models", LEADERS, PROCESSES, DECISIONS),
        has_epoch=True,
        leads=True,
    ),
    "prefetcher": Rights(
        follows=(entity_facts("instance"), entity_facts("model")),
        obeys=True,
        publishes=(
            "weights.fetched",
            "weights.fetch_failed",
            "weights.evicted",
            "weights.progressed",
            "decision.made",
            "service.started",
        ),
        reads=("models", "instances", LEADERS),
        writes=(PROCESSES, DECISIONS),
        has_epoch=True,
    ),
    "agent": Rights(
        obeys=True,
        publishes=(
            "instance.starting",
            "instance.loading",
            "instance.ready",
            "instance.draining",
            "instance.stopped",
            "instance.failed",
            "instance.prewarmed",
            "instance.swapped_out",
            "node.joined",
            "node.left",
            "node.beat",
            "service.started",
        ),
        reads=(LEADERS,),
        writes=("instances", "nodes"),
    ),
    "console": Rights(
        watches=(FACTS, TELEMETRY, COMMANDS_ALL),
        reads=("models", "instances", "nodes", CORDONS, START_TIMES, DECISIONS),
    ),
    "reader": Rights(
        watches=(FACTS, TELEMETRY, COMMANDS_ALL),
        reads=("models", "instances", "nodes", CORDONS, START_TIMES, LEADERS, PROCESSES, DECISIONS),
        inspects=True,
    ),
}
USERS: Final = tuple(RIGHTS)
READER: Final = "reader"


def bus_access(user: str) -> bus.BusAccess:
    """What this user does on the bus. Readers of commands that run once have a fixed name."""
    rights = RIGHTS[user]
    known = {name: f"{name}-commands" for name, other in RIGHTS.items() if other.obeys and other.leads}
    return bus.BusAccess(
        follows=rights.follows,
        watches=rights.watches,
        obeys=user if rights.obeys else "",
        publishes=rights.publishes,
        makes_streams=user == STREAMS_OWNER,
        inspects=rights.inspects,
        reader=known.get(user, ""),
        others=tuple(reader for name, reader in known.items() if name != user),
    )


def store_access(user: str) -> store.StoreAccess:
    """What this user does in the store."""
    rights = RIGHTS[user]
    return store.StoreAccess(
        reads=rights.reads,
        writes=rights.writes,
        logs=LOGS,
        counts=user if rights.has_epoch else "",
        leads=rights.leads,
        inspects=tuple(name for name, other in RIGHTS.items() if other.has_epoch) if rights.inspects else (),
    )


def user_of(url: str) -> str:
    """The user of the declaration that an address names, or "": a server that the user runs, with a token, another
    user or none."""
    user = urlsplit(url).username or ""
    return user if user in RIGHTS else ""


def inbox_of(url: str) -> str:
    """What the subjects begin with on which a client of this address gets its answers."""
    return bus.inbox(user) if (user := user_of(url)) else "_INBOX"


def makes_streams(url: str) -> bool:
    """Whether a client of this address may make streams; on servers that the user runs every client may."""
    return user_of(url) in ("", STREAMS_OWNER)


def nats_users(passwords: Mapping[str, str]) -> list[dict[str, Any]]:
    """`authorization.users` of a NATS server. `passwords`: by user."""
    return [
        {"user": user, "password": passwords[user], "permissions": bus.permissions(user, bus_access(user))}
        for user in USERS
    ]


def valkey_users(passwords: Mapping[str, str]) -> list[str]:
    """The lines of an ACL file of Valkey. `passwords`: by user."""
    named = [" ".join(["user", user, "on", f">{passwords[user]}", *store.rules(store_access(user))]) for user in USERS]
    return [store.NOBODY, *named]


def variable(user: str) -> str:
    """The variable that holds this user's password where servers and services run in containers."""
    return f"{user.upper()}_PASSWORD"


_MADE = (
    "# Made by python -m glowplug.runtime.privileges {}; do not edit. What it says: libs/glowplug/runtime/privileges.py"
)


def nats_document() -> str:
    """Users as a file that a NATS configuration includes; passwords come from the server's environment."""
    lines = [_MADE.format("nats"), "authorization {", "  users: ["]
    for user in USERS:
        rights = json.dumps(bus.permissions(user, bus_access(user)), indent=2).replace("\n", "\n      ")
        lines += ["    {", f"      user: {user}", f"      password: ${variable(user)}", f"      permissions: {rights}"]
        lines.append("    }")
    return "\n".join([*lines, "  ]", "}"]) + "\n"


def valkey_document() -> str:
    """A script that writes Valkey's ACL file to its first argument; passwords come from its environment and stand on no
    command line."""
    lines = valkey_users({user: f"${{{variable(user)}:?}}" for user in USERS})
    return "\n".join([_MADE.format("valkey"), "umask 077", 'cat >"$1" <<END', *lines, "END"]) + "\n"


if __name__ == "__main__":
    documents = {"nats": nats_document, "valkey": valkey_document}
    if sys.argv[1:] not in [[name] for name in documents]:
        raise SystemExit("usage: python -m glowplug.runtime.privileges nats|valkey")
    sys.stdout.write(documents[sys.argv[1]]())
