"""Broken safetensors are named before vLLM sees them."""

import json
import struct
from pathlib import Path

import pytest

from glowplug_vllm import weights_check


def image(num_bytes: int = 8) -> bytes:
    tensor = {"dtype": "F32", "shape": [2], "data_offsets": [0, num_bytes]}
    header = json.dumps({"__metadata__": {"format": "pt"}, "w": tensor}).encode()
    return struct.pack("<Q", len(header)) + header + b"\0" * num_bytes


def test_whole_files_and_other_files_pass(tmp_path: Path) -> None:
    (tmp_path / "a.safetensors").write_bytes(image())
    (tmp_path / "config.json").write_text("{")
    assert weights_check.check(tmp_path) is None


@pytest.mark.parametrize(
    ("raw", "why"),
    [
        (image()[:-1], "has .* bytes, its header promises"),
        (image() + b"x", "has .* bytes, its header promises"),
        (b"", "is not a safetensors file"),
        (b"\x08" + b"\0" * 7 + b"not json", "is not a safetensors file"),
        (b"\xff" * 16, "a header of"),
        (struct.pack("<Q", 2) + b"[]", "is not a safetensors file"),
        (struct.pack("<Q", 7) + b'{"w":5}', "is not a safetensors file"),
    ],
)
def test_a_broken_file_is_named(tmp_path: Path, raw: bytes, why: str) -> None:
    (tmp_path / "b.safetensors").write_bytes(raw)
    with pytest.raises(weights_check.BrokenWeights, match=f"b.safetensors.*{why}|b.safetensors {why}"):
        weights_check.check(tmp_path)
