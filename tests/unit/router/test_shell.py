"""The copied tables from which a router starts without the store."""

import asyncio
import os
import time
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from glowplug.bus.memory_bus import MemoryBus
from glowplug.controllers.effects import Publish, Tick
from glowplug.controllers.router.controller import RouterController
from glowplug.controllers.router.messages import BusRefuses
from glowplug.domain.access import Tenant
from glowplug.events.envelope import to_json
from glowplug.events.facts import KeyChanged, ModelDeployed, RouterUsageReported
from glowplug.fleet.tables import FleetTables
from glowplug.runtime.service import World
from glowplug.services.router import shell as routers_shell
from glowplug.services.router.api_errors import ApiError
from glowplug.services.router.exchange import Exchange
from glowplug.services.router.keys import KeyRing
from glowplug.services.router.request_table import RequestTable
from glowplug.services.router.settings import RouterSettings
from glowplug.services.router.shell import KeysCopy, RouterShell, TablesCopy
from glowplug.state.memory_store import MemoryStore
from glowplug.telemetry.metrics import ShellMetrics
from tests import fleet_builder
from tests.contract.data_port_rig import a_model, an_instance
from tests.contract.keys_rig import KEY, a_key, secret_of, tell
from tests.waiting import until


def filled() -> FleetTables:
    fleet = FleetTables()
    fleet.model_table.apply(a_model(), 0.0)
    fleet.instance_table.apply(an_instance("i-1", "http://x:1"), 0.0)
    return fleet


def test_what_is_written_is_read(tmp_path: Path) -> None:
    copy = TablesCopy(tmp_path / "deep" / "tables.json")
    copy.write(filled(), 100.0)
    assert copy.read(101.0) == ({"m": a_model()}, {"i-1": an_instance("i-1", "http://x:1")})


def test_old_addresses_are_not_trusted_but_models_are(tmp_path: Path) -> None:
    copy = TablesCopy(tmp_path / "tables.json", max_age_s=10.0)
    copy.write(filled(), 100.0)
    assert copy.read(110.0) == ({"m": a_model()}, {})
    assert copy.read(109.9) == ({"m": a_model()}, {"i-1": an_instance("i-1", "http://x:1")})


def test_a_copy_is_written_again_when_it_changes_or_ages_or_is_gone(tmp_path: Path) -> None:
    path, fleet = tmp_path / "tables.json", filled()
    copy = TablesCopy(path, max_age_s=8.0)

    def is_written(now_s: float) -> bool:
        if path.exists():
            os.utime(path, (100.0, 100.0))
        copy.write(fleet, now_s)
        return path.stat().st_mtime != 100.0

    assert is_written(100.0) and not is_written(101.9) and is_written(102.0)
    fleet.model_table.apply(a_model("n"), 0.0)
    assert is_written(101.0) and not is_written(101.0)
    path.unlink()
    assert is_written(101.0)


def test_no_copy_is_none(tmp_path: Path) -> None:
    assert TablesCopy(tmp_path / "tables.json").read(0.0) is None


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"\xff",
        b'{"written_at": "now"',
        b'{"written_at": 1e400, "models": [], "instances": []}',
        b'{"written_at": "nan", "models": [], "instances": []}',
        b'{"written_at": 0, "models": ["\xff"], "instances": []}',
        b'{"written_at": 0, "models": [{}], "instances": []}',
        b'{"written_at": 0, "models": ' + b"[" * 100_000,
        b'{"written_at": ' + b"9" * 5000 + b', "models": [], "instances": []}',
    ],
)
def test_a_broken_copy_is_none(tmp_path: Path, raw: bytes) -> None:
    (tmp_path / "tables.json").write_bytes(raw)
    assert TablesCopy(tmp_path / "tables.json").read(0.0) is None


