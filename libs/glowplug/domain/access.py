"""Who may use a fleet: tenants, their keys, and what each may do.

A key is shown once, when it is made: `gp-<key id>-<secret>`. The fleet keeps the SHA-256 of the whole key, which is as
good as the key only to who can undo it; the secret is 256 random bits, so no salt and no slow hash are needed.
"""

import hashlib
import hmac
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from fnmatch import fnmatchcase
from typing import Final

from glowplug.domain.bounds import check_bounds

TENANTS, KEYS = "tenants", "keys"  # the tables, by tenant name and by key id
SHARED_TENANT: Final = "default"  # of the fleet's one key (GLOWPLUG_API_KEY), and of calls that need none
MAX_PATTERNS = 256  # names or patterns of models in one key
_KEY = re.compile(r"gp-([a-z0-9]{8})-[A-Za-z0-9_-]{43}")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}")


class Surface(StrEnum):
    """What a key opens."""

    DATA = "data"  # requests to models, on the data port
    READ = "read"  # reading the fleet, never the text of a request: the role viewer
    OPERATE = "operate"  # changing models and nodes too: the role operator
    ADMIN = "admin"  # changing tenants and keys too: the role admin


class Role(StrEnum):
    """What a person or a program may do with a fleet. Each role includes those before it."""

    NONE = "none"
    VIEWER = "viewer"
    OPERATOR = "operator"
    ADMIN = "admin"

    def includes(self, least: "Role") -> bool:
        """Return whether this role may do what needs the role `least`."""
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
    _priority.rank = _rank  # read several times for each request


@dataclass(frozen=True, slots=True, kw_only=True)
class AccessLimits:
    """What a tenant, a key, or a tenant at one model may use; 0 sets no limit. Tokens are those of prompts and answers.
    Raises OutOfBounds for numbers that no owner can mean."""

    requests_per_minute: int = 0
    tokens_per_minute: int = 0
    tokens_per_day: int = 0  # UTC days
    tokens_per_month: int = 0  # UTC months
    concurrent: int = 0  # requests at once, held ones included
    queued: int = 0  # requests held at once

    def __post_init__(self) -> None:
        check_bounds(self, most=dict.fromkeys(self.__slots__, 1 << 48))

    @property
    def is_none(self) -> bool:
        """Whether nothing is limited."""
        return self == NO_LIMITS


NO_LIMITS: Final = AccessLimits()


@dataclass(frozen=True, slots=True, kw_only=True)
class Tenant:
    """People or programs that share a fleet's bill. `priority` is the most urgent class that its requests may have and
    the one they have unless they ask for less; `weight` is its share of a model's tokens beside other tenants of that
    class. Raises ValueError for a name that is none, OutOfBounds for numbers out of range."""

    name: str
    limits: AccessLimits = NO_LIMITS
    model_limits: Mapping[str, AccessLimits] = field(default_factory=dict)  # by model name or pattern; the first match
    priority: Priority = Priority.STANDARD
    weight: float = 1.0
    revision: int = 0  # grows with each change
    source: str = ""  # path of its file; empty: created over REST

    def __post_init__(self) -> None:
        check_name(self.name)
        check_bounds(self, weight=0.001, most={"weight": 1000.0})


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiKey:
    """A named key of a tenant. Times are epoch seconds, 0: never. `models`: names, aliases or patterns (`org/*`). A key
    that was revoked opens nothing, also where the clock is behind that of who revoked it.
    Raises ValueError for an id or a name that is none."""

    key_id: str
    tenant: str
    name: str
    sha256: str  # hex, of the whole key
    models: tuple[str, ...] = ("*",)
    surfaces: tuple[Surface, ...] = (Surface.DATA,)
    limits: AccessLimits = NO_LIMITS
    priority: Priority | None = None  # None: the tenant's
    created_at: float = 0.0
    expires_at: float = 0.0
    revoked_at: float = 0.0
    revision: int = 0  # grows with each change
    source: str = ""  # path of its file; empty: created over REST

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
        """What may be shown of the key."""
        return prefix_of(self.key_id)

    def fits(self, presented: str) -> bool:
        """Return whether a client presents this key, in a time that does not tell how much of it is right."""
        return hmac.compare_digest(digest_of(presented), self.sha256)

    @property
    def ends_at(self) -> float:
        """When the key ends or ended, in epoch seconds; 0: never."""
        return min((at_s for at_s in (self.revoked_at, self.expires_at) if at_s), default=0.0)

    def ended(self, now_s: float) -> str:
        """Return "revoked" or "expired", or "" while the key opens anything."""
        if self.revoked_at:
            return "revoked"
        return "expired" if self.expires_at and self.expires_at <= now_s else ""

    def opens(self, surface: Surface) -> bool:
        """Return whether the key opens the surface, by itself or within a greater one."""
        return surface in self.surfaces or (surface in _ROLE_OF and self.role.includes(_ROLE_OF[surface]))

    @property
    def role(self) -> Role:
        """The greatest role that the key gives at the services' REST and at the console."""
        return max((_ROLE_OF.get(surface, Role.NONE) for surface in self.surfaces), default=Role.NONE, key=_ROLES.index)

    def allows(self, names: Iterable[str]) -> bool:
        """Return whether the key may use the model of these names (its name, key and aliases)."""
        return any(fnmatchcase(name, pattern) for name in names for pattern in self.models)


def find_key(keys: Mapping[str, ApiKey], presented: str, now_s: float) -> ApiKey | None:
    """The key that a client presents, of those by id; None where it is none of them, revoked or expired."""
    key = keys.get(key_id_of(presented))
    return key if key is not None and key.fits(presented) and not key.ended(now_s) else None


def check_name(name: str) -> None:
    """Raise ValueError unless `name` can be a tenant's or a key's: 1 to 64 letters, digits and `._@-`."""
    if not _NAME.fullmatch(name):
        raise ValueError(f"{name[:80]!r} is no name: 1 to 64 letters, digits and ._@-, a letter or digit first")


def prefix_of(key_id: str) -> str:
    """What may be shown of the key of that id; "" without one."""
    return f"gp-{key_id}" if key_id else ""


def key_id_of(presented: str) -> str:
    """The id within a key as a client presents it, or "" where it has not the form of one."""
    found = _KEY.fullmatch(presented)
    return found[1] if found else ""


def digest_of(presented: str) -> str:
    """The hex SHA-256 that is kept of a key."""
    return hashlib.sha256(presented.encode()).hexdigest()
