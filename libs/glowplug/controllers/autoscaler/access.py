"""Tenants and keys, as one autoscaler declares them.

Rows come from REST (`source` "") or files, and change only there. As with models, a lost row is written again and a
removed one stays removed. An ended key keeps its row for `FORGET_S`, a file's for good, lest it seem not yet arrived.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from glowplug.controllers.effects import Effect, Publish, Remove, Save
from glowplug.domain.access import KEYS, TENANTS, ApiKey, Tenant
from glowplug.domain.declared import declared_by
from glowplug.domain.errors import Conflict, NotFound
from glowplug.events import Event
from glowplug.events.facts import KeyChanged, KeyRemoved, TenantChanged, TenantRemoved

FORGET_S: Final = 30 * 86_400.0
LOOK_EVERY_S: Final = 600.0


@dataclass(frozen=True, slots=True)
class PutTenant:
    """Create or change a tenant; `revision` is set here. Raises Conflict if declared elsewhere than `was_of`."""

    tenant: Tenant
    was_of: str = ""  # a source that declares it no more


@dataclass(frozen=True, slots=True)
class RemoveTenant:
    """Raises NotFound; Conflict if declared elsewhere, or with live keys unless `with_keys` revokes them."""

    name: str
    source: str = ""
    with_keys: bool = False


@dataclass(frozen=True, slots=True)
class PutKey:
    """Create or change a key. Raises NotFound for its tenant, Conflict if declared elsewhere than `was_of`."""

    api_key: ApiKey
    was_of: str = ""


@dataclass(frozen=True, slots=True)
class RevokeKey:
    """End a key at `at`, epoch seconds, or now. A revocation now is accepted from anywhere, and no file undoes it.
    Raises NotFound; Conflict for a later end of a key declared elsewhere."""

    key_id: str
    source: str = ""
    at: float = 0.0


Request = PutTenant | RemoveTenant | PutKey | RevokeKey


class AccessRows:
    def __init__(self) -> None:
        self.tenants: dict[str, Tenant] = {}
        self.keys: dict[str, ApiKey] = {}
        self._rows: dict[str, dict[str, Any]] = {TENANTS: self.tenants, KEYS: self.keys}
        self._removed: dict[tuple[str, str], int] = {}  # last revision, until the row has left the table
        self._absent: dict[tuple[str, str], float] = {}  # since when the table, not empty, lacks the row
        self._looks_at = 0.0
        self.handlers: dict[type[Any], Callable[[Any, float], list[Effect]]] = {
            PutTenant: self._put_tenant,
            RemoveTenant: self._remove_tenant,
            PutKey: self._put_key,
            RevokeKey: self._revoke_key,
            TenantRemoved: self._was_removed,
            KeyRemoved: self._was_removed,
        }

    def key(self, key_id: str) -> ApiKey:
        """Raises NotFound."""
        if (row := self.keys.get(key_id)) is None:
            raise NotFound(f"there is no key {key_id[:80]!r}", param="key_id")
        return row

    def tenant(self, name: str) -> Tenant:
        """Raises NotFound."""
        if (row := self.tenants.get(name)) is None:
            raise NotFound(f"there is no tenant {name[:80]!r}", param="tenant")
        return row

    def keys_of(self, tenant: str, now_s: float) -> list[ApiKey]:
        return sorted(
            (key for key in self.keys.values() if key.tenant == tenant and not key.ended(now_s)), key=lambda k: k.key_id
        )

    def tick(self, now_s: float) -> list[Effect]:
        if now_s < self._looks_at:
            return []
        self._looks_at = now_s + LOOK_EVERY_S
        over = [key for key in self.keys.values() if not key.source and 0 < key.ends_at <= now_s - FORGET_S]
        return [effect for key in over for effect in self._remove(KeyRemoved(key_id=key.key_id, revision=key.revision))]

    # requests

    def _put_tenant(self, request: PutTenant, now_s: float) -> list[Effect]:
        given = request.tenant
        known = self.tenants.get(given.name)
        _check_source(f"tenant {given.name!r}", known, given.source, request.was_of)
        if known is not None and replace(given, revision=known.revision) == known:
            return []
        row = replace(given, revision=self._revision(TENANTS, given.name, now_s))
        return self._keep(TENANTS, row.name, row, TenantChanged(tenant=row))

    def _remove_tenant(self, request: RemoveTenant, now_s: float) -> list[Effect]:
        tenant = self.tenant(request.name)
        _check_source(f"tenant {tenant.name!r}", tenant, request.source)
        living = self.keys_of(tenant.name, now_s)
        if living and not request.with_keys:
            raise Conflict(f"tenant {tenant.name!r} has {len(living)} keys that are not over", param="tenant")
        effects: list[Effect] = []
        for key in living:
            effects += self._end(key, now_s, now_s)
        return [*effects, *self._remove(TenantRemoved(tenant_name=tenant.name, revision=tenant.revision))]

    def _put_key(self, request: PutKey, now_s: float) -> list[Effect]:
        given = request.api_key
        self.tenant(given.tenant)
        known = self.keys.get(given.key_id)
        _check_source(f"key {given.key_id!r}", known, given.source, request.was_of)
        if known is not None:
            given = replace(given, created_at=known.created_at, revoked_at=given.revoked_at or known.revoked_at)
            if replace(given, revision=known.revision) == known:
                return []
        row = replace(given, created_at=given.created_at or now_s, revision=self._revision(KEYS, given.key_id, now_s))
        return self._keep(KEYS, row.key_id, row, KeyChanged(api_key=row))

    def _revoke_key(self, request: RevokeKey, now_s: float) -> list[Effect]:
        key = self.key(request.key_id)
        if request.at > now_s:
            _check_source(f"key {key.key_id!r}", key, request.source)
        return [] if key.ended(now_s) == "revoked" else self._end(key, request.at or now_s, now_s)

    def _end(self, key: ApiKey, at: float, now_s: float) -> list[Effect]:
        """Revoke now, or expire at `at`."""
        revision = self._revision(KEYS, key.key_id, now_s)
        if at <= now_s:
            row = replace(key, revision=revision, revoked_at=now_s)
        else:
            row = replace(key, revision=revision, expires_at=min(at, key.expires_at or at))
        return self._keep(KEYS, row.key_id, row, KeyChanged(api_key=row))

    def _keep(self, table: str, name: str, row: Any, fact: KeyChanged | TenantChanged) -> list[Effect]:
        self._rows[table][name] = row
        self._removed.pop((table, name), None)
        return [_save(table, name, row), Publish(fact)]

    def _remove(self, fact: KeyRemoved | TenantRemoved) -> list[Effect]:
        table, name = _place(fact)
        del self._rows[table][name]
        self._removed[table, name] = fact.revision
        self._absent.pop((table, name), None)
        return [_removal(table, name), Publish(fact)]

    def _revision(self, table: str, name: str, now_s: float) -> int:
        known = self._rows[table].get(name)
        last = known.revision if known is not None else self._removed.get((table, name), -1)
        return max(int(now_s * 1000), last + 1)

    # the table, and other leaders

    def _was_removed(self, event: Event, now_s: float) -> list[Effect]:
        """Forget a row removed by another leader; a younger one stays."""
        table, name = _place(event.data)
        row = self._rows[table].get(name)
        if row is not None and row.revision <= event.data.revision:
            del self._rows[table][name]
        return []

    def restore(self, table: str, rows: Mapping[str, Any], now_s: float) -> list[Effect]:
        """Rewrite lost rows and remove removed ones; the table may have been read before the latest write."""
        mine, effects = self._rows[table], list[Effect]()
        for name, row in rows.items():
            self._absent.pop((table, name), None)
            removed, known = self._removed.get((table, name)), mine.get(name)
            if removed is not None and row.revision <= removed:
                effects.append(_removal(table, name))
            elif known is None or row.revision > known.revision:
                mine[name] = row
                self._removed.pop((table, name), None)
        for one in [one for one in self._removed if one[0] == table and one[1] not in rows]:
            del self._removed[one]
        for name in mine.keys() - rows.keys():
            effects.append(_save(table, name, mine[name]))
            if rows:
                self._absent.setdefault((table, name), now_s)
            else:
                self._absent.pop((table, name), None)
        return effects

    def inherit(self, earlier: "AccessRows", now_s: float, absent_s: float) -> None:
        """Take over rows, so that an emptied store gets them again; not those that it has lacked for more than
        `absent_s` while it had others."""
        self._removed = dict(earlier._removed)
        for table, rows in earlier._rows.items():
            for name, row in rows.items():
                since = earlier._absent.get((table, name))
                if since is None or now_s - since <= absent_s:
                    self._rows[table][name] = row
                    if since is not None:
                        self._absent[table, name] = since


def _place(fact: KeyRemoved | TenantRemoved) -> tuple[str, str]:
    return (KEYS, fact.key_id) if isinstance(fact, KeyRemoved) else (TENANTS, fact.tenant_name)


def _save(table: str, name: str, row: Any) -> Save:
    return Save(KEYS, name, row) if table == KEYS else Save(TENANTS, name, row)


def _removal(table: str, name: str) -> Remove:
    return Remove(KEYS, name) if table == KEYS else Remove(TENANTS, name)


def _check_source(what: str, known: Tenant | ApiKey | None, source: str, was_of: str = "") -> None:
    """Raise Conflict unless declared by the same source, or by `was_of`."""
    if known is not None and known.source != source and not (was_of and known.source == was_of):
        raise Conflict(f"{what} is declared by {declared_by(known.source)}; it can only be changed there")
