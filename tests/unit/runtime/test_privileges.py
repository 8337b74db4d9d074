"""Declared rights equal the services' use. Subscriptions and reads come from reads.py; publishes and writes from the
source of the modules a service runs, including imports from controllers and runtime."""

import ast
import importlib
import runpy
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from glowplug.controllers.autoscaler.learned import SCALING_LEARNED
from glowplug.controllers.fencing import LEADERS
from glowplug.controllers.operator import CORDONS
from glowplug.domain.access import KEYS, TENANTS
from glowplug.domain.batch import BATCHES, BATCHES_OPEN, FILES
from glowplug.events.envelope import COMMANDS, PAYLOADS
from glowplug.events.subjects import TELEMETRY, facts_of
from glowplug.fleet.start_times import START_TIMES
from glowplug.runtime import privileges
from glowplug.runtime.identity import PROCESSES
from glowplug.runtime.privileges import RIGHTS
from glowplug.runtime.settings import ElectedSettings
from glowplug.runtime.shell import DECISIONS_LOG
from glowplug.services.console import fleet_view, usage_api
from glowplug.services.console import main as console_handlers
from tests.house.tree import ON_THE_BUS, ROOT

RUN = ("glowplug.services.", "glowplug.controllers.", "glowplug.fleet.", "glowplug.runtime.")
CLASSES = {cls.__name__: kind for kind, cls in PAYLOADS.items()}
LEASE_ONLY = "router"  # leases only a part of its work
# Their tables name commands and facts but make none.
RECOGNISE = {"glowplug.controllers.agent.table", "glowplug.services.router.keys"}
# Their publishes and writes belong to the services that use this name.
ONLY_WITH = {
    "glowplug.fleet.demand": "LoadReporter",
    "glowplug.runtime.shell": "Record",
    "glowplug.runtime.service": "announce",
    "glowplug.runtime.identity": "Identity",
}


def wiring(service: str) -> tuple[set[str], set[str], set[str], set[str]]:
    """(facts, non-durable events, commands, tables read)"""
    if service == "console":
        of_telemetry = TELEMETRY.removesuffix(">")  # omits types that reports sum up
        watched = {TELEMETRY if one.startswith(of_telemetry) else one for one in console_handlers.WATCHED}
        return set(usage_api.FILTERS.values()), watched, set(), set(fleet_view.TABLES)
    reads = importlib.import_module(f"glowplug.controllers.{service}.reads").READS.asked()
    found = reads.fact_filters(), reads.telemetry_filters(), reads.command_filters("n")
    return set(found[0]), set(found[1]), set(found[2]), set(reads.tables)


def _source(module: str) -> Path | None:
    path = ROOT / "libs" / Path(*module.split("."))
    return next((p for p in (path.with_suffix(".py"), path / "__init__.py") if p.exists()), None)


