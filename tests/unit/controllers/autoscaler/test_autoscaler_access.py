"""Tenants and keys of the autoscaler."""

from dataclasses import replace

import pytest

from glowplug.controllers.autoscaler.access import FORGET_S, AccessRows, PutKey, PutTenant, RemoveTenant, RevokeKey
from glowplug.controllers.effects import Publish, Remove, Save
from glowplug.domain.access import KEYS, TENANTS, ApiKey, Tenant
from glowplug.domain.errors import Conflict, NotFound
from glowplug.events.facts import KeyChanged, KeyRemoved, TenantChanged, TenantRemoved
from tests.fleet_builder import an_event

NOW = 1_000_000.0
DAY_S = 86_400.0


def a_key(key_id: str = "aaaaaaaa", tenant: str = "acme", **more: object) -> ApiKey:
    return ApiKey(key_id=key_id, tenant=tenant, name="bot", sha256="0" * 64, **more)  # type: ignore[arg-type]


def done(rows: AccessRows, request: object, now_s: float = NOW) -> list[object]:
    return list(rows.handlers[type(request)](request, now_s))


@pytest.fixture
def rows() -> AccessRows:
    made = AccessRows()
    done(made, PutTenant(Tenant(name="acme")))
    done(made, PutKey(a_key()))
    return made


def test_a_new_row_is_saved_and_told_and_the_same_again_is_no_news() -> None:
    rows = AccessRows()
    saved, told = done(rows, PutTenant(Tenant(name="acme", weight=2.0)))
    assert isinstance(saved, Save) and (saved.table, saved.key) == (TENANTS, "acme")
    assert isinstance(told, Publish) and told.payload == TenantChanged(tenant=rows.tenants["acme"])
    assert done(rows, PutTenant(Tenant(name="acme", weight=2.0)), NOW + 1) == []
    before = rows.tenants["acme"].revision
    done(rows, PutTenant(Tenant(name="acme", weight=3.0)), NOW)
    assert rows.tenants["acme"].revision > before, "it grows though the clock stands"


def test_a_key_needs_its_tenant() -> None:
    with pytest.raises(NotFound, match="no tenant 'acme'"):
        done(AccessRows(), PutKey(a_key()))


def test_a_row_changes_only_where_it_was_made(rows: AccessRows) -> None:
    with pytest.raises(Conflict, match="by REST"):
        done(rows, PutTenant(Tenant(name="acme", source="/f.yaml")))
    done(rows, PutTenant(Tenant(name="filed", source="/f.yaml")))
    done(rows, PutKey(a_key("bbbbbbbb", "filed", source="/f.yaml")))
    with pytest.raises(Conflict, match=r"file /f\.yaml"):
        done(rows, RevokeKey("bbbbbbbb", at=NOW + DAY_S))
    with pytest.raises(Conflict, match=r"file /f\.yaml"):
        done(rows, RemoveTenant("filed", with_keys=True))
    assert done(rows, RevokeKey("bbbbbbbb")), "a revocation is taken from anywhere"
    done(rows, PutKey(a_key("bbbbbbbb", "filed", source="/f.yaml", models=("x",))))
    assert rows.keys["bbbbbbbb"].revoked_at, "and its file does not undo it"


def test_a_revoked_key_keeps_its_row_and_stays_revoked(rows: AccessRows) -> None:
    _, told = done(rows, RevokeKey("aaaaaaaa"), NOW + 1)
    assert isinstance(told, Publish) and isinstance(told.payload, KeyChanged)
    assert rows.keys["aaaaaaaa"].ended(NOW + 1) == "revoked"
    assert done(rows, RevokeKey("aaaaaaaa"), NOW + 2) == []
    done(rows, PutKey(replace(a_key(), models=("x",))), NOW + 3)
    assert rows.keys["aaaaaaaa"].ended(NOW + 3) == "revoked"


