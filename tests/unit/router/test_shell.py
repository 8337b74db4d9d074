"""The copy of the tables that a router starts from when the store is down, and what its shell makes of it."""

import time
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from glowplug.bus.memory_bus import MemoryBus
from glowplug.controllers.router.controller import RouterController
from glowplug.events.envelope import to_json
from glowplug.fleet.tables import Fleet
from glowplug.runtime.service import World
from glowplug.state.memory_store import MemoryStore
from glowplug.telemetry.metrics import ShellMetrics
from glowplug.telemetry.tracing import Tracing
from services.router.exchange import Exchange
from services.router.request_table import RequestTable
from services.router.settings import RouterSettings
from services.router.shell import RouterShell, TablesCopy
from tests.contract.data_port_rig import a_model, an_instance


def filled() -> Fleet:
    fleet = Fleet()
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
    assert copy.read(111.0) == ({"m": a_model()}, {})


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
    """An emptied store stops no warm model; a copy is of the past."""
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
    shell = RouterShell(World(settings, "router", bus, store, Tracing("router", "router-1"), metrics), settings, table)
    shell.take_copy()
    assert table.table_loaded and set(table.controller.fleet.instances) == {"i-1", "i-2"}
    assert await shell._resync() and set(table.controller.fleet.instances) == {"i-1"}
    store.tables.clear()
    assert await shell._resync()
    assert set(table.controller.fleet.instances) == {"i-1"} and set(table.controller.fleet.models) == {"m"}
