"""Requantizing Q4_1 to Q8_0 within half a step."""

import struct
from pathlib import Path

import numpy as np
import pytest

from glowplug.domain.gguf import InvalidGguf
from glowplug.engines.gguf import read_facts
from glowplug.engines.requantize import Q4_1, Q8_0, eight_bits, to_q8_0


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def a_q4_1_file(blocks: bytes, *, says_type: bool = True) -> bytes:
    values = text("general.alignment") + struct.pack("<II", 4, 32)
    values += text("general.file_type") + struct.pack("<II", 4, 3) if says_type else b""
    infos = text("norm") + struct.pack("<IQIQ", 1, 2, 0, 0) + text("w") + struct.pack("<IQIQ", 1, 64, Q4_1, 32)
    head = b"GGUF" + struct.pack("<IQQ", 3, 2, 1 + says_type) + values + infos
    head += bytes(-len(head) % 32)
    return head + struct.pack("<ff", 1.5, -2.0) + bytes(24) + blocks


def some_blocks() -> tuple[bytes, np.ndarray]:
    """Two blocks, the second all zeros, and their weights."""
    numbers = np.arange(32) * 7 % 16
    packed = (numbers[:16] | numbers[16:] << 4).astype(np.uint8).tobytes()
    first = np.array([0.125, -0.5], "<f2").tobytes() + packed
    return first + bytes(20), np.concatenate([numbers * 0.125 - 0.5, np.zeros(32)])


def weights_of(made: bytes) -> tuple[np.ndarray, np.ndarray]:
    """(weights, scales) by the definition of Q8_0."""
    blocks = np.frombuffer(made, np.dtype([("d", "<f2"), ("q", "i1", 32)]))
    scales = blocks["d"].astype(float).repeat(32)
    return scales * blocks["q"].reshape(-1), scales


def test_each_weight_stays_within_a_step() -> None:
    blocks, wanted = some_blocks()
    found, scales = weights_of(eight_bits(blocks))
    assert np.all(np.abs(found - wanted) <= scales * 0.6)
    assert np.abs(found).max() > 0 and scales[-1] == 0


def test_a_file_says_what_its_tensors_are_and_keeps_the_rest(tmp_path: Path) -> None:
    blocks, wanted = some_blocks()
    source, target = tmp_path / "4.gguf", tmp_path / "8.gguf"
    source.write_bytes(a_q4_1_file(blocks))
    to_q8_0(source, target)
    facts, data = read_facts(target), target.read_bytes()
    assert facts.tensor_types == {0, Q8_0} and facts.header_bytes == read_facts(source).header_bytes
    (norm, norm_end), (first, end) = facts.tensors
    assert data[norm:norm_end] == struct.pack("<ff", 1.5, -2.0)
    assert data[first:end] == eight_bits(blocks) and np.allclose(weights_of(data[first:end])[0], wanted, atol=0.01)
    assert struct.pack("<II", 4, 7) in data[: facts.header_bytes]


def test_what_cannot_be_made_leaves_nothing(tmp_path: Path) -> None:
    source, target = tmp_path / "4.gguf", tmp_path / "8.gguf"
    source.write_bytes(a_q4_1_file(some_blocks()[0], says_type=False))
    with pytest.raises(InvalidGguf, match="does not declare its file type"):
        to_q8_0(source, target)
    assert list(tmp_path.iterdir()) == [source]