def test_a_key_that_is_to_end_later_expires_then_or_earlier(rows: AccessRows) -> None:
    done(rows, RevokeKey("aaaaaaaa", at=NOW + DAY_S))
    assert rows.keys["aaaaaaaa"].expires_at == NOW + DAY_S and not rows.keys["aaaaaaaa"].revoked_at
    done(rows, RevokeKey("aaaaaaaa", at=NOW + 2 * DAY_S))
    assert rows.keys["aaaaaaaa"].expires_at == NOW + DAY_S


def test_a_tenant_with_living_keys_is_removed_only_with_them(rows: AccessRows) -> None:
    with pytest.raises(Conflict, match="has 1 keys"):
        done(rows, RemoveTenant("acme"))
    done(rows, RemoveTenant("acme", with_keys=True))
    assert not rows.tenants and rows.keys["aaaaaaaa"].ended(NOW) == "revoked"
    with pytest.raises(NotFound):
        done(rows, RemoveTenant("acme"))


def test_a_key_that_has_been_over_for_long_is_removed_and_one_of_a_file_is_not(rows: AccessRows) -> None:
    done(rows, PutTenant(Tenant(name="filed", source="/f.yaml")))
    done(rows, PutKey(a_key("bbbbbbbb", "filed", source="/f.yaml", expires_at=NOW)))
    done(rows, RevokeKey("aaaaaaaa"))
    revision = rows.keys["aaaaaaaa"].revision
    assert rows.tick(NOW + FORGET_S - 1) == []
    removed, told = rows.tick(NOW + FORGET_S + 600)
    assert removed == Remove(KEYS, "aaaaaaaa")
    assert isinstance(told, Publish) and told.payload == KeyRemoved(key_id="aaaaaaaa", revision=revision)
    assert set(rows.keys) == {"bbbbbbbb"}


def test_a_lost_row_is_written_again_and_a_removed_one_removed_again(rows: AccessRows) -> None:
    key, tenant = rows.keys["aaaaaaaa"], rows.tenants["acme"]
    assert rows.restore(KEYS, {}, NOW) == [Save(KEYS, "aaaaaaaa", key)]
    done(rows, RemoveTenant("acme", with_keys=True))
    assert rows.restore(TENANTS, {"acme": tenant}, NOW) == [Remove(TENANTS, "acme")], "read before it was removed"
    assert rows.restore(TENANTS, {}, NOW) == []
    younger = replace(tenant, revision=tenant.revision + 10)
    rows.restore(TENANTS, {"acme": younger}, NOW)
    assert rows.tenants["acme"] == younger, "another leader has made it anew"


def test_an_older_row_replaces_nothing(rows: AccessRows) -> None:
    old = rows.keys["aaaaaaaa"]
    done(rows, RevokeKey("aaaaaaaa"), NOW + 1)
    assert rows.restore(KEYS, {"aaaaaaaa": old}, NOW + 2) == []
    assert rows.keys["aaaaaaaa"].revoked_at


def test_what_another_leader_removed_is_forgotten_unless_it_is_younger(rows: AccessRows) -> None:
    known = rows.tenants["acme"].revision
    for revision, expected in ((known - 1, {"acme"}), (known, set())):
        fact = TenantRemoved(tenant_name="acme", revision=revision)
        rows.handlers[TenantRemoved](an_event(fact), NOW)
        assert set(rows.tenants) == expected


def test_a_successor_takes_what_is_known_but_not_what_the_store_has_lacked_for_long(rows: AccessRows) -> None:
    done(rows, PutTenant(Tenant(name="other")))
    rows.restore(TENANTS, {"other": rows.tenants["other"]}, NOW)  # acme's row is missing
    for wait_s, expected in ((5.0, {"acme", "other"}), (31.0, {"other"})):
        successor = AccessRows()
        successor.inherit(rows, NOW + wait_s, absent_s=30.0)
        assert set(successor.tenants) == expected
        assert set(successor.keys) == {"aaaaaaaa"}