def test_a_disk_that_takes_nothing_does_not_stop_the_router(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    copy = TablesCopy(tmp_path / "file" / "tables.json")
    copy.write(filled(), 100.0)
    assert copy.read(100.0) is None


async def test_what_the_copy_has_and_the_store_has_not_is_dropped_at_its_first_reading_only(tmp_path: Path) -> None:
    """An emptied store stops no warm model, and a copy is of the past."""
    store: Any = MemoryStore()
    bus: Any = MemoryBus()
    settings = RouterSettings(service_id="router-1", state_dir=tmp_path)
    copied = filled()
    copied.instance_table.apply(an_instance("i-2", "http://x:2"), 0.0)
    TablesCopy(tmp_path / "router-1" / "tables.json").write(copied, time.time())
    await store.put("models", "m", to_json(a_model()))
    await store.put("instances", "i-1", to_json(an_instance("i-1", "http://x:1")))
    table = RequestTable[Exchange](RouterController())
    metrics = ShellMetrics("router", CollectorRegistry())
    shell = RouterShell(World(settings, "router", bus, store, metrics), settings, table)
    shell.take_copy()
    assert table.table_loaded and set(table.controller.fleet.instances) == {"i-1", "i-2"}
    assert await shell._resync() and set(table.controller.fleet.instances) == {"i-1"}
    store.tables.clear()
    assert await shell._resync()
    assert set(table.controller.fleet.instances) == {"i-1"} and set(table.controller.fleet.models) == {"m"}


# -- keys ----------------------------------------------------------------------------------------------------------


def a_shell(tmp_path: Path, store: Any) -> tuple[RouterShell, RequestTable[Exchange]]:
    settings = RouterSettings(service_id="router-1", state_dir=tmp_path)
    table = RequestTable[Exchange](RouterController())
    bus: Any = MemoryBus()
    metrics = ShellMetrics("router", CollectorRegistry())
    world = World(settings, "router", bus, store, metrics)
    return RouterShell(world, settings, table), table


def opens(table: RequestTable[Exchange], key_id: str = KEY) -> bool:
    try:
        return bool(table.keys.find(secret_of(key_id).encode()))
    except ApiError:
        return False


async def test_keys_come_by_table_and_fact_and_stay_without_store_and_bus(tmp_path: Path) -> None:
    store = MemoryStore()
    await store.put("models", "m", to_json(a_model()))
    await store.put("tenants", "acme", to_json(Tenant(name="acme")))
    await store.put("keys", KEY, to_json(a_key()))
    shell, table = a_shell(tmp_path, store)
    assert not opens(table) and await shell._resync() and opens(table)
    await shell._handle(fleet_builder.an_event(KeyChanged(api_key=a_key("bbbbbbb2"))))
    revoked = a_key(revision=1, revoked_at=1.0)
    await shell._handle(fleet_builder.an_event(KeyChanged(api_key=revoked)))  # not in the store yet
    await shell._handle(Tick())
    path = tmp_path / "router-1" / "keys.json"
    assert path.stat().st_mode & 0o077 == 0 and secret_of() not in path.read_text()
    shell, table = a_shell(tmp_path, MemoryStore())
    shell.take_copy()
    assert (opens(table), opens(table, "bbbbbbb2")) == (False, True)
    shell, table = a_shell(tmp_path, store)
    shell.take_copy()
    assert await shell._resync() and not opens(table), "the store's older row"


async def test_a_copy_of_the_keys_is_written_when_they_change_only(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    copy, ring = KeysCopy(path), KeyRing()
    copy.write(ring, 10.0)
    assert not path.exists()
    tell(ring, a_key())
    copy.write(ring, 10.0)
    path.unlink()
    copy.write(ring, 20.0)
    assert not path.exists()
    tell(ring, a_key("bbbbbbb2"))
    copy.write(ring, 10.5)
    assert not path.exists(), "within KEYS_EVERY_S"
    copy.write(ring, 9.5)
    assert not path.exists(), "nor where the clock went back"
    copy.write(ring, 11.0)
    again, read = KeyRing(), KeysCopy(path)
    read.read(again)
    assert set(again.rows) == {KEY, "bbbbbbb2"} and again.asks_for_key
    path.unlink()
    read.write(again, 20.0)
    assert not path.exists(), "it is as it was read"


async def test_keys_that_the_disk_did_not_take_are_written_later(tmp_path: Path) -> None:
    (tmp_path / "a").touch()
    copy, ring = KeysCopy(tmp_path / "a" / "keys.json"), KeyRing()
    tell(ring, a_key())
    copy.write(ring, 10.0)
    (tmp_path / "a").unlink()
    copy.write(ring, 10.5)
    assert not (tmp_path / "a").exists(), "within KEYS_EVERY_S"
    copy.write(ring, 11.0)
    assert (tmp_path / "a" / "keys.json").exists()


@pytest.mark.parametrize("raw", [b"", b"\xff", b"{}", b'{"had_keys": true, "keys": [{}], "tenants": []}'])
async def test_a_broken_copy_of_the_keys_closes_the_port_until_the_store_is_read(tmp_path: Path, raw: bytes) -> None:
    (tmp_path / "router-1").mkdir()
    (tmp_path / "router-1" / "keys.json").write_bytes(raw)
    store = MemoryStore()
    shell, table = a_shell(tmp_path, store)
    shell.take_copy()
    assert table.keys.asks_for_key
    assert await shell._resync() and not table.keys.asks_for_key
    await store.put("keys", KEY, b'{"key_id": 1}')
    shell, table = a_shell(tmp_path, store)
    assert await shell._resync() and table.keys.asks_for_key and not opens(table)


async def test_reading_many_keys_takes_a_small_part_of_the_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Slow(MemoryStore):
        num_loads = 0

        async def load(self, table: str) -> dict[str, bytes]:
            if table == "keys":
                self.num_loads += 1
                await asyncio.sleep(0.02)
            return await super().load(table)

    store = Slow()
    shell, _ = a_shell(tmp_path, store)
    for _ in range(3):
        assert await shell._resync()
    assert store.num_loads == 1
    shell.bus.broker.down = True  # type: ignore[attr-defined]
    for num_loads in (2, 3):
        assert await shell._resync() and store.num_loads == num_loads, "without the bus no fact comes"
    shell.bus.broker.down = False  # type: ignore[attr-defined]
    assert await shell._resync() and await shell._resync() and store.num_loads == 4
    assert set(shell._read_next) == {"keys", "tenants"}
    assert shell._read_next["tenants"] < time.monotonic() + 20.0, "they were read at once"
    monkeypatch.setattr(routers_shell, "READ_WITHIN_S", 0.0)
    shell._read_next.clear()
    assert await shell._resync() and await shell._resync() and store.num_loads == 6, "often enough"


async def test_a_shell_starts_without_the_store_and_follows_it_from_then_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(routers_shell, "FIRST_RESYNC_S", 0.001)
    store = MemoryStore()
    store.down, num_loads = True, 0

    async def load(table: str) -> dict[str, bytes]:
        nonlocal num_loads
        num_loads += 1
        return await MemoryStore.load(store, table)

    monkeypatch.setattr(store, "load", load)
    shell, table = a_shell(tmp_path, store)
    shell._tick_s, shell._resync_s = 0.001, 1000.0
    table.table_loaded = False
    await shell.start()
    await until(lambda: num_loads > 2)
    assert not (shell.has_synced or table.table_loaded or (tmp_path / "router-1").exists())
    await shell.put(fleet_builder.an_event(KeyChanged(api_key=a_key())))
    await until(lambda: KEY in table.keys.rows)
    store.down, shell._resync_s = False, 0.001
    await until(lambda: shell.has_synced)
    assert table.table_loaded and (tmp_path / "router-1" / "tables.json").exists()
    await store.put("models", "n", to_json(a_model("n")))
    await until(lambda: "n" in table.controller.fleet.models)
    await until(lambda: (tmp_path / "router-1" / "keys.json").exists())
    await shell.stop()


async def test_the_bus_refusing_is_told_once_and_so_is_its_end(tmp_path: Path) -> None:
    shell, table = a_shell(tmp_path, MemoryStore())
    told = list[Any]()
    table.take = told.append  # type: ignore[method-assign, assignment]
    broker: Any = shell.bus.broker  # type: ignore[attr-defined]
    for refusal in ("", "full", "full", ""):
        broker.refusal = refusal
        await shell._handle(Tick())
    broker.refusal = "full"
    await shell._handle(fleet_builder.an_event(KeyChanged(api_key=a_key())))
    assert told == [BusRefuses("full"), BusRefuses("")]


async def test_effects_and_other_routers_usage_reach_the_table(tmp_path: Path) -> None:
    shell, table = a_shell(tmp_path, MemoryStore())
    did, taken = list[Any](), list[Any]()
    table.do = did.append  # type: ignore[method-assign, assignment]
    table.limits.take = taken.append  # type: ignore[method-assign, assignment]
    await shell.execute([])
    assert not table.changed.is_set()
    await shell.execute([effect := Publish(KeyChanged(api_key=a_key()))])
    assert table.changed.is_set() and did == [[], [effect]]
    report = RouterUsageReported(router_id="router-2", number=1, scopes={})
    await shell._handle(fleet_builder.an_event(report))
    await shell._handle(fleet_builder.an_event(ModelDeployed(model=a_model())))
    assert taken == [report]
