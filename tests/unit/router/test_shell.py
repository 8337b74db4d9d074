"""The copy of the tables that a router starts from when the store is down."""

from pathlib import Path

import pytest

from glowplug.controllers.router.fleet import Fleet
from services.router.shell import TablesCopy
from tests.contract.data_port_rig import a_model, an_instance


def filled() -> Fleet:
    fleet = Fleet()
    fleet.put_model(a_model())
    fleet.put_instance(an_instance("i-1", "http://x:1"))
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
