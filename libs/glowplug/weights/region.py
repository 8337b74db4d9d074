"""One set of weights in host memory: a directory that the prefetcher writes and engines read.

    <shm_dir>/<node_id>/<digest>/
        blob | files/    the bytes: one file, or a directory of files (HF layout)
        progress         8 bytes little-endian: contiguous bytes that have landed (the watermark)
        layout.json      the files' places, and the generation; written before any byte where sizes are known
        landed           one byte per piece: readable while the others still arrive
        order.json       byte ranges in an engine's reading order (weights/order.py)
        pieces.json      a checksum of each piece, written when the region is complete
        meta.json        the writer's state for a resume: source, validator, layout, landed ranges
        models.json      keys of the models that asked for these weights
        complete.json    written last and atomically, after the checksum
        stage-S-of-N.json  like complete.json, once stage S of a pipeline of N has all its bytes
        failed.json      written atomically on failure, removed by the next try

A region can be read while it fills, by the rules of weights/pieces.py: a reader's READY waits for complete.json, with
the generation it began with. A stage's bytes have landed, but are checked only where the source has piece checksums; a
later fetch of the rest completes the region and checks everything.

The contract is files, so it outlives the bus and both processes. Sizes are bytes, times are epoch seconds. HydraServe
section 4.1 keeps the watermark in the first 8 bytes of the arena; here it is a file of its own, so that `blob` stays a
valid weight file that any engine can map.
"""

import json
import os
import re
import shutil
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

from glowplug.domain.errors import InvalidModelFile
from glowplug.domain.model import WeightsRef
from glowplug.events.envelope import MalformedEvent, from_json
from glowplug.weights.order import ReadingOrder
from glowplug.weights.pieces import Layout, piece_digests_json, read_layout

_SHA256 = re.compile(r"[0-9a-f]{64}")
_WATERMARK = struct.Struct("<Q")


class RegionState(StrEnum):
    ABSENT = "absent"  # nothing, or only another try's failure
    FETCHING = "fetching"  # arriving, or interrupted and resumable
    COMPLETE = "complete"  # checked; may be served
    FAILED = "failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class RegionInfo:
    """`path` is absolute: the file, or the directory of files."""

    path: str
    num_bytes: int
    sha256: str
    source: str
    seconds: float
    stage_bytes: tuple[int, ...] = ()  # as in CachedWeights


@dataclass(frozen=True, slots=True, kw_only=True)
class RegionFailure:
    """`code` is an error code of domain/errors.py (weights_unavailable, no_space ...)."""

    code: str
    message: str
    failed_at: float = 0.0
    instance_ids: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RegionStatus:
    """`info` is set when COMPLETE, `failure` when FAILED. `path` is "" while unknown. Bytes read under another
    `generation` are worthless."""

    state: RegionState
    num_bytes_done: int = 0
    info: RegionInfo | None = None
    failure: RegionFailure | None = None
    path: str = ""
    generation: str = ""


def region_digest(ref: WeightsRef) -> str:
    """Raises InvalidModelFile for a malformed checksum (it becomes a directory name)."""
    if not _SHA256.fullmatch(ref.digest):
        raise InvalidModelFile(f"weights.sha256 is not 64 hex digits: {ref.sha256[:80]!r}", param="weights.sha256")
    return ref.digest


