"""Order in which an engine reads weights, and the part of one pipeline stage. Pure.

By tensor names in safetensors headers or GGUF tensor infos: first all that building the model needs, then embeddings,
norm and head, then layers from the first on. So only one layer is left to load after the last byte, never a head of a
gigabyte. HydraServe section 5 fetches layers in this order. A pipeline is cut by bytes, not by layers: the slowest
fetch decides when it serves. Offsets are bytes of the region (weights/pieces.py), ends exclusive.
"""

import itertools
import json
import math
import re
import struct
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import PurePosixPath
from typing import Any

from glowplug.domain.gguf import MAX_HEADER_BYTES, GgufReader, InvalidGguf, NeedMore
from glowplug.weights.pieces import Layout, LayoutFile

MAX_STAGES = 8
MAX_PARTS = 4  # of a pipeline, in a node's report (Node.cached) and in placements
MAX_LAYERS = 512  # no cut beyond: its time is quadratic
_LENGTH = struct.Struct("<Q")
_LAYER = re.compile(r"^(?:(.*)\.)?(layers|layer|h|blk|blocks|block)\.(\d+)\.")
_EMBEDDING = re.compile(r"(^|[._])(embed_tokens|embed_in|word_embeddings|tok_embeddings|token_embd|wte|wpe)([._]|$)")
_HEAD = re.compile(r"(^|\.)(lm_head|embed_out|output)\.")
_FINAL = re.compile(r"(^|\.)(norm|ln_f|final_layernorm|final_layer_norm|output_norm|score|classifier)\.")
_TENSOR_FILES = (".safetensors", ".gguf")
_OTHER_WEIGHTS = (".bin", ".pt", ".pth", ".npz", ".h5", ".msgpack", ".onnx")


class RangeKind(StrEnum):
    FILES = "files"  # small files beside the weights: configuration, tokenizer
    HEADER = "header"
    OTHER = "other"  # neither of the two below, and in no layer
    EMBEDDING = "embedding"
    FINAL = "final"  # norm and head
    LAYER = "layer"
    REST = "rest"


_RANK = {kind: number for number, kind in enumerate(RangeKind)}


@dataclass(frozen=True, slots=True)
class TensorStart:
    """`first`: byte in its file."""

    name: str
    first: int


@dataclass(frozen=True, slots=True)
class Header:
    num_bytes: int
    tensors: tuple[TensorStart, ...]


@dataclass(frozen=True, slots=True)
class Range:
    """[first, last) of the region. `layer` is -1 outside layers."""

    first: int
    last: int
    kind: RangeKind
    layer: int = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadingOrder:
    """Disjoint ranges of all bytes in reading order. `num_layers` 0: no structure. `is_tied`: the head is the
    embeddings."""

    ranges: tuple[Range, ...]
    num_layers: int = 0
    is_tied: bool = False

    def to_json(self) -> dict[str, Any]:
        """`stages`: for each number of stages, each stage's layers (for engines). `parts`: bytes of each stage of a
        pipeline of 2, then of 3, and so on up to MAX_PARTS (for placements)."""
        ranges = [[r.first, r.last, r.kind.value, r.layer] for r in self.ranges]
        cuts = {number: layers_of_stage(self, number) for number in range(2, min(MAX_STAGES, self.num_layers) + 1)}
        stages = {str(number): [len(layers) for layers in cut] for number, cut in cuts.items()}
        parts = [
            sum(one.last - one.first for one in _ranges_of(self, stage, cut))
            for number, cut in cuts.items()
            if number <= MAX_PARTS
            for stage in range(number)
        ]
        known = {"num_layers": self.num_layers, "is_tied": self.is_tied, "stages": stages, "parts": parts}
        return known | {"ranges": ranges}

    @classmethod
    def from_json(cls, value: Any) -> "ReadingOrder | None":
        """Return None for an invalid order."""
        try:
            ranges = tuple(Range(int(a), int(b), RangeKind(kind), int(layer)) for a, b, kind, layer in value["ranges"])
            return cls(ranges=ranges, num_layers=int(value["num_layers"]), is_tied=bool(value["is_tied"]))
        except (KeyError, TypeError, ValueError):
            return None


