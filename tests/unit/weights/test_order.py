"""The reading order of weights, and each stage's share."""

import json
import struct

import pytest

from glowplug.domain.gguf import NeedMore
from glowplug.policies.placement.shape import parts_of
from glowplug.weights.order import (
    Header,
    Range,
    RangeKind,
    ReadingOrder,
    TensorStart,
    has_header,
    layers_of_stage,
    offset_order,
    read_header,
    reading_order,
    stage_ranges,
)
from glowplug.weights.pieces import Layout

SIZE = 100  # of each tensor


def safetensors(names: list[str]) -> bytes:
    entries = {
        name: {"dtype": "U8", "shape": [SIZE], "data_offsets": [i * SIZE, (i + 1) * SIZE]}
        for i, name in enumerate(names)
    }
    head = json.dumps({"__metadata__": {"format": "pt"}, **entries}).encode()
    return struct.pack("<Q", len(head)) + head + bytes(SIZE * len(names))


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def gguf(names: list[str], alignment: int = 64) -> bytes:
    values = [
        text("general.alignment") + struct.pack("<II", 4, alignment),
        text("tokenizer.ggml.tokens") + struct.pack("<IIQ", 9, 8, 3) + text("a") + text("bb") + text(""),
        text("tokenizer.ggml.scores") + struct.pack("<IIQ3f", 9, 6, 3, 1.0, 2.0, 3.0),
        text("general.name") + struct.pack("<I", 8) + text("x"),
        text("general.half") + struct.pack("<If", 6, 0.5),
    ]
    infos = [text(name) + struct.pack("<IQQIQ", 2, 5, 20, 0, i * 128) for i, name in enumerate(names)]
    head = b"GGUF" + struct.pack("<IQQ", 3, len(names), len(values)) + b"".join(values + infos)
    return head + bytes(-len(head) % alignment) + bytes(128 * len(names))


def kinds(order: ReadingOrder) -> list[tuple[str, int]]:
    return [(one.kind.value, one.layer) for one in order.ranges]


def covers(order: ReadingOrder, num_bytes: int) -> bool:
    ranges = sorted((one.first, one.last) for one in order.ranges)
    return [0, *(last for _, last in ranges)] == [*(first for first, _ in ranges), num_bytes]


NAMES = ["lm_head.weight", "model.embed_tokens.weight", "model.layers.0.a", "model.layers.0.b", "model.layers.10.a"]
NAMES += ["model.layers.2.a", "model.norm.weight"]


def order_of(names: list[str], config: dict[str, object] | None = None) -> tuple[ReadingOrder, int]:
    weights, settings = safetensors(names), json.dumps(config or {}).encode()
    layout = Layout.of([("config.json", len(settings)), ("model.safetensors", len(weights)), ("tokenizer.json", 9)])
    header = read_header(weights, len(weights))
    assert header is not None
    return reading_order(layout, {"model.safetensors": header}, settings), layout.num_bytes


def test_files_then_embeddings_then_the_head_then_layers() -> None:
    order, num_bytes = order_of(NAMES)
    assert kinds(order) == [
        ("files", -1),
        ("files", -1),
        ("header", -1),
        ("embedding", -1),
        ("final", -1),
        ("final", -1),
        ("layer", 0),
        ("layer", 2),
        ("layer", 10),
    ]
    assert order.ranges[0].first == 0  # config.json
    assert covers(order, num_bytes)
    assert ReadingOrder.from_json(json.loads(json.dumps(order.to_json()))) == order


@pytest.mark.parametrize(
    ("names", "config", "is_tied"),
    [
        (NAMES, {}, False),
        (NAMES, {"tie_word_embeddings": True}, True),
        (NAMES, {"text_config": {"tie_word_embeddings": True}}, True),
        (NAMES[1:], {}, True),
    ],
)
def test_embeddings_that_are_the_head_go_to_both_ends(
    names: list[str], config: dict[str, object], is_tied: bool
) -> None:
    order, _ = order_of(names, config)
    assert order.is_tied is is_tied
    last = stage_ranges(order, 1, 2)
    assert any(one.kind is RangeKind.EMBEDDING for one in last) is is_tied


