"""Content of a node's host memory and disk. Cheap enough for every beat of an agent."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from glowplug.domain.hardware import CachedWeights, Link
from glowplug.events.envelope import MalformedEvent, from_json
from glowplug.weights.region import Region, RegionState

LINKS_FILE = "links.json"
DISK_FILE = "disk.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class PartialWeights:
    """A region left unfinished by a fetch."""

    digest: str
    num_bytes: int
    num_bytes_done: int
    changed_at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Inventory:
    complete: tuple[CachedWeights, ...] = ()
    partial: tuple[PartialWeights, ...] = ()
    failed: tuple[str, ...] = ()
    rubbish: tuple[str, ...] = ()  # useless directories


def read_cached(shm_dir: Path, node_id: str) -> tuple[CachedWeights, ...]:
    return read_inventory(shm_dir, node_id).complete


def read_inventory(shm_dir: Path, node_id: str) -> Inventory:
    """Never call an incomplete region complete, nor raise for concurrent changes."""
    complete, partial, rubbish, failed = [], [], [], list[str]()
    root = shm_dir / node_id
    try:
        directories = sorted(p for p in root.iterdir() if p.is_dir())
    except OSError:
        return Inventory()
    for directory in directories:
        region = Region(directory)
        status = region.read_state()
        failed += status.failure.instance_ids if status.failure else ()
        if (whole := _complete(region)) is not None:
            complete.append(whole)
        elif status.state is RegionState.COMPLETE:
            rubbish.append(directory.name)  # marked complete and is not
        elif (part := _partial(region)) is not None:
            partial.append(part)
        elif status.failure is None:
            rubbish.append(directory.name)
    return Inventory(complete=tuple(complete), partial=tuple(partial), failed=tuple(failed), rubbish=tuple(rubbish))


def read_links(shm_dir: Path, node_id: str) -> tuple[Link, ...]:
    """Read the links as last written by the node's prefetcher."""
    try:
        return tuple(from_json((shm_dir / node_id / LINKS_FILE).read_bytes(), list[Link]))
    except (OSError, MalformedEvent):
        return ()


def write_links(shm_dir: Path, node_id: str, links: Iterable[Link]) -> None:
    _write(shm_dir / node_id, LINKS_FILE, list(links))


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskContent:
    """`bytes_per_s`: last rate from or to the disk (0: none yet)."""

    copies: tuple[CachedWeights, ...] = ()
    bytes_per_s: float = 0.0


def read_disk(shm_dir: Path, node_id: str) -> DiskContent:
    """Read the content as last written by the node's prefetcher."""
    try:
        return from_json((shm_dir / node_id / DISK_FILE).read_bytes(), DiskContent)
    except (OSError, MalformedEvent):
        return DiskContent()


def write_disk(shm_dir: Path, node_id: str, content: DiskContent) -> None:
    """Raises OSError."""
    _write(shm_dir / node_id, DISK_FILE, content)


def is_whole(region: Region) -> bool:
    """Whether it is complete, with its bytes still there."""
    return _complete(region) is not None


def _complete(region: Region) -> CachedWeights | None:
    status = region.read_state()
    if status.state is not RegionState.COMPLETE or status.info is None:
        return None
    try:
        num_bytes = _size(Path(status.info.path))
    except (OSError, ValueError):
        return None
    if num_bytes != status.info.num_bytes:
        return None
    return CachedWeights(
        digest=region.digest,
        num_bytes=num_bytes,
        model_keys=region.model_keys(),
        last_used_at=region.last_used_at(),
        stage_bytes=status.info.stage_bytes,
    )


def _partial(region: Region) -> PartialWeights | None:
    meta = region.read_meta()
    landed, num_bytes = meta.get("landed", []), meta.get("num_bytes", 0)
    if not landed or not num_bytes:
        return None  # not resumable
    try:
        changed_at = region.directory.stat().st_mtime
    except OSError:
        return None
    return PartialWeights(
        digest=region.digest,
        num_bytes=num_bytes,
        num_bytes_done=sum(last - first for first, last in landed),
        changed_at=changed_at,
    )


def _write(root: Path, name: str, content: Any) -> None:
    root.mkdir(parents=True, exist_ok=True)
    scratch = root / f"{name}.tmp"
    scratch.write_bytes(msgspec.json.encode(content))
    scratch.replace(root / name)


def _size(path: Path) -> int:
    if path.is_dir():
        return sum(p.stat().st_size for p in path.rglob("*") if p.is_file())
    return path.stat().st_size
