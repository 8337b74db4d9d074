"""Define tenants, their keys and their rights.

A key, `gp-<key id>-<secret>`, is shown once. Only its SHA-256 is kept: the secret is 256 random bits, so it needs no
salt and no slow hash.
"""

import hashlib
import hmac
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from fnmatch import fnmatchcase
from typing import Annotated, Final

from glowplug.domain.bounds import Bounded, Bounds, check_bounds

TENANTS, KEYS = "tenants", "keys"  # tables, by tenant name and by key id
SHARED_TENANT: Final = "default"  # of GLOWPLUG_API_KEY, and of calls without a key
MAX_PATTERNS = 256
_KEY = re.compile(r"gp-([a-z0-9]{8})-[A-Za-z0-9_-]{43}")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}")


class Surface(StrEnum):
    """The ports and verbs that a key opens."""

    DATA = "data"  # requests on the data port
    READ = "read"  # the fleet, never a request's text: role viewer
    OPERATE = "operate"  # models and nodes too: role operator
    ADMIN = "admin"  # tenants and keys too: role admin


class Role(StrEnum):
    """The rights of a person or a program in a fleet. Each role includes those before it."""

    NONE = "none"
    VIEWER = "viewer"
    OPERATOR = "operator"
    ADMIN = "admin"

    def includes(self, least: "Role") -> bool:
        return _ROLES.index(self) >= _ROLES.index(least)


_ROLES: Final = tuple(Role)
_ROLE_OF: Final = {Surface.READ: Role.VIEWER, Surface.OPERATE: Role.OPERATOR, Surface.ADMIN: Role.ADMIN}


class Priority(StrEnum):
    """The class of a request, the most urgent first. `rank`: 0 for the most urgent."""

    rank: int
    INTERACTIVE = "interactive"
    STANDARD = "standard"
    BATCH = "batch"


for _rank, _priority in enumerate(Priority):
    _priority.rank = _rank  # read several times per request


Amount = Annotated[int, Bounds(most=1 << 48)]


@dataclass(frozen=True, slots=True, kw_only=True)
class AccessLimits(Bounded):
    """Limits of a tenant, a key, or a tenant at one model; 0: none. Tokens are those of prompts and answers. Raises
    OutOfBounds."""

    requests_per_minute: Amount = 0
    tokens_per_minute: Amount = 0
    tokens_per_day: Amount = 0  # UTC days
    tokens_per_month: Amount = 0  # UTC months
    concurrent: Amount = 0  # held ones included
    queued: Amount = 0  # held

    @property
    def is_none(self) -> bool:
        return self == NO_LIMITS


NO_LIMITS: Final = AccessLimits()


@dataclass(frozen=True, slots=True, kw_only=True)
class Tenant:
    """People or programs that share a bill. `priority`: most urgent and default class of requests; `weight`: share of a
    model's tokens beside tenants of that class. Raises ValueError for a bad name, OutOfBounds."""

    name: str
    limits: AccessLimits = NO_LIMITS
    model_limits: Mapping[str, AccessLimits] = field(default_factory=dict)  # by model name or pattern, first match
    priority: Priority = Priority.STANDARD
    weight: Annotated[float, Bounds(least=0.001, most=1000.0)] = 1.0
    revision: int = 0  # grows with each change
    source: str = ""  # file path; empty: REST

    def __post_init__(self) -> None:
        check_name(self.name)
        check_bounds(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiKey:
    """A tenant's named key. Epoch seconds, 0: never. `models`: names, aliases or patterns (`org/*`). A revoked key
    opens nothing, whatever the clock. Raises ValueError for a bad id or name."""

    key_id: str
    tenant: str
    name: str
    sha256: str  # hex, whole key
    models: tuple[str, ...] = ("*",)
    surfaces: tuple[Surface, ...] = (Surface.DATA,)
    limits: AccessLimits = NO_LIMITS
    priority: Priority | None = None  # None: the tenant's
    created_at: float = 0.0
    expires_at: float = 0.0
    revoked_at: float = 0.0
    revision: int = 0  # grows with each change
    source: str = ""  # file path; empty: REST

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[a-z0-9]{8}", self.key_id):
            raise ValueError(f"key id {self.key_id!r} is not eight small letters and digits")
        if not re.fullmatch(r"[0-9a-f]{64}", self.sha256):
            raise ValueError("sha256 is not 64 hexadecimal digits")
        check_name(self.tenant)
        check_name(self.name)
        if not 0 < len(self.models) <= MAX_PATTERNS:
            raise ValueError(f"models: {len(self.models)} names, of 1 to {MAX_PATTERNS}")

    @property
    def prefix(self) -> str:
        return prefix_of(self.key_id)

    def fits(self, presented: str) -> bool:
        """Compare with a presented key in constant time."""
        return hmac.compare_digest(digest_of(presented), self.sha256)

    @property
    def ends_at(self) -> float:
        """Epoch seconds of expiry or revocation; 0: never."""
        return min((at_s for at_s in (self.revoked_at, self.expires_at) if at_s), default=0.0)

    def ended(self, now_s: float) -> str:
        """Return "revoked", "expired", or "" for a living key."""
        if self.revoked_at:
            return "revoked"
        return "expired" if self.expires_at and self.expires_at <= now_s else ""

    def opens(self, surface: Surface) -> bool:
        return surface in self.surfaces or (surface in _ROLE_OF and self.role.includes(_ROLE_OF[surface]))

    @property
    def role(self) -> Role:
        return max((_ROLE_OF.get(surface, Role.NONE) for surface in self.surfaces), default=Role.NONE, key=_ROLES.index)

    def allows(self, names: Iterable[str]) -> bool:
        return any(fnmatchcase(name, pattern) for name in names for pattern in self.models)


def find_key(keys: Mapping[str, ApiKey], presented: str, now_s: float) -> ApiKey | None:
    key = keys.get(key_id_of(presented))
    return key if key is not None and key.fits(presented) and not key.ended(now_s) else None


def check_name(name: str) -> None:
    """Raise ValueError unless `name` can be a tenant's or a key's: 1 to 64 letters, digits and `._@-`."""
    if not _NAME.fullmatch(name):
        raise ValueError(f"{name[:80]!r} is not a name: 1 to 64 letters, digits and ._@-, a letter or digit first")


def prefix_of(key_id: str) -> str:
    return f"gp-{key_id}" if key_id else ""


def key_id_of(presented: str) -> str:
    """Return the key's id, or "" for a malformed key."""
    found = _KEY.fullmatch(presented)
    return found[1] if found else ""


def digest_of(presented: str) -> str:
    return hashlib.sha256(presented.encode()).hexdigest()