def test_a_gguf_has_an_order_too() -> None:
    content = gguf(["output.weight", "token_embd.weight", "blk.1.x", "blk.0.x", "output_norm.weight"])
    header = read_header(content, len(content))
    assert header is not None
    order = reading_order(Layout.of([("", len(content))]), {"": header})
    expected = [("header", -1), ("embedding", -1), ("final", -1), ("final", -1), ("layer", 0), ("layer", 1)]
    assert kinds(order) == expected
    assert not order.is_tied
    assert order.ranges[0].last % 64 == 0
    assert covers(order, len(content))


@pytest.mark.parametrize("make", [safetensors, gguf])
def test_a_header_says_how_much_of_the_file_it_needs(make: object) -> None:
    content = make(NAMES)  # type: ignore[operator]
    whole = read_header(content, len(content))
    assert whole is not None
    num_bytes = 4
    for _ in range(200):
        try:
            assert read_header(content[:num_bytes], len(content)) == whole
            return
        except NeedMore as more:
            assert num_bytes < more.num_bytes <= whole.num_bytes
            num_bytes = more.num_bytes
    raise AssertionError("it never has enough")


@pytest.mark.parametrize(
    "content",
    [
        b"x" * 100,
        struct.pack("<Q", 90) + b"{" + b"x" * 91,
        struct.pack("<Q", 1 << 60) + b"{",
        struct.pack("<Q", 92) + json.dumps({"a": {"data_offsets": [10**9, 10**9]}}).encode().ljust(92),
        b"GGUF" + struct.pack("<IQQ", 9, 1, 1) + bytes(80),
        b"GGUF" + struct.pack("<IQQ", 3, 1, 1) + text("k") + struct.pack("<I", 99) + bytes(60),
        b"GGUF" + struct.pack("<IQQ", 3, 1, 1) + struct.pack("<Q", 1 << 62) + bytes(60),
        b"12345",
        b"",
    ],
)
def test_what_is_no_header_is_none(content: bytes) -> None:
    assert read_header(content, len(content)) is None


def test_weights_without_a_structure_come_by_offset() -> None:
    layout = Layout.of([("b.bin", 500), ("a.bin", 300), ("config.json", 9)])
    order = offset_order(layout)
    assert [(r.first, r.kind) for r in order.ranges] == [(800, RangeKind.FILES), (0, RangeKind.REST)]
    assert stage_ranges(order, 1, 2) == order.ranges
    assert has_header("a/b.safetensors")
    assert not has_header("a.bin")


def test_what_has_too_many_layers_is_not_cut() -> None:
    order, _ = order_of(["model.embed_tokens.weight", "model.layers.512.q.weight"])
    assert (order.num_layers, order.is_tied, order.to_json()["stages"]) == (0, False, {})
    assert stage_ranges(order, 1, 2) == order.ranges


def test_the_largest_tower_is_the_one_that_is_cut() -> None:
    names = [f"model.layers.{n}.{part}" for n in range(4) for part in "abc"]
    order, _ = order_of(
        [*names, "visual.blocks.0.x", "visual.blocks.9.x", "model.embed_tokens.weight", "lm_head.weight"]
    )
    assert order.num_layers == 4
    for stage in range(2):
        assert any(one.kind is RangeKind.OTHER for one in stage_ranges(order, stage, 2))


def order_with(
    num_layers: int, embeddings: int = 0, final: int = 0, *, is_tied: bool = False, layer: int = 10
) -> ReadingOrder:
    sizes = [(RangeKind.EMBEDDING, -1, embeddings), *((RangeKind.LAYER, n, layer) for n in range(num_layers))]
    ranges, first = list[Range](), 0
    for kind, number, num_bytes in (*sizes, (RangeKind.FINAL, -1, final)):
        ranges.append(Range(first, first + num_bytes, kind, number))
        first += num_bytes
    return ReadingOrder(ranges=tuple(ranges), num_layers=num_layers, is_tied=is_tied)


