"""The router's keys and tenants: who sends a request, and which models are open to the sender.

The rules are those of fleet/tables.py: an older row never replaces a newer one, so a revoked key stays revoked; an
emptied store takes no key away, a fact does at once. A warm request costs one look-up: presented keys keep their
callers until their row or any tenant changes.
"""

import re
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import translate
from functools import lru_cache
from typing import Any, Final, Generic

import msgspec

from glowplug.domain.access import (
    KEYS,
    NO_LIMITS,
    SHARED_TENANT,
    TENANTS,
    AccessLimits,
    ApiKey,
    Priority,
    Surface,
    Tenant,
    key_id_of,
    prefix_of,
)
from glowplug.domain.model import Model
from glowplug.events import Event, facts
from glowplug.fleet.tables import ABSENT_S, NUM_TOMBSTONES, Rows, RowT
from glowplug.policies.limits.scope import Scope
from glowplug.services.router.api_errors import ApiError

MAX_PRESENTED: Final = 16_384
MAX_MODELS: Final = 256
NEVER: Final = float("inf")
FACTS: Final = (facts.KeyChanged, facts.KeyRemoved, facts.TenantChanged, facts.TenantRemoved)
_TIERS = {"priority": Priority.INTERACTIVE, "flex": Priority.BATCH}  # OpenAI's service_tier
_WILDCARD = re.compile(r"[*?\[]")


class Patterns:
    """Names and patterns of models, compared as `fnmatch` does."""

    def __init__(self, patterns: Iterable[str]) -> None:
        patterns = tuple(patterns)
        wild = [pattern for pattern in patterns if _WILDCARD.search(pattern)]
        self.has_all = "*" in patterns
        self._exact = frozenset(patterns).difference(wild)
        self._wild = re.compile("|".join(map(translate, wild))).match if wild else None

    def match(self, names: Iterable[str]) -> bool:
        return self.has_all or any(name in self._exact or (self._wild and self._wild(name)) for name in names)


patterns_of = lru_cache(maxsize=1024)(Patterns)
EVERYTHING: Final = patterns_of(("*",))


@dataclass(slots=True, eq=False, kw_only=True)
class Caller:
    """The sender of a request; `key_id` "": without a key of its own. Times are epoch seconds."""

    tenant: str = SHARED_TENANT
    key_id: str = ""
    weight: float = 1.0
    priority: Priority = Priority.STANDARD  # the default, and the most urgent one
    key_limits: AccessLimits = NO_LIMITS
    tenant_limits: AccessLimits = NO_LIMITS
    model_limits: Mapping[str, AccessLimits] = field(default_factory=dict)  # the tenant's, by model name or pattern
    models: Patterns = EVERYTHING
    has_data: bool = True
    ended: str = ""  # how the key ends at `ends_at`
    ends_at: float = NEVER
    classes: Mapping[Any, Priority] = field(default_factory=dict)  # by OpenAI's service_tier; others: `priority`
    has_limits: bool = False
    _scopes: tuple[Scope, ...] = ()
    _at: dict[str, "_AtModel"] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.tenant_limits.is_none:
            self._scopes = (_tenant_scope(self.tenant, self.tenant_limits),)
        if not self.key_limits.is_none:
            self._scopes += (Scope(f"key/{self.key_id}", self.key_limits),)
        self.has_limits = bool(self._scopes or self.model_limits)
        self.classes = _classes_of(self.priority)

    @property
    def prefix(self) -> str:
        """The part of the key that may be shown; "" without one."""
        return prefix_of(self.key_id)

    def may_use(self, model: Model) -> bool:
        return self.models.has_all or self._at_model(model).may_use

    def scopes_at(self, model: Model) -> tuple[Scope, ...]:
        """Return the limiting scopes: tenant, key, tenant at this model."""
        return self._at_model(model).scopes if self.model_limits else self._scopes

    def those_of(self, models: Iterable[Model]) -> list[Model]:
        return [model for model in models if self.models.match(_names(model))]

    def _at_model(self, model: Model) -> "_AtModel":
        found = self._at.get(model.key)
        if found is None or found.model is not model:
            names = _names(model)
            limits = (limits for name, limits in self.model_limits.items() if patterns_of((name,)).match(names))
            limit = next(limits, NO_LIMITS)
            here = () if limit.is_none else (Scope(f"model/{self.tenant}/{model.key}", limit),)
            found = _AtModel(model, self.models.match(names), (*self._scopes, *here))
            if len(self._at) >= MAX_MODELS:
                self._at.clear()
            self._at[model.key] = found
        return found


@lru_cache(maxsize=1024)
def _tenant_scope(tenant: str, limits: AccessLimits) -> Scope:
    return Scope(f"tenant/{tenant}", limits)


@lru_cache
def _classes_of(most: Priority) -> Mapping[Any, Priority]:
    return {tier: asked if asked.rank > most.rank else most for tier, asked in _TIERS.items()}


