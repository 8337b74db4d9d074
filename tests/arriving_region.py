"""Local weights that arrive at a given rate, in an engine's read order."""

import asyncio
import time
from pathlib import Path
from typing import Any

from glowplug.domain.gguf import NeedMore
from glowplug.domain.model import WeightsRef
from glowplug.weights.order import Header, read_header, reading_order
from glowplug.weights.pieces import read_landed, read_layout
from glowplug.weights.region import Region, RegionInfo
from glowplug.weights.source import SourceFile, SourceInfo
from glowplug.weights.writer import RegionWriter


class ArrivingRegion:
    def __init__(self, source: Path, folder: Path) -> None:
        self._source, self.is_directory = source, source.is_dir()
        paths = sorted(p for p in source.rglob("*") if p.is_file()) if self.is_directory else [source]
        names = [str(path.relative_to(source)) if self.is_directory else "" for path in paths]
        files = tuple(
            SourceFile(path=n, num_bytes=p.stat().st_size, validator="v") for n, p in zip(names, paths, strict=True)
        )
        info = SourceInfo(files=files, ranges=True)
        ref = WeightsRef(uri=f"file:{source}")
        self.region = Region(folder / ref.digest)
        self.writer = RegionWriter(self.region, ref, info, info.num_bytes)
        self.writer.open()
        self.root = self.writer.path()
        self.num_bytes = info.num_bytes
        there = self.writer.landed
        self._left = [piece for piece in self._pieces() if there.gaps(*self._span(piece))]

    def _pieces(self) -> list[int]:
        """Pieces in read order; one in several ranges takes its first place."""
        layout = self.writer.layout
        assert layout is not None
        headers = {f.path: header for f in layout.files if (header := _header(self._file(f.path))) is not None}
        config = self._source / "config.json"
        order = reading_order(layout, headers, config.read_bytes() if config.is_file() else b"")
        return list(dict.fromkeys(piece for one in order.ranges for piece in layout.touched(one.first, one.last)))

    def _span(self, piece: int) -> tuple[int, int]:
        assert self.writer.layout is not None
        return self.writer.layout.piece(piece)

    def _file(self, name: str) -> Path:
        return self._source / name if name else self._source

    def layout(self) -> dict[str, Any]:
        assert self.writer.layout is not None
        return self.writer.layout.to_json()

    def taken_up(self) -> "ArrivingRegion":
        return ArrivingRegion(self._source, self.region.directory.parent)

    def put(self, piece: int) -> int:
        first, last = self._span(piece)
        position = first
        while position < last:
            index = self.writer.file_at(position)
            end = min(last, self.writer.file_end(index))
            with self._file(self.writer.info.files[index].path).open("rb") as file:
                file.seek(position - self.writer.file_start(index))
                self.writer.write(position, file.read(end - position))
            position = end
        return last - first

    async def land(self, ratio: float = 1.0, bytes_per_s: float = float("inf")) -> None:
        began, num_bytes = time.monotonic(), 0
        while self._left and self.writer.landed.total < ratio * self.num_bytes:
            num_bytes += self.put(self._left.pop(0))
            await asyncio.sleep(max(0.0, began + num_bytes / bytes_per_s - time.monotonic()))

    def complete(self) -> None:
        assert self.writer.landed.total == self.num_bytes
        info = RegionInfo(
            path=str(self.root.absolute()), num_bytes=self.num_bytes, sha256="", source="file", seconds=1.0
        )
        self.region.complete(info)

    def close(self) -> None:
        self.writer.close()


def _header(path: Path) -> Header | None:
    num_bytes, wanted = path.stat().st_size, 8
    while True:
        with path.open("rb") as file:
            content = file.read(wanted)
        try:
            return read_header(content, num_bytes) if path.suffix in (".safetensors", ".gguf") else None
        except NeedMore as error:
            wanted = max(error.num_bytes, 2 * wanted)


def has_landed(directory: Path, first: int, last: int) -> bool:
    layout = read_layout(directory)
    assert layout is not None
    pieces = layout.touched(first, last)
    return 0 not in read_landed(directory, layout)[pieces.start : pieces.stop]