@pytest.mark.parametrize(
    ("order", "num_stages", "counts"),
    [
        (order_with(30), 1, [30]),
        (order_with(30), 2, [15, 15]),
        (order_with(30, 80, is_tied=True), 2, [15, 15]),  # the last stage has embeddings too
        (order_with(30, 80), 2, [11, 19]),
        (order_with(30, 80, is_tied=True), 4, [4, 11, 11, 4]),  # as SmolLM2-135M
        (order_with(30, 40, 40), 4, [6, 9, 9, 6]),
        (order_with(30, 10_000, is_tied=True), 4, [3, 12, 12, 3]),  # at most half as many again as 7.5
        (order_with(5), 4, [1, 1, 1, 2]),
        (order_with(4, 1000, 1000), 4, [1, 1, 1, 1]),
    ],
)
def test_layers_are_cut_so_that_the_largest_part_is_smallest(
    order: ReadingOrder, num_stages: int, counts: list[int]
) -> None:
    found = layers_of_stage(order, num_stages)
    assert [len(layers) for layers in found] == counts
    assert [layer for layers in found for layer in layers] == list(range(order.num_layers))


def test_layers_of_different_sizes_are_cut_by_their_bytes() -> None:
    sizes = [100, 10, 10, 10, 10, 100]
    ends = [sum(sizes[:n]) for n in range(7)]
    order = ReadingOrder(ranges=tuple(Range(ends[n], ends[n + 1], RangeKind.LAYER, n) for n in range(6)), num_layers=6)
    parts = [sum(sizes[n] for n in layers) for layers in layers_of_stage(order, 3)]
    assert max(parts) == 110, "a stage has at most three of six layers"


@pytest.mark.parametrize("num_stages", [0, 5])
def test_no_stage_is_without_a_layer(num_stages: int) -> None:
    with pytest.raises(ValueError, match="cannot be cut"):
        layers_of_stage(order_with(4), num_stages)


def test_what_engines_read_says_every_cut() -> None:
    order = order_with(6, 20, is_tied=True)
    said = order.to_json()
    assert said["stages"] == {str(n): [len(layers) for layers in layers_of_stage(order, n)] for n in range(2, 7)}
    assert ReadingOrder.from_json(said) == order


@pytest.mark.parametrize(("num_layers", "most"), [(6, 4), (3, 3), (1, 1)])
def test_what_placements_read_says_the_bytes_of_each_stage(num_layers: int, most: int) -> None:
    order = order_with(num_layers, 20, is_tied=True)
    said = order.to_json()["parts"]
    for number in range(2, most + 1):
        parts = [sum(r.last - r.first for r in stage_ranges(order, stage, number)) for stage in range(number)]
        assert parts_of(said, number) == tuple(parts)
    assert parts_of(said, most + 1) == () and parts_of(said, 1) == ()


def test_stages_read_everything_between_them_and_layers_once() -> None:
    names = [f"model.layers.{n}.a" for n in range(6)]
    order, num_bytes = order_of(["model.embed_tokens.weight", *names, "model.norm.weight", "lm_head.weight"])
    stages = [stage_ranges(order, stage, 3) for stage in range(3)]
    assert covers(ReadingOrder(ranges=tuple({one for stage in stages for one in stage})), num_bytes)
    layers = [one.layer for stage in stages for one in stage if one.kind is RangeKind.LAYER]
    assert sorted(layers) == list(range(6))
    with pytest.raises(ValueError, match="no stage 3"):
        stage_ranges(order, 3, 3)


def test_padding_goes_along_with_the_tensor_before_it() -> None:
    header = Header(10, (TensorStart("blk.0.x", 10), TensorStart("blk.1.x", 50)))
    order = reading_order(Layout.of([("", 100)]), {"": header})
    assert order.ranges[1:] == (Range(10, 50, RangeKind.LAYER, 0), Range(50, 100, RangeKind.LAYER, 1))