class Region:
    """Reader: `read_state`, `read_order`. Writer: `begin`, `set_watermark`, `write_*`, `complete`, `fail`,
    `clear_bytes`. Holds nothing open; cheap to make."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.blob = directory / "blob"
        self.files = directory / "files"
        self._progress = directory / "progress"
        self._layout, self._landed = directory / "layout.json", directory / "landed"
        self._order, self._pieces = directory / "order.json", directory / "pieces.json"
        self._meta = directory / "meta.json"
        self._models = directory / "models.json"
        self._complete = directory / "complete.json"
        self._failed = directory / "failed.json"

    @classmethod
    def at(cls, shm_dir: Path, node_id: str, digest: str) -> "Region":
        return cls(shm_dir / node_id / digest)

    @property
    def digest(self) -> str:
        return self.directory.name

    # reader's side

    def read_state(self, instance_id: str = "", *, stage: int = 0, num_stages: int = 1) -> RegionStatus:
        """Look once; never raise for a half-written or vanishing region. A pipeline stage is COMPLETE once its own
        bytes, `info.num_bytes`, have landed.

        With `instance_id`, a failure of a try for other instances reads as ABSENT: this one's fetch command will remove
        it.
        """
        layout = read_layout(self.directory)
        generation = layout.generation if layout else ""
        if (info := self._read_info(stage, num_stages)) is not None:
            whole = RegionStatus(state=RegionState.COMPLETE, num_bytes_done=info.num_bytes, info=info)
            return replace(whole, path=info.path, generation=generation)
        if (failure := self._read_failure()) is not None:
            if instance_id and failure.instance_ids and instance_id not in failure.instance_ids:
                return RegionStatus(state=RegionState.ABSENT)
            return RegionStatus(state=RegionState.FAILED, num_bytes_done=self.watermark(), failure=failure)
        if self._progress.exists():
            path = str(self.root(layout).absolute()) if layout else ""
            fetching = RegionStatus(state=RegionState.FETCHING, num_bytes_done=self.watermark())
            return replace(fetching, path=path, generation=generation)
        return RegionStatus(state=RegionState.ABSENT)

    def watermark(self) -> int:
        """Contiguous bytes from the start that have landed; 0 without a region."""
        try:
            raw = self._progress.read_bytes()
        except OSError:
            return 0
        return int(_WATERMARK.unpack(raw)[0]) if len(raw) == _WATERMARK.size else 0

    def root(self, layout: Layout) -> Path:
        return self.files if layout.is_directory else self.blob

    def read_order(self) -> ReadingOrder | None:
        """Return None while the order is unknown."""
        return ReadingOrder.from_json(_read_json(self._order))

    def stage_bytes(self) -> tuple[int, ...]:
        """Return the bytes as in CachedWeights; () while unknown."""
        parts = _read_json(self._order).get("parts")
        return tuple(parts) if isinstance(parts, list) and all(map(_is_count, parts)) else ()

    def last_used_at(self) -> float:
        """Epoch seconds of the last `touch`; 0.0 when not complete."""
        try:
            return self._complete.stat().st_mtime
        except OSError:
            return 0.0

    def read_meta(self) -> dict[str, Any]:
        """Return {} when absent or without valid landed ranges."""
        meta = _read_json(self._meta)
        landed, num_bytes = meta.get("landed", []), meta.get("num_bytes", 0)
        if not _is_count(num_bytes) or not isinstance(landed, list) or not all(_is_range(item) for item in landed):
            return {}
        return meta

    def model_keys(self) -> tuple[str, ...]:
        return _words(_read_json(self._models).get("model_keys"))

    # writer's side

    def begin(self) -> None:
        """Forget the last try's failure and completion. Landed bytes stay."""
        self.directory.mkdir(parents=True, exist_ok=True)
        self._failed.unlink(missing_ok=True)
        self._complete.unlink(missing_ok=True)
        self._pieces.unlink(missing_ok=True)
        if not self._progress.exists():
            self.set_watermark(0)

    def set_watermark(self, num_bytes: int) -> None:
        """One 8-byte write in place, never torn for readers."""
        fd = os.open(self._progress, os.O_WRONLY | os.O_CREAT, 0o644)
        try:
            os.pwrite(fd, _WATERMARK.pack(num_bytes), 0)
        finally:
            os.close(fd)

    def write_layout(self, layout: Layout) -> None:
        """Call after `landed` and the files exist."""
        _write_json(self._layout, layout.to_json())

    def write_order(self, order: ReadingOrder) -> None:
        _write_json(self._order, order.to_json())

    def renew_order(self) -> None:
        """Add the cut into stages that an earlier version's order lacks."""
        if "stages" not in _read_json(self._order) and (order := self.read_order()) is not None:
            self.forget_stages()
            self.write_order(order)

    def write_piece_digests(self, layout: Layout, digests: Sequence[str]) -> None:
        _write_json(self._pieces, piece_digests_json(layout, digests))

    def write_meta(self, meta: Mapping[str, Any]) -> None:
        _write_json(self._meta, meta)

    def add_model_key(self, model_key: str) -> None:
        """Record a user, for the inventory. An empty key is no model."""
        known = self.model_keys()
        if model_key and model_key not in known and self.directory.is_dir():
            _write_json(self._models, {"model_keys": sorted((*known, model_key))})

    def complete(self, info: RegionInfo) -> None:
        """Declare the bytes whole and checked. Nothing may change them afterwards."""
        self.set_watermark(info.num_bytes)
        self._failed.unlink(missing_ok=True)
        _write_json(self._complete, asdict(info))

    def complete_stage(self, info: RegionInfo, stage: int, num_stages: int) -> None:
        _write_json(self._stage(stage, num_stages), asdict(info))

    def forget_stages(self) -> None:
        for path in self.directory.glob("stage-*.json"):
            path.unlink(missing_ok=True)

    def fail(self, code: str, message: str, *, failed_at: float, instance_ids: Iterable[str] = ()) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        self._complete.unlink(missing_ok=True)
        failure = RegionFailure(code=code, message=message, failed_at=failed_at, instance_ids=tuple(instance_ids))
        _write_json(self._failed, asdict(failure))

    def touch(self, now_s: float) -> None:
        """Remember a use, for LRU across restarts (the modification time of complete.json)."""
        if self._complete.exists():
            os.utime(self._complete, (now_s, now_s))

    def clear_bytes(self) -> None:
        """Drop the bytes; keep the directory (and its failure, if any) for readers."""
        self._complete.unlink(missing_ok=True)  # first, then the layout, to void reads
        for path in (self._layout, self._landed):
            path.unlink(missing_ok=True)
        self.forget_stages()
        for path in (self._order, self._pieces, self._progress, self._meta, self.blob):
            path.unlink(missing_ok=True)
        shutil.rmtree(self.files, ignore_errors=True)

    def remove(self) -> None:
        """Remove complete.json first, so that no reader trusts a half-removed region."""
        self._complete.unlink(missing_ok=True)
        shutil.rmtree(self.directory, ignore_errors=True)

    def _stage(self, stage: int, num_stages: int) -> Path:
        return self.directory / f"stage-{stage}-of-{num_stages}.json"

    def _read_info(self, stage: int = 0, num_stages: int = 1) -> RegionInfo | None:
        for path in (self._complete, *((self._stage(stage, num_stages),) if num_stages > 1 else ())):
            try:
                return from_json(path.read_bytes(), RegionInfo)
            except (OSError, MalformedEvent):
                continue
        return None

    def _read_failure(self) -> RegionFailure | None:
        raw = _read_json(self._failed)
        if not raw:
            return None
        failed_at = raw.get("failed_at", 0.0)
        return RegionFailure(
            code=str(raw.get("code", "weights_unavailable")),
            message=str(raw.get("message", "")),
            failed_at=float(failed_at) if _is_count(failed_at) or isinstance(failed_at, float) else 0.0,
            instance_ids=_words(raw.get("instance_ids")),
        )


def _read_json(path: Path) -> dict[str, Any]:
    """Return {} when absent or unreadable."""
    try:
        return from_json(path.read_bytes(), dict[str, Any])
    except (OSError, MalformedEvent):
        return {}


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_range(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(map(_is_count, value)) and value[0] <= value[1]


def _words(value: Any) -> tuple[str, ...]:
    return tuple(value) if isinstance(value, list) and all(isinstance(word, str) for word in value) else ()


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    scratch = path.with_suffix(f".{os.getpid()}.tmp")
    scratch.write_text(json.dumps(value, sort_keys=True))
    scratch.replace(path)