@dataclass(frozen=True, slots=True)
class _AtModel:
    model: Model
    may_use: bool
    scopes: tuple[Scope, ...]


def _names(model: Model) -> tuple[str, ...]:
    return (model.key, *model.names)


ANYBODY: Final = Caller()  # before the sender is known, or where no key is needed


def wrong_key() -> ApiError:
    return _unauthorized("The API key is missing or wrong (`Authorization: Bearer ...`, or `x-api-key`).")


def _unauthorized(message: str) -> ApiError:
    return ApiError(401, message, "invalid_request_error", "invalid_api_key")


def _closed(caller: Caller, now_s: float) -> ApiError:
    if caller.ends_at <= now_s:
        return _unauthorized(f"The API key {caller.prefix} is {caller.ended}.")
    text = f"The API key {caller.prefix} does not open the data port: `{Surface.DATA}` is not one of its surfaces."
    return ApiError(403, text, "permission_error", "permission_denied")


class _Table(Rows[RowT], Generic[RowT]):
    """The rows of one table. A removed row stays away until a later fact, or a reading `absent_s` later."""

    def __init__(self, absent_s: float = ABSENT_S) -> None:
        super().__init__(absent_s)
        self._removed: dict[
            str, tuple[float, float]
        ] = {}  # id -> time of removal, by the clocks of the fact and of this router

    def changed(self, key: str, row: RowT, occurred_at: float, now_s: float) -> bool:
        """Take a fact's row. Returns whether it is news."""
        if occurred_at <= self._removed.get(key, (-NEVER, 0.0))[0]:
            return False
        self._removed.pop(key, None)
        return self._take(key, row, now_s)

    def removed(self, key: str, occurred_at: float, now_s: float) -> bool:
        """Drop a row. Returns whether it was known."""
        self._removed[key] = occurred_at, now_s
        if len(self._removed) > NUM_TOMBSTONES:
            del self._removed[next(iter(self._removed))]
        return self._forget(key)

    def restore(self, rows: Mapping[str, RowT], now_s: float) -> bool:
        """Take the whole table; an empty one comes from a store that lost its rows. Returns whether any row changed."""
        if not rows:
            self._missed_since = {}
            return False
        gone = [key for key in self._missing(rows, now_s) if key not in rows]
        changes = [self._forget(key) for key in gone]
        changes += [self._take(key, row, now_s) for key, row in rows.items() if self._is_back(key, now_s)]
        return any(changes)

    def _is_back(self, key: str, now_s: float) -> bool:
        return not self._removed or now_s - self._removed.get(key, (0.0, -NEVER))[1] > self._absent_s

    def _take(self, key: str, row: RowT, now_s: float) -> bool:
        known = self.by_id.get(key)
        if known is row:
            self._reported_at[key] = now_s
            return False
        is_news = self._is_news(key, row, now_s)
        if is_news or row == known:  # so that the next reading finds the same object
            self.by_id[key] = row
        return is_news

    def _forget(self, key: str) -> bool:
        self._reported_at.pop(key, None)
        return self.by_id.pop(key, None) is not None


class KeyCopy(msgspec.Struct):
    """A ring's start while the store is down, trusted at any age; revoked keys are included."""

    had_keys: bool
    keys: list[ApiKey]
    tenants: list[Tenant]


