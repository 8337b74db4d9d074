"""Roles of the console's users, and the least role for each path: one table, by method and path.

Unlisted paths are for admins alone, and a test names them."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from fastapi import Request
from starlette.routing import compile_path

from glowplug.domain.access import Role
from glowplug.domain.errors import RoleRequired

WHO: Final = "glowplug.who"
PAGE_FILES: Final = "/page/"


@dataclass(frozen=True, slots=True, kw_only=True)
class Who:
    """`key_id`: of a named key. `has_api_key`: by the router's API key."""

    name: str
    role: Role
    key_id: str = ""
    has_api_key: bool = False


ANYBODY: Final = Who(name="", role=Role.ADMIN)  # without a key of the console, services check rights themselves

_OPEN: Final = """
GET /live
GET /health
GET /ready
GET /metrics
GET /login
HEAD /login
POST /login
GET /login/oidc
GET /login/oidc/callback
POST /logout
GET /session
"""
_VIEWER: Final = """
GET /
HEAD /
GET /policies
GET /docs
GET /openapi.json
HEAD /openapi.json
GET /api/v1/fleet
GET /api/v1/stream
GET /api/v1/requests
GET /api/v1/requests/{request_id}/trace
GET /api/v1/models/{key}
GET /api/v1/traces
GET /api/v1/traces/{trace_id}
GET /api/v1/decisions
GET /api/v1/decisions/{decision_id}
GET /api/v1/events
GET /api/v1/events/latest
GET /api/v1/events/{event_id}
GET /api/v1/forecasts
GET /api/v1/gpus/{gpu_id:path}/worth
GET /api/v1/tenants
GET /api/v1/keys
GET /v1/history
GET /v1/usage
GET /v1/organization/usage/completions
GET /v1/organization/costs
GET /playground/router
GET /playground/v1/models
POST /playground/v1/chat/completions
"""  # for chats the router asks for a key; the console adds its own for operators alone (passing.py)
_OPERATOR: Final = """
POST /api/v1/logs
GET /api/v1/model_files
POST /api/v1/model_files
GET /api/v1/model_files/{key}
POST /api/v1/models
PUT /api/v1/models/{key}
DELETE /api/v1/models/{key}
POST /api/v1/models/{key}/{verb}
POST /api/v1/nodes/{node_id}/{verb}
"""
_ADMIN: Final = """
PUT /api/v1/tenants/{name}
DELETE /api/v1/tenants/{name}
POST /api/v1/keys
PATCH /api/v1/keys/{key_id}
DELETE /api/v1/keys/{key_id}
POST /api/v1/keys/{key_id}/rotate
"""


def _rows() -> Iterator[tuple[str, Role]]:
    for role, lines in ((Role.NONE, _OPEN), (Role.VIEWER, _VIEWER), (Role.OPERATOR, _OPERATOR), (Role.ADMIN, _ADMIN)):
        for line in lines.split("\n"):
            if line:
                yield line, role


LEAST: Final[dict[str, Role]] = dict(_rows())
_FIXED: Final = {line: role for line, role in LEAST.items() if "{" not in line}
_OPEN_PATHS: Final = frozenset(line.partition(" ")[2] for line, role in LEAST.items() if role is Role.NONE)


def _compiled() -> list[tuple[str, re.Pattern[str], Role]]:
    parted = ((line.partition(" "), role) for line, role in LEAST.items() if line not in _FIXED)
    return [(method, compile_path(path)[0], role) for (method, _, path), role in parted]


_WITH_NAMES: Final = _compiled()


def least_role(method: str, path: str) -> Role:
    """Return the least role: viewer for paths outside the console, admin for undeclared ones."""
    if path.startswith(PAGE_FILES):
        return Role.NONE
    if (role := _FIXED.get(f"{method} {path}")) is not None:
        return role
    roles = [role for own, pattern, role in _WITH_NAMES if own == method and pattern.match(path)]
    if roles:
        return max(roles, key=list(Role).index)
    if path in _OPEN_PATHS:
        return Role.NONE  # another method: 405
    return (
        Role.VIEWER if method in ("GET", "HEAD", "OPTIONS") and not path.startswith(("/api/", "/v1/")) else Role.ADMIN
    )


def who_of(request: Request) -> Who:
    who: Any = request.scope.get(WHO, ANYBODY)
    assert isinstance(who, Who)
    return who


def check_role(who: Who, method: str, path: str) -> None:
    """Raises RoleRequired."""
    least = least_role(method, path)
    if not who.role.includes(least):
        text = f"{who.name[:100]} has the role {who.role}, and {method} {path[:200]} needs the role {least}."
        raise RoleRequired(text[0].upper() + text[1:])
