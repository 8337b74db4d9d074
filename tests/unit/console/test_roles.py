"""The console's table of least roles."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from fastapi import FastAPI
from fastapi.routing import iter_route_contexts
from prometheus_client import CollectorRegistry

from glowplug.domain.access import Role
from glowplug.domain.errors import RoleRequired
from glowplug.services.console.app import Console, build_app
from glowplug.services.console.metrics import ConsoleMetrics
from glowplug.services.console.roles import LEAST, PAGE_FILES, Who, check_role, least_role
from glowplug.services.console.settings import ConsoleSettings

OIDC = {"oidc_issuer": "http://127.0.0.1:1", "oidc_client_id": "glowplug", "oidc_viewers": "*"}


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory) -> FastAPI:
    folder: Path = tmp_path_factory.mktemp("state")
    settings = ConsoleSettings(state_dir=folder, **OIDC)  # type: ignore[arg-type]
    return build_app(Console(settings, ConsoleMetrics(CollectorRegistry())))


def served(app: FastAPI) -> Iterator[str]:
    """ "GET /api/v1/fleet" and so on, without the page's files."""
    for route in iter_route_contexts(app.routes):
        path = getattr(route, "path_format", "") and route.path
        if not path.startswith(PAGE_FILES):
            yield from (f"{method} {path}" for method in route.methods or ())


def test_every_path_of_the_console_has_a_role(app: FastAPI) -> None:
    missing = sorted(set(served(app)) - LEAST.keys())
    assert not missing, (
        f"{missing}: declare the least role of each in services/console/roles.py; without one it is for admins alone"
    )
    gone = sorted(LEAST.keys() - set(served(app)))
    assert not gone, f"{gone}: the console has no such path; take it out of services/console/roles.py"


@pytest.mark.parametrize("role", Role)
@pytest.mark.parametrize("line", LEAST)
def test_each_role_may_do_what_the_table_says(line: str, role: Role) -> None:
    method, _, path = line.replace(":path}", "}").partition(" ")
    path = path.replace("{gpu_id}", "node-1/0").replace("{", "").replace("}", "")
    least, who = LEAST[line], Who(name="somebody", role=role)
    assert least_role(method, path) is least
    if role.includes(least):
        check_role(who, method, path)
    else:
        with pytest.raises(RoleRequired, match=f"Somebody has the role {role}, and .* needs the role {least}"):
            check_role(who, method, path)


@pytest.mark.parametrize(
    ("method", "path", "least"),
    [
        ("GET", "/page/main.js", Role.NONE),
        ("GET", "/v1/traces", Role.ADMIN),
        ("GET", "/nothing", Role.VIEWER),
        ("GET", "//api/v1/fleet", Role.VIEWER),
        ("GET", "/live/", Role.VIEWER),
        ("GET", "/api/v1/undeclared", Role.ADMIN),
        ("PATCH", "/api/v1/keys/abc", Role.ADMIN),
        ("POST", "/nothing", Role.ADMIN),
        ("DELETE", "/api/v1/fleet", Role.ADMIN),
    ],
)
def test_what_is_not_declared_is_for_admins(method: str, path: str, least: Role) -> None:
    assert least_role(method, path) is least


def test_a_role_includes_those_before_it() -> None:
    order = [Role.NONE, Role.VIEWER, Role.OPERATOR, Role.ADMIN]
    assert [[a.includes(b) for b in order] for a in order] == [[i >= k for k in range(4)] for i in range(4)]