class KeyRing:
    """The keys and tenants of the fleet. `clock`: seconds since the epoch."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._keys, self._tenants = _Table[ApiKey](), _Table[Tenant]()
        self._clock = clock
        self._known: dict[bytes, Caller] = {}  # valid ones only
        self._presented: dict[str, bytes] = {}  # key id -> key of `_known`
        self.shared = ANYBODY  # the caller with the fleet's one key, or without any
        self.asks_for_key = False
        self._had_keys = False  # a named key exists, or the last one was not removed by a fact
        self._may_have_keys = False  # rows of keys were unreadable
        self.num_changes = 0
        self._has_limits, self._limits_at = False, 0

    @property
    def rows(self) -> Mapping[str, ApiKey]:
        return self._keys.by_id

    @property
    def copied(self) -> "KeyCopy":
        return KeyCopy(self._had_keys, list(self._keys.by_id.values()), list(self._tenants.by_id.values()))

    def start_from(self, copy: "KeyCopy | None") -> None:
        """Start from a copy, which may be old; None: it is unreadable."""
        if copy is None:
            self.restore(KEYS, {}, num_unreadable=1)
            return
        self.restore(TENANTS, {tenant.name: tenant for tenant in copy.tenants}, is_copy=True)
        self.restore(KEYS, {key.key_id: key for key in copy.keys}, is_copy=True, had_keys=copy.had_keys)

    def find(self, presented: bytes) -> Caller:
        """Return the key's caller. Raises ApiError: 401 for an unknown, revoked or expired key, 403 for one that does
        not open the data port."""
        caller = self._known.get(presented)
        if caller is None:
            caller = self._look_up(presented)
        if not caller.has_data or (caller.ends_at != NEVER and caller.ends_at <= self._clock()):
            raise _closed(caller, self._clock())
        return caller

    def caller_of(self, tenant: str, key_id: str) -> Caller:
        """Return the caller by key id; "": without a key of its own. Raises ApiError as `find` does."""
        if not key_id:
            return self.shared
        row, owner = self._keys.by_id.get(key_id), self._tenants.by_id.get(tenant)
        if row is None or owner is None or row.tenant != tenant:
            raise _unauthorized(f"The API key {prefix_of(key_id)} no longer exists.")
        caller = _caller(owner, row)
        if caller.ends_at <= self._clock() or not caller.has_data:
            raise _closed(caller, self._clock())
        return caller

    def _look_up(self, presented: bytes) -> Caller:
        text = presented.decode("latin-1")
        row = self._keys.by_id.get(key_id_of(text))
        if row is None or not row.fits(text):
            raise wrong_key()
        tenant = self._tenants.by_id.get(row.tenant)
        if tenant is None:
            raise _unauthorized(f"The API key {row.prefix} belongs to a tenant that does not exist.")
        caller = _caller(tenant, row)
        if len(self._known) >= MAX_PRESENTED:
            oldest = next(iter(self._known))
            self._presented.pop(self._known.pop(oldest).key_id, None)
        self._known[presented], self._presented[row.key_id] = caller, presented
        return caller

    # -- changes -------------------------------------------------------------------------------------------------

    def take(self, event: Event) -> None:
        fact, at, now_s, key_id = event.data, event.occurred_at, self._clock(), ""
        if isinstance(fact, facts.KeyChanged):
            key_id = fact.api_key.key_id
            is_news = self._keys.changed(key_id, fact.api_key, at, now_s)
        elif isinstance(fact, facts.KeyRemoved):
            key_id = fact.key_id
            is_news = self._keys.removed(key_id, at, now_s)
            self._had_keys = bool(self._keys.by_id)
        elif isinstance(fact, facts.TenantChanged):
            is_news = self._tenants.changed(fact.tenant.name, fact.tenant, at, now_s)
        else:
            is_news = self._tenants.removed(fact.tenant_name, at, now_s)
        if is_news:
            self._changed(key_id)

    def restore(
        self,
        table: str,
        rows: Mapping[str, Any],
        *,
        is_copy: bool = False,
        num_unreadable: int = 0,
        had_keys: bool = False,
    ) -> None:
        """Take the whole table `keys` or `tenants`. `is_copy`: an old one, from a time when the fleet `had_keys`; the
        store's first reading drops rows it lacks. With `num_unreadable` rows calls need a key, even if none is
        known."""
        held: _Table[Any] | None = self._keys if table == KEYS else self._tenants if table == TENANTS else None
        if held is None:
            return
        is_news = held.restore(rows, self._clock())
        if is_copy:
            held.doubt()
        if table == KEYS:
            self._had_keys = self._had_keys or had_keys
            self._may_have_keys = num_unreadable > 0
        if is_news or self.asks_for_key != self._needs_key():
            self._changed()

    def _needs_key(self) -> bool:
        return self._had_keys or self._may_have_keys or bool(self._keys.by_id)

    def has_limits(self) -> bool:
        if self._limits_at != self.num_changes:
            self._limits_at = self.num_changes
            tenants, keys = self._tenants.by_id.values(), self._keys.by_id.values()
            self._has_limits = any(t.model_limits or not t.limits.is_none for t in tenants)
            self._has_limits = self._has_limits or any(not key.limits.is_none for key in keys)
        return self._has_limits

    def _changed(self, key_id: str = "") -> None:
        if key_id:
            self._known.pop(self._presented.pop(key_id, b""), None)
        else:
            self._known.clear()
            self._presented.clear()
        self._had_keys = self._had_keys or bool(self._keys.by_id)
        self.asks_for_key = self._needs_key()
        self.shared = _caller(self._tenants.by_id.get(SHARED_TENANT))
        self.num_changes += 1


def _caller(tenant: Tenant | None, row: ApiKey | None = None) -> Caller:
    if tenant is None:
        return ANYBODY
    given: dict[str, Any] = {
        "tenant": tenant.name,
        "weight": tenant.weight,
        "priority": tenant.priority,
        "tenant_limits": tenant.limits,
        "model_limits": tenant.model_limits,
    }
    if row is None:
        return Caller(**given)
    if row.revoked_at:  # at once, by any clock
        ended, ends_at = "revoked", -NEVER
    else:
        ended, ends_at = ("expired", row.expires_at) if row.expires_at else ("", NEVER)
    given["priority"] = max(row.priority or tenant.priority, tenant.priority, key=lambda priority: priority.rank)
    return Caller(
        **given,
        key_id=row.key_id,
        key_limits=row.limits,
        models=patterns_of(row.models),
        has_data=row.opens(Surface.DATA),
        ended=ended,
        ends_at=ends_at,
    )
