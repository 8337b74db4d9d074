"""Copies of weights on disk: whole or absent."""

import errno
import random
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from glowplug.domain.errors import ChecksumMismatch
from glowplug.domain.model import WeightsRef
from glowplug.weights import disk
from glowplug.weights.disk import CopyStopped, CopyUnusable, DiskCopies
from glowplug.weights.fetch import Fetch, FetchOptions
from glowplug.weights.inventory import is_whole
from glowplug.weights.link import LinkMeter
from glowplug.weights.region import Region, region_digest
from glowplug.weights.source import SourceOptions
from glowplug.weights.sources import open_source
from tests.small_disk import small_disk

DATA = random.Random(5).randbytes(900_001)
OPTIONS = SourceOptions(chunk_bytes=50_000)


async def whatever(_: int) -> int:
    return 10_000_000


async def fetched(ref: WeightsRef, region: Region, source: Any) -> Any:
    options = FetchOptions(part_bytes=200_000, max_attempts=1, max_mismatches=0)
    return await Fetch(ref, region, source, LinkMeter("n/x", 0.0), whatever, options=options).run()


async def in_memory(tmp_path: Path, files: dict[str, bytes]) -> tuple[WeightsRef, Region]:
    """Fetched weights: one file for {"": ...}, else a directory."""
    source = tmp_path / "source"
    for name, body in files.items():
        path = source / name if name else source
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(body)
    ref = WeightsRef(uri=str(source))
    region = Region.at(tmp_path / "shm", "n", region_digest(ref))
    assert await fetched(ref, region, open_source(ref.uri, OPTIONS))
    region.add_model_key("m")
    return ref, region


def content(region: Region) -> dict[str, bytes]:
    if region.blob.exists():
        return {"": region.blob.read_bytes()}
    return {str(p.relative_to(region.files)): p.read_bytes() for p in region.files.rglob("*") if p.is_file()}


DIRECTORY = {"config.json": b"{}", "empty": b"", "sub/model.safetensors": DATA}


@pytest.mark.parametrize("files", [{"": DATA}, DIRECTORY], ids=["file", "directory"])
async def test_what_was_written_is_read_back_and_says_where_it_came_from(
    tmp_path: Path, files: dict[str, bytes]
) -> None:
    ref, memory = await in_memory(tmp_path, files)
    before, meta = memory.read_state().info, memory.read_meta()
    copies = DiskCopies(tmp_path / "disk", "n")
    assert copies.write(memory, threading.Event()) == sum(map(len, files.values()))
    memory.remove()
    (found,) = DiskCopies(tmp_path / "disk", "n").found()
    assert (found.digest, found.num_bytes, found.model_keys) == (ref.digest, before.num_bytes, ("m",))
    source = copies.open(ref.digest, OPTIONS)
    info = await fetched(source.reference(ref), memory, source)
    source.restore(memory)
    assert content(memory) == files and is_whole(memory)
    assert (info.source, info.sha256) == ("disk", before.sha256) and memory.read_meta() == meta
    source.forget_pages()


@pytest.mark.parametrize("damage", ["byte", "cut", "gone"])
async def test_a_damaged_copy_is_never_taken_for_whole(tmp_path: Path, damage: str) -> None:
    ref, memory = await in_memory(tmp_path, {"": DATA})
    copies = DiskCopies(tmp_path / "disk", "n")
    copies.write(memory, threading.Event())
    memory.remove()
    blob = copies.region(ref.digest).blob
    if damage == "gone":
        blob.unlink()
    else:
        with blob.open("r+b") as file:
            file.write(b"damaged") if damage == "byte" else file.truncate(9)
    if damage == "byte":
        source = copies.open(ref.digest, OPTIONS)
        with pytest.raises(ChecksumMismatch):
            await fetched(source.reference(ref), memory, source)
        return
    with pytest.raises(CopyUnusable):
        copies.open(ref.digest, OPTIONS)
    assert copies.found() == () and not blob.parent.exists()