def _imported(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{name.name}" for name in node.names)


@cache
def _tree(module: str) -> ast.AST | None:
    path = _source(module)
    return ast.parse(path.read_text(encoding="utf-8")) if path is not None else None


@cache
def modules(service: str) -> dict[str, ast.AST]:
    """Modules that a service runs. The console has no controller and borrows their words."""
    waiting, found = [f"glowplug.services.{service}.main"], dict[str, ast.AST]()
    while waiting:
        name = waiting.pop()
        is_run = name.startswith(RUN) and not name.startswith("glowplug.runtime.supervisor")
        if name in found or not is_run or (service == "console" and name.startswith("glowplug.controllers")):
            continue
        if (tree := _tree(name)) is not None:
            found[name] = tree
            waiting += _imported(tree)
    return found


@cache
def _names(tree: ast.AST) -> frozenset[str]:
    return frozenset(node.id for node in ast.walk(tree) if isinstance(node, ast.Name))


@cache
def _calls(tree: ast.AST) -> list[tuple[str, ast.expr]]:
    """(function, first argument) of calls."""
    calls = (node for node in ast.walk(tree) if isinstance(node, ast.Call))
    return [(ast.unparse(call.func), call.args[0]) for call in calls if call.args]


def _is_done_here(service: str, module: str) -> bool:
    used = ONLY_WITH.get(module)
    if module == "glowplug.runtime.leader":
        return leads(service) and service != LEASE_ONLY
    own = {name: tree for name, tree in modules(service).items() if name not in ONLY_WITH}
    if "ControlService" not in set().union(*(_names(t) for n, t in own.items() if n.startswith("glowplug.services."))):
        own.pop("glowplug.runtime.control", None)
    return used is None or any(used in _names(tree) for tree in own.values())


def leads(service: str) -> bool:
    if service == LEASE_ONLY:
        return True
    settings = vars(importlib.import_module(f"glowplug.services.{service}.settings")).values()
    return any(
        isinstance(cls, type) and issubclass(cls, ElectedSettings) and cls is not ElectedSettings for cls in settings
    )


def _class_of(node: ast.AST) -> str:
    name = node.id if isinstance(node, ast.Name) else getattr(node, "attr", "")
    return name if name in CLASSES else ""


@cache
def _made_only(tree: ast.AST) -> list[ast.expr]:
    """Classes of events where one is made or chosen, not recognised."""
    named = [n for n in ast.walk(tree) if isinstance(n, ast.Name | ast.Attribute) and _class_of(n)]
    passed: set[int] = set()
    for node in ast.walk(tree) if named else ():
        aside: list[ast.AST | None] = []
        is_question = isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "isinstance"
        if is_question or isinstance(node, ast.MatchClass):
            aside = [node]
        elif isinstance(node, ast.arg | ast.AnnAssign):
            aside = [node.annotation]
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            aside = [node.returns]
        elif isinstance(node, ast.Dict):
            aside = list(node.keys)
        passed |= {id(part) for one in aside if one is not None for part in ast.walk(one)}
    return [node for node in named if id(node) not in passed]


def published(service: str) -> set[str]:
    """What it makes to send. Of the commands that it reads, it makes its own records."""
    found = set()
    for module, tree in modules(service).items():
        if module in RECOGNISE or not _is_done_here(service, module) or module.endswith(".reads"):
            continue
        for node in _made_only(tree):
            name = _class_of(node)
            if isinstance(node, ast.Name) or ast.unparse(node) in (f"facts.{name}", f"commands.{name}"):
                found.add(CLASSES[name])
    return {kind for kind in found if kind not in COMMANDS or kind.partition(".")[0] != service}


def touched(service: str, *ways: str) -> set[str]:
    """Tables named first in such calls as Save, Remove, `store.put`."""
    found: set[str] = set()
    for module, tree in modules(service).items():
        if not _is_done_here(service, module):
            continue
        for called, first in _calls(tree):
            if any(called == way or (way[0] == "." and called.endswith(f"store{way}")) for way in ways):
                table = _text(module, first)
                found |= {table} if table else set()
    return found


def _text(module: str, node: ast.expr) -> str:
    if isinstance(node, ast.Constant):
        return str(node.value)
    value: Any = getattr(importlib.import_module(module), node.id, "") if isinstance(node, ast.Name) else ""
    return value if isinstance(value, str) else ""


def test_every_service_has_rights_and_only_readers_are_beside_them() -> None:
    assert set(RIGHTS) == {*ON_THE_BUS, privileges.READER}
    assert privileges.LOGS == (DECISIONS_LOG,)
    known = {CORDONS, DECISIONS_LOG, LEADERS, PROCESSES, SCALING_LEARNED, START_TIMES, "models", "instances", "nodes"}
    known |= {KEYS, TENANTS, FILES, BATCHES, BATCHES_OPEN}
    assert {table for rights in RIGHTS.values() for table in (*rights.reads, *rights.writes)} == known


@pytest.mark.parametrize("service", ON_THE_BUS)
def test_what_a_service_subscribes_to_is_what_is_declared(service: str) -> None:
    facts, watched, commands, _ = wiring(service)
    rights = RIGHTS[service]
    assert set(rights.follows) == facts
    assert set(rights.watches) == watched
    assert rights.obeys == bool(commands)
    assert all(command.split(".")[3] == service for command in commands)


@pytest.mark.parametrize("service", ON_THE_BUS)
def test_what_a_service_publishes_is_what_is_declared(service: str) -> None:
    assert set(RIGHTS[service].publishes) == published(service)


@pytest.mark.parametrize("service", ON_THE_BUS)
def test_tables_a_service_reads_and_writes_are_those_declared(service: str) -> None:
    rights = RIGHTS[service]
    written = touched(service, "Save", "Remove", ".put", ".delete", ".append", "_store.put", "_store.delete")
    read = touched(service, ".load", ".get", ".tail") | wiring(service)[3]
    assert set(rights.writes) == written
    assert set(rights.reads) == read - written
    assert rights.leads == leads(service)
    assert rights.has_epoch == (service == LEASE_ONLY) or any(
        "ControlService" in _names(t) for n, t in modules(service).items() if n.startswith("glowplug.services.")
    )


def test_subscriptions_are_made_where_this_file_looks() -> None:
    found = set()
    for folder in ("services", "libs/glowplug/runtime", "libs/glowplug/controllers"):
        for path in (ROOT / folder).rglob("*.py"):
            if "bus.subscribe(" in path.read_text(encoding="utf-8"):
                found.add(str(path.relative_to(ROOT)))
    assert found == {
        "libs/glowplug/runtime/control.py",
        "services/agent/service.py",
        "services/console/main.py",
        "services/console/usage_api.py",
        "services/router/main.py",
    }


def test_every_event_has_somebody_who_may_publish_it_and_commands_have_few() -> None:
    by_whom = {kind: {u for u, rights in RIGHTS.items() if kind in rights.publishes} for kind in PAYLOADS}
    assert all(by_whom.values())
    assert {user for kind in COMMANDS for user in by_whom[kind]} == {"placer", "autoscaler"}
    assert by_whom["agent.start"] == {"placer"}
    assert all(facts_of(kind) for kind in set(PAYLOADS) - set(COMMANDS))


@pytest.mark.parametrize(
    ("url", "user", "inbox", "makes_streams"),
    [
        ("nats://placer:secret@h:4222", "placer", "_INBOX_placer", True),
        ("nats://router:secret@h:4222", "router", "_INBOX_router", False),
        ("nats://h:4222", "", "_INBOX", True),
        ("nats://a-token@h:4222", "", "_INBOX", True),
    ],
)
def test_an_address_says_its_user_where_that_one_is_declared(
    url: str, user: str, inbox: str, makes_streams: bool
) -> None:
    told = privileges.user_of(url), privileges.inbox_of(url), privileges.makes_streams(url)
    assert told == (user, inbox, makes_streams)


def test_the_servers_users_are_those_declared_each_with_its_password() -> None:
    passwords = {user: f"secret of {user}" for user in privileges.USERS}
    assert privileges.nats_users(passwords) == [
        {"user": user, "password": passwords[user], "permissions": privileges.permissions(user)} for user in RIGHTS
    ]
    anonymous, *lines = privileges.valkey_users(passwords)
    assert anonymous == privileges.ANONYMOUS
    rules = {user: " ".join(privileges.store_rules(user)) for user in RIGHTS}
    assert lines == [f"user {user} on >{passwords[user]} {rules[user]}" for user in RIGHTS]


def test_the_module_writes_the_files_of_containers(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = ROOT / "deploy/k8s/base"
    for name, file in (("nats", "nats-users.conf"), ("valkey", "valkey-users.sh")):
        monkeypatch.setattr(sys, "argv", ["privileges", name])
        runpy.run_path(privileges.__file__, run_name="__main__")
        assert capsys.readouterr().out == (folder / file).read_text(encoding="utf-8")
    for args in ([], ["all"], ["nats", "valkey"]):
        monkeypatch.setattr(sys, "argv", ["privileges", *args])
        with pytest.raises(SystemExit):
            runpy.run_path(privileges.__file__, run_name="__main__")
