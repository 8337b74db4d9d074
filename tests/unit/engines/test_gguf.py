"""Hostile and odd GGUF files."""

import struct
import tracemalloc
from collections.abc import Callable
from itertools import accumulate, pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from glowplug.domain.gguf import (
    MAX_ALIGNMENT,
    MAX_DIMENSIONS,
    MAX_HEADER_BYTES,
    MAX_KEY_BYTES,
    MAX_STEPS,
    MAX_TENSORS,
    MAX_TEXT_BYTES,
    MAX_VALUES,
    GgufReader,
    InvalidGguf,
    NeedMore,
)
from glowplug.engines.gguf import MAX_NUMBER, GgufFacts, bytes_as, read_facts

U8, I8, U32, I32, F32, BOOL, STRING, LIST, U64, F64 = 0, 1, 4, 5, 6, 7, 8, 9, 10, 12
MOST_BYTES = 32 << 20


def text(value: str | bytes) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def pair(key: str, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


def a_file(*values: bytes, num_tensors: int = 0, tail: bytes = b"", num_values: int | None = None) -> bytes:
    count = len(values) if num_values is None else num_values
    return b"GGUF" + struct.pack("<IQQ", 3, num_tensors, count) + b"".join(values) + tail


ARCHITECTURE = pair("general.architecture", STRING, text("llama"))
TENSOR = text("t") + struct.pack("<IQIQ", 1, 8, 0, 0)
ALIGNED = {
    "a text": pair("general.alignment", STRING, text("abc")),
    "nan": pair("general.alignment", F32, struct.pack("<f", float("nan"))),
    "infinity": pair("general.alignment", F64, struct.pack("<d", float("inf"))),
    "below nothing": pair("general.alignment", I32, struct.pack("<i", -32)),
    "nothing": pair("general.alignment", U32, struct.pack("<I", 0)),
    "true": pair("general.alignment", BOOL, b"\1"),
    "huge": pair("general.alignment", U64, struct.pack("<Q", MAX_ALIGNMENT + 1)),
}


@pytest.mark.parametrize("name", ALIGNED)
def test_an_alignment_that_is_none_is_refused_by_its_name(tmp_path: Path, name: str) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(a_file(ARCHITECTURE, ALIGNED[name], num_tensors=1, tail=TENSOR + bytes(64)))
    with pytest.raises(InvalidGguf, match=r"m\.gguf: metadata cannot be read: general\.alignment is "):
        read_facts(path)


@pytest.mark.parametrize("key", ["context_length", "block_count", "embedding_length", "attention.head_count"])
@pytest.mark.parametrize(
    ("kind", "value"),
    [
        (STRING, text("many")),
        (F32, struct.pack("<f", float("nan"))),
        (F64, struct.pack("<d", float("inf"))),
        (F32, struct.pack("<f", 0.5)),
        (I32, struct.pack("<i", -1)),
        (U64, struct.pack("<Q", (1 << 64) - 1)),
    ],
)
def test_a_number_that_is_none_is_refused_by_its_name(tmp_path: Path, key: str, kind: int, value: bytes) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(a_file(ARCHITECTURE, pair(f"llama.{key}", kind, value)))
    with pytest.raises(InvalidGguf, match=rf"m\.gguf: llama\.{key} is "):
        read_facts(path)


def test_a_number_may_be_written_as_a_whole_float_or_stand_in_a_list_of_layers(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    heads = pair("llama.attention.head_count", LIST, struct.pack("<IQ", U32, 2) + struct.pack("<II", 4, 4))
    path.write_bytes(a_file(ARCHITECTURE, pair("llama.context_length", F32, struct.pack("<f", 4096.0)), heads))
    assert read_facts(path).context_tokens == 4096


def sparse(path: Path, head: bytes, num_bytes: int) -> Path:
    with path.open("wb") as file:
        file.write(head)
        file.truncate(num_bytes)
    return path


MOST_TENSORS = "zeros read as so many tensors as may be"  # ten seconds' worth
GREEDY = {
    "one text of 512 MiB": (a_file(text("k") + struct.pack("<IQ", STRING, 512 << 20)), 600 << 20),
    "a template of 512 MiB": (
        a_file(text("tokenizer.chat_template") + struct.pack("<IQ", STRING, 512 << 20)),
        600 << 20,
    ),
    "a key of 512 MiB": (a_file(struct.pack("<Q", 512 << 20), num_values=1), 600 << 20),
    "zeros read as tensors": (a_file(num_tensors=1 << 40), 16 << 20),
    MOST_TENSORS: (a_file(num_tensors=MAX_TENSORS), 16 << 20),
    "zeros read as values": (a_file(num_values=1 << 40), 16 << 20),
    "a list of so many texts": (
        a_file(text("k") + struct.pack("<IIQ", LIST, STRING, MAX_STEPS + 1), num_values=1),
        64 << 20,
    ),
    "a list of numbers beyond the end": (a_file(text("k") + struct.pack("<IIQ", LIST, U64, 1 << 60)), 1 << 20),
    "a tensor of a billion dimensions": (a_file(num_tensors=1, tail=text("t") + struct.pack("<I", 1 << 30)), 1 << 20),
}


@pytest.mark.parametrize(
    "name", [*sorted(GREEDY.keys() - {MOST_TENSORS}), pytest.param(MOST_TENSORS, marks=pytest.mark.long)]
)
def test_what_a_file_says_of_itself_costs_its_reader_little(tmp_path: Path, name: str) -> None:
    head, num_bytes = GREEDY[name]
    path = sparse(tmp_path / "m.gguf", head, num_bytes)
    tracemalloc.start()
    try:
        read_facts(path)
    except InvalidGguf as error:
        assert str(error).startswith("m.gguf")
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < MOST_BYTES
    assert MAX_TEXT_BYTES < MOST_BYTES


KEYS = st.sampled_from(
    [
        "general.architecture",
        "general.alignment",
        "llama.block_count",
        "llama.context_length",
        "tokenizer.chat_template",
    ]
)
VALUES = st.one_of(
    st.tuples(st.just(STRING), st.binary(max_size=12).map(text)),
    st.tuples(st.just(F32), st.floats(width=32).map(lambda value: struct.pack("<f", value))),
    st.tuples(st.just(I32), st.integers(-(2**31), 2**31 - 1).map(lambda value: struct.pack("<i", value))),
    st.tuples(st.just(U64), st.integers(0, 2**64 - 1).map(lambda value: struct.pack("<Q", value))),
    st.tuples(st.integers(0, 20), st.binary(max_size=24)),
)
FILES = st.one_of(
    st.builds(
        lambda pairs, num, tail: a_file(*[pair(k, *v) for k, v in pairs], num_tensors=num, tail=tail),
        st.lists(st.tuples(KEYS, VALUES), max_size=4),
        st.integers(0, 3),
        st.binary(max_size=120),
    ),
    st.binary(max_size=60).map(lambda rest: b"GGUF" + rest),
    st.binary(max_size=40),
)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzz") / "m.gguf"


@given(content=FILES)
def test_whatever_a_file_holds_it_is_read_or_refused(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    try:
        facts = read_facts(path)
    except InvalidGguf as error:
        assert "m.gguf" in str(error)
    else:
        assert facts.context_tokens >= 0 and facts.kv_bytes_per_token >= 0


def u32(key: str, number: int) -> bytes:
    return pair(key, U32, struct.pack("<I", number))


def tensor(name: str, *shape: int, kind: int = 0, offset: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


def test_the_facts_of_a_file_are_those_of_its_layers(tmp_path: Path) -> None:
    numbers = {"block_count": 3, "context_length": 512, "embedding_length": 64, "attention.head_count": 4}
    values = [ARCHITECTURE, *(u32(f"llama.{key}", number) for key, number in numbers.items())]
    tensors = [
        tensor("output.weight", 8, 4),
        tensor("blk.0.norm", 8, kind=1, offset=128),
        tensor("blk.0.q", 64, 2, kind=2, offset=160),
        tensor("blk.1.q", 64, 4, kind=99, offset=232),
    ]
    path = tmp_path / "m.gguf"

    def facts(*more: bytes, cut: int = 0) -> GgufFacts:
        content = a_file(*values, *more, num_tensors=len(tensors), tail=b"".join(tensors))
        content += bytes(-len(content) % 32)
        path.write_bytes(content + bytes(232 - cut))
        assert read_facts(path).header_bytes == len(content)
        return read_facts(path)

    found = facts()
    first = found.header_bytes
    assert found == GgufFacts(
        architecture="llama",
        context_tokens=512,
        kv_bytes_per_token=2 * 2 * 3 * 64,
        chat_template="",
        kv_numbers=(3 * 4 * 16, 3 * 4 * 16),
        header_bytes=first,
        tensor_types=frozenset({0, 1, 2, 99}),
        matrix=("blk.0.q", 64, 2),
        tensors=tuple((first + at, first + end) for at, end in ((0, 128), (128, 144), (160, 232), (232, 232))),
    )
    with pytest.raises(InvalidGguf, match=f"cut short: {first + 231} bytes of {first + 232}"):
        facts(cut=1)
    given = facts(u32("llama.attention.head_count_kv", 2), u32("llama.attention.value_length", 8))
    assert (given.kv_numbers, given.kv_bytes_per_token) == ((3 * 2 * 16, 3 * 2 * 8), 2 * 3 * 2 * 24)
    assert facts(u32("llama.attention.key_length", 5)).kv_numbers == (3 * 4 * 5, 3 * 4 * 16)
    template = pair("tokenizer.chat_template", STRING, text("{{ x }}"))
    assert facts(template).chat_template == "{{ x }}" and facts(u32("tokenizer.chat_template", 7)).chat_template == ""


def test_a_model_that_tells_no_heads_has_one(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(a_file(ARCHITECTURE, u32("llama.block_count", 2), u32("llama.embedding_length", 8)))
    assert read_facts(path).kv_numbers == (16, 16)
    path.write_bytes(a_file(ARCHITECTURE, pair("llama.context_length", U64, struct.pack("<Q", MAX_NUMBER))))
    assert read_facts(path).context_tokens == MAX_NUMBER
    for kind, value in ((U64, struct.pack("<Q", MAX_NUMBER + 1)), (BOOL, b"\1")):
        path.write_bytes(a_file(ARCHITECTURE, pair("llama.context_length", kind, value)))
        with pytest.raises(InvalidGguf):
            read_facts(path)
    path.write_bytes(b"")
    with pytest.raises(InvalidGguf, match="is empty"):
        read_facts(path)


@pytest.mark.parametrize(
    ("kind", "numbers", "num_bytes"),
    [(0, 5, 20), (1, 5, 10), (2, 64, 36), (2, 63, 18), (8, 31, 0), (12, 512, 288), (99, 64, 0)],
)
def test_numbers_take_their_blocks(kind: int, numbers: int, num_bytes: int) -> None:
    assert bytes_as(kind, numbers) == num_bytes


def test_numbers_of_each_type_take_the_bits_that_llamacpp_says() -> None:
    plain, blocks = {0: 32, 1: 16, 30: 16}, {2: 4.5, 3: 5, 6: 5.5, 7: 6, 8: 8.5, 9: 9}
    large = {10: 2.625, 11: 3.4375, 12: 4.5, 13: 5.5, 14: 6.5625, 15: 9.125}
    for kind, bits in (plain | blocks | large).items():
        assert bytes_as(kind, 512) * 8 == 512 * bits, kind
        assert not bytes_as(kind, 0 if kind in plain else 31 if kind in blocks else 255), kind


def test_values_and_tensors_are_told_with_their_places() -> None:
    kinds = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
    written = [pair(f"k{kind}", kind, struct.pack(f"<{form}", 1)) for kind, form in kinds.items()]
    listed = pair("texts", LIST, struct.pack("<IQ", STRING, 2) + text("a") + text("bc"))
    written += [
        listed,
        pair("numbers", LIST, struct.pack("<IQ", 2, 3) + bytes(6)),
        pair("general.name", STRING, text("x")),
    ]
    written += [pair("general.architecture", STRING, text("llama")), u32("general.alignment", 64)]
    tensors = [tensor("a", 1, 2, offset=5), tensor("none"), tensor("b", 3, kind=8)]
    reader = GgufReader(a_file(*written, num_tensors=3, tail=b"".join(tensors)) + bytes(64))
    values = list(reader.values())
    ends = list(accumulate(map(len, written), initial=24))
    assert [(one.first, one.end) for one in values] == list(pairwise(ends))
    assert [one.value for one in values] == [1] * len(kinds) + [None, None, "", "llama", 64]
    found, places = list(reader.tensors()), list(accumulate(map(len, tensors), initial=ends[-1]))
    assert [(one.name, one.shape, one.kind, one.offset) for one in found] == [
        ("a", (1, 2), 0, 5), ("none", (), 0, 0), ("b", (3,), 8, 0)
    ]  # fmt: skip
    assert [(one.first, one.end + 8) for one in found] == list(pairwise(places))
    assert (reader.at, reader.data_first) == (places[-1], -(-places[-1] // 64) * 64)
    empty = GgufReader(a_file(ARCHITECTURE))
    assert [one.key for one in empty.values()] == ["general.architecture"] and empty.data_first == empty.at


def last(content: bytes) -> object:
    """What a whole reading ends with: the last key or tensor, or how many bytes are needed."""
    try:
        reader = GgufReader(content)
        values, tensors = list(reader.values()), list(reader.tensors())
        return tensors[-1].name if tensors else values[-1].key
    except NeedMore as more:
        return more.num_bytes


HEAD = 24
ALIGN = "general.alignment"
LIMITS: dict[str, tuple[Callable[[int], bytes], int, object]] = {
    "values": (lambda num: a_file(num_values=num), MAX_VALUES, HEAD + 8),
    "tensors": (lambda num: a_file(num_tensors=num), MAX_TENSORS, HEAD + 8),
    "dimensions": (lambda num: a_file(num_tensors=1, tail=tensor("t", *[1] * num)), MAX_DIMENSIONS, "t"),
    "alignment": (lambda num: a_file(u32(ALIGN, num)), MAX_ALIGNMENT, ALIGN),
    "a key": (lambda num: a_file(u32("k" * num, 1)), MAX_KEY_BYTES, "k" * MAX_KEY_BYTES),
    "a read text": (
        lambda num: a_file(pair("general.a", STRING, text("x" * num))), MAX_TEXT_BYTES, "general.a",
    ),
    "a text that is not read": (
        lambda num: a_file(text("k") + struct.pack("<IQ", STRING, num - HEAD - 21), num_values=1),
        MAX_HEADER_BYTES, MAX_HEADER_BYTES,
    ),
    "texts of all lists": (
        lambda num: a_file(
            pair("k", LIST, struct.pack("<IQ", STRING, 1) + text("")),
            text("k") + struct.pack("<IIQ", LIST, STRING, num - 1),
            num_values=2,
        ),
        MAX_STEPS, HEAD + 33 + 25 + 8,
    ),
    "a text in a list": (
        lambda num: a_file(text("k") + struct.pack("<IIQQ", LIST, STRING, 2, num - HEAD - 33), num_values=1),
        MAX_HEADER_BYTES - 1, MAX_HEADER_BYTES - 1 + 8,
    ),
    "a list of numbers": (
        lambda num: a_file(text("k") + struct.pack("<IIQ", LIST, 0, num - HEAD - 25), num_values=1),
        MAX_HEADER_BYTES, MAX_HEADER_BYTES,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", LIMITS)
def test_as_much_as_is_allowed_is_read_and_not_more(name: str) -> None:
    make, most, expected = LIMITS[name]
    assert last(make(most)) == expected
    with pytest.raises(InvalidGguf):
        last(make(most + 1))


def test_as_many_bytes_are_asked_for_as_the_next_part_needs() -> None:
    values = [ARCHITECTURE, pair("texts", LIST, struct.pack("<IQ", STRING, 2) + text("a") + text("bc"))]
    whole = a_file(*values, num_tensors=1, tail=tensor("t", 1, 2))
    asked, content = [], b""
    while not isinstance(needed := last(content), str):
        assert isinstance(needed, int) and needed > len(content)
        asked.append(needed)
        content = whole[:needed]
    sizes = [24, 8, 20, 4, 8, 5, 8, 5, 4, 12, 8, 9, 2, 8, 1, 4, 20, 8]
    assert asked == list(accumulate(sizes)) and len(content) == len(whole)


@pytest.mark.parametrize("content", [b"GGUX", b"X", b"GGML" + bytes(40), a_file()[:4] + bytes(4) + a_file()[8:]])
def test_what_does_not_begin_as_such_a_file_is_none(content: bytes) -> None:
    with pytest.raises(InvalidGguf):
        last(content)


def test_versions_two_and_three_are_read() -> None:
    for version in range(5):
        content = b"GGUF" + struct.pack("<IQQ", version, 0, 1) + ARCHITECTURE
        if version in (2, 3):
            assert last(content) == "general.architecture"
        else:
            with pytest.raises(InvalidGguf):
                last(content)


@pytest.mark.parametrize("kind", [13, 99])
def test_a_value_of_an_unknown_type_is_refused(kind: int) -> None:
    for content in (a_file(pair("k", kind, bytes(8))), a_file(pair("k", LIST, struct.pack("<IQ", kind, 0)))):
        with pytest.raises(InvalidGguf):
            last(content)