async def test_one_that_was_being_written_when_the_process_was_killed_is_removed(tmp_path: Path) -> None:
    ref, memory = await in_memory(tmp_path, {"": DATA})
    copies = DiskCopies(tmp_path / "disk", "n")
    copies.write(memory, threading.Event())
    whole = copies.region(ref.digest).directory
    whole.rename(whole.with_suffix(".part"))
    assert copies.found() == () and list(copies.root.iterdir()) == []


async def test_a_copy_that_is_given_up_leaves_nothing(tmp_path: Path) -> None:
    _, memory = await in_memory(tmp_path, {"": DATA})
    copies, stop = DiskCopies(tmp_path / "disk", "n"), threading.Event()
    stop.set()
    with pytest.raises(CopyStopped):
        copies.write(memory, stop)
    assert list(copies.root.iterdir()) == []
    assert is_whole(memory)


async def test_a_full_disk_keeps_nothing_of_the_copy(tmp_path: Path) -> None:
    """The disk of one mebibyte holds one copy."""
    with small_disk(tmp_path / "disk", 1):
        _, memory = await in_memory(tmp_path, {"": DATA})
        copies = DiskCopies(tmp_path / "disk", "n")
        copies.write(memory, threading.Event())
        other = Region.at(tmp_path / "shm", "n", "f" * 64)
        assert await fetched(WeightsRef(uri=str(tmp_path / "source")), other, open_source(str(tmp_path / "source")))
        with pytest.raises(OSError, match="No space") as raised:
            copies.write(other, threading.Event())
        assert raised.value.errno == errno.ENOSPC
        assert [path.name for path in copies.root.iterdir()] == [memory.digest]
        assert len(copies.found()) == 1


async def test_nothing_has_its_name_before_it_is_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Contents are flushed before the rename, the parent directory after it."""
    _, memory = await in_memory(tmp_path, DIRECTORY)
    copies, done = DiskCopies(tmp_path / "disk", "n"), list[str]()

    def flush(fd: int) -> None:
        done.append(str(Path(f"/proc/self/fd/{fd}").readlink()))

    def rename(path: Path, target: Path) -> Path:
        done.append("rename")
        return path.replace(target)

    monkeypatch.setattr(disk.os, "fsync", flush)
    monkeypatch.setattr(Path, "rename", rename)
    copies.write(memory, threading.Event())
    flushed = {Path(name).name for name in done[: done.index("rename")]}
    assert {"config.json", "empty", "model.safetensors", "sub", "files", "complete.json", "meta.json"} <= flushed
    assert f"{memory.digest}.part" in flushed and Path(done[-1]) == copies.root


def test_a_removal_that_fails_says_so(tmp_path: Path) -> None:
    copies = DiskCopies(tmp_path / "disk", "n")
    copies.remove("a" * 64)  # absent
    (copies.root).mkdir(parents=True)
    (copies.root / ("a" * 64)).write_text("no directory")
    with pytest.raises(OSError, match="Not a directory"):
        copies.remove("a" * 64)


def test_directories_that_are_not_copies_stay(tmp_path: Path) -> None:
    copies = DiskCopies(tmp_path / "disk", "n")
    for name in ("photos", "a" * 64, "a" * 64 + ".part"):
        (copies.root / name).mkdir(parents=True)
    assert copies.found() == () and [path.name for path in copies.root.iterdir()] == ["photos"]


async def test_a_large_copy_is_flushed_as_it_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flushed = list[int]()
    monkeypatch.setattr(disk, "STEP_BYTES", 100_000)
    monkeypatch.setattr(disk, "FLUSH_BYTES", 300_000)
    monkeypatch.setattr(disk, "_flush_content", flushed.append)
    _, memory = await in_memory(tmp_path, {"": DATA})
    DiskCopies(tmp_path / "disk", "n").write(memory, threading.Event())
    assert len(flushed) == 3


async def test_the_checksum_that_was_asked_for_counts(tmp_path: Path) -> None:
    ref, memory = await in_memory(tmp_path, {"": DATA})
    copies = DiskCopies(tmp_path / "disk", "n")
    copies.write(memory, threading.Event())
    source = copies.open(ref.digest, OPTIONS)
    assert source.reference(replace(ref, sha256="0" * 64)).sha256 == "0" * 64
