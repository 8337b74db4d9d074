"""Hostile and odd GGUF files."""

import struct
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from glowplug.domain.gguf import MAX_ALIGNMENT, MAX_STEPS, MAX_TENSORS, MAX_TEXT_BYTES, InvalidGguf
from glowplug.engines.gguf import read_facts

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