def layers_of_stage(order: ReadingOrder, num_stages: int) -> tuple[range, ...]:
    """Minimise the largest part, where the first stage adds the embeddings, the last one the head, perhaps the
    embeddings again. Of such cuts take the most even one, by bytes, then by layers. No stage exceeds one and a
    half times an even part of the layers, since its KV cache's memory is an even part. Raises ValueError for more
    stages than layers, or none."""
    num_layers = order.num_layers
    if not 1 <= num_stages <= num_layers:
        raise ValueError(f"{num_layers} layers cannot be cut into {num_stages} stages")
    most = -(-3 * num_layers // (2 * num_stages))
    ends = list(itertools.accumulate(_layer_bytes(order), initial=0))
    embeddings, final = _bytes_of(order, RangeKind.EMBEDDING), _bytes_of(order, RangeKind.FINAL)
    final += embeddings if order.is_tied else 0

    def part_bytes(stage: int, first: int, last: int) -> int:
        own = ends[last] - ends[first]
        return own + embeddings * (stage == 0) + final * (stage == num_stages - 1)

    def worst(sofar: _Cost, *part: int) -> _Cost:
        return max(sofar[0], part_bytes(*part)), 0.0

    def uneven(sofar: _Cost, stage: int, first: int, last: int) -> _Cost:
        num_bytes = part_bytes(stage, first, last)
        squared = float(num_bytes) ** 2 if num_bytes <= largest else math.inf
        return sofar[0] + squared, sofar[1] + (last - first) ** 2

    largest = _cut(num_layers, num_stages, most, worst)[0][0]
    starts = _cut(num_layers, num_stages, most, uneven)[1]
    return tuple(range(first, last) for first, last in itertools.pairwise((*starts, num_layers)))


def _bytes_of(order: ReadingOrder, kind: RangeKind) -> int:
    return sum(one.last - one.first for one in order.ranges if one.kind is kind)


def _layer_bytes(order: ReadingOrder) -> list[int]:
    found = [0] * order.num_layers
    for one in order.ranges:
        if one.kind is RangeKind.LAYER:
            found[one.layer] += one.last - one.first
    return found


_Cost = tuple[float, float]


def _cut(
    num_layers: int, num_stages: int, most: int, cost: Callable[[_Cost, int, int, int], _Cost]
) -> tuple[_Cost, tuple[int, ...]]:
    """Least cost of a cut into stages of 1 to `most` layers, and each stage's first layer."""
    best: dict[int, tuple[_Cost, tuple[int, ...]]] = {0: ((0.0, 0.0), ())}
    for stage in range(num_stages):
        best = {
            last: min(
                (cost(best[first][0], stage, first, last), (*best[first][1], first))
                for first in range(max(0, last - most), last)
                if first in best
            )
            for last in range(stage + 1, num_layers - (num_stages - stage - 1) + 1)
            if any(first in best for first in range(max(0, last - most), last))
        }
    return best[num_layers]


def stage_ranges(order: ReadingOrder, stage: int, num_stages: int) -> tuple[Range, ...]:
    """Return in reading order the stage's layers; embeddings for the first, norm and head (and tied embeddings) for
    the last; bytes outside layers for all. Everything without known layers. Raises ValueError for a stage that
    does not exist."""
    if not 0 <= stage < num_stages:
        raise ValueError(f"there is no stage {stage} of {num_stages}")
    if num_stages == 1 or not order.num_layers:
        return order.ranges
    return _ranges_of(order, stage, layers_of_stage(order, num_stages))


def _ranges_of(order: ReadingOrder, stage: int, cut: Sequence[range]) -> tuple[Range, ...]:
    layers, is_first, is_last = cut[stage], stage == 0, stage == len(cut) - 1
    wanted = {
        RangeKind.EMBEDDING: is_first or (is_last and order.is_tied),
        RangeKind.FINAL: is_last,
    }
    return tuple(
        r for r in order.ranges if (r.layer in layers if r.kind is RangeKind.LAYER else wanted.get(r.kind, True))
    )


def offset_order(layout: Layout) -> ReadingOrder:
    return reading_order(layout, {})


def has_header(path: str) -> bool:
    """The path "" may be either kind of file."""
    return not path or path.endswith(_TENSOR_FILES)


def reading_order(layout: Layout, headers: Mapping[str, Header], config: bytes = b"") -> ReadingOrder:
    """`headers` by path; `config` is config.json."""
    main = _main_family(tensor.name for header in headers.values() for tensor in header.tensors)
    found: list[Range] = []
    for file in layout.files:
        if file.num_bytes:
            found += _ranges(file, headers.get(file.path), main)
    names = [tensor.name for header in headers.values() for tensor in header.tensors]
    has_head = any(_HEAD.search(name) for name in names)
    sizes = {file.start: (file.path != "config.json", file.num_bytes) for file in layout.files}

    def rank(one: Range) -> tuple[Any, ...]:
        size = sizes.get(one.first, (True, 0)) if one.kind is RangeKind.FILES else (True, 0)
        return (_RANK[one.kind], one.layer, size, one.first)

    num_layers = max((one.layer for one in found if one.kind is RangeKind.LAYER), default=-1) + 1
    if num_layers > MAX_LAYERS:
        num_layers = 0
    return ReadingOrder(
        ranges=tuple(_joined(sorted(found, key=rank))),
        num_layers=num_layers,
        is_tied=bool(num_layers) and (not has_head or _says_tied(config)),
    )


def _ranges(file: LayoutFile, header: Header | None, main: str) -> list[Range]:
    """A tensor extends to the next one: padding goes with it."""
    end = file.start + file.num_bytes
    if header is None or not header.tensors:
        is_weights = has_header(file.path) or PurePosixPath(file.path).suffix in _OTHER_WEIGHTS
        return [Range(file.start, end, RangeKind.REST if is_weights else RangeKind.FILES)]
    tensors = sorted(header.tensors, key=lambda tensor: (tensor.first, tensor.name))
    found = [Range(file.start, file.start + tensors[0].first, RangeKind.HEADER)]
    for number, tensor in enumerate(tensors):
        first = file.start + tensor.first
        last = file.start + tensors[number + 1].first if number + 1 < len(tensors) else end
        if first < last:
            found.append(Range(first, last, *_kind(tensor.name, main)))
    return found


def _kind(name: str, main: str) -> tuple[RangeKind, int]:
    found = _LAYER.match(name)
    if found:
        return (RangeKind.LAYER, int(found[3])) if _family(found) == main else (RangeKind.OTHER, -1)
    if _EMBEDDING.search(name):
        return RangeKind.EMBEDDING, -1
    return (RangeKind.FINAL if _HEAD.search(name) or _FINAL.search(name) else RangeKind.OTHER), -1


def _family(found: re.Match[str]) -> str:
    return f"{found[1] or ''}.{found[2]}"


def _main_family(names: Iterable[str]) -> str:
    """Choose the family with most tensors, where a model has several towers."""
    counts = Counter(_family(found) for name in names if (found := _LAYER.match(name)))
    return min(counts, key=lambda family: (-counts[family], family), default="")


def _joined(ranges: Sequence[Range]) -> list[Range]:
    joined: list[Range] = []
    for one in ranges:
        before = joined[-1] if joined else None
        is_same = before is not None and (before.kind, before.layer, before.last) == (one.kind, one.layer, one.first)
        if before is not None and is_same and one.kind is not RangeKind.FILES:
            joined[-1] = Range(before.first, one.last, one.kind, one.layer)
        else:
            joined.append(one)
    return joined


def _says_tied(config: bytes) -> bool:
    try:
        value = json.loads(config) if config else {}
    except (ValueError, RecursionError):
        return False
    text = value.get("text_config") if isinstance(value, dict) else None
    return any(isinstance(one, dict) and one.get("tie_word_embeddings") is True for one in (value, text))


def read_header(content: bytes, num_bytes: int) -> Header | None:
    """Parse the header of a file of `num_bytes` that begins with `content`. None for neither format. Raises
    NeedMore."""
    if len(content) < min(_LENGTH.size, num_bytes):
        raise NeedMore(_LENGTH.size)
    header = _gguf(content) if content.startswith(b"GGUF") else _safetensors(content, num_bytes)
    if header is None or any(not header.num_bytes <= tensor.first <= num_bytes for tensor in header.tensors):
        return None
    return header


def _safetensors(content: bytes, num_bytes: int) -> Header | None:
    if num_bytes < _LENGTH.size:
        return None
    end = _LENGTH.size + _LENGTH.unpack_from(content)[0]
    if end > min(num_bytes, MAX_HEADER_BYTES) or content[_LENGTH.size : _LENGTH.size + 1] not in (b"{", b""):
        return None
    if len(content) < end:
        raise NeedMore(end)
    try:
        entries = json.loads(content[_LENGTH.size : end])
        tensors = (
            TensorStart(name, end + int(facts["data_offsets"][0]))
            for name, facts in entries.items()
            if name != "__metadata__"
        )
        return Header(end, tuple(tensors))
    except (AttributeError, IndexError, KeyError, TypeError, ValueError, RecursionError):
        return None


def _gguf(content: bytes) -> Header | None:
    try:
        reader = GgufReader(content)
        for _ in reader.values():
            pass
        tensors = [(tensor.name, tensor.offset) for tensor in reader.tensors()]
    except InvalidGguf:
        return None
    return Header(reader.data_first, tuple(TensorStart(name, reader.data_first + offset) for name, offset in tensors))
