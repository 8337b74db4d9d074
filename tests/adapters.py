"""A real small LoRA adapter for the sample model, made from a seed: as PEFT has it, as llama.cpp reads it, and merged.

    python -m tests.adapters OUT [--seed 1] [--rank 8]       prints the paths

The delta of a projection is W' = W + (alpha / rank) B A. A and B are random, and large enough that greedy answers
differ from the base's. `merged` writes the base with W' in place of W, so that a test can hold both ways of serving
against one another.
"""

import argparse
import json
import shutil
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from glowplug.domain.gguf import GgufReader, Tensor, padded
from glowplug.engines.gguf import bytes_of
from glowplug.engines.samples import prepare

Matrix = NDArray[np.float32]
F32, F16, Q8_0, BF16 = 0, 1, 8, 30  # GGML's numbers
_ALIGNMENT = 32
MODULES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


@dataclass(frozen=True, slots=True)
class Shape:
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int

    def of(self, module: str) -> tuple[int, int]:
        kv = self.hidden // self.heads * self.kv_heads
        outputs = {"attn_k": kv, "attn_v": kv, "ffn_gate": self.ffn, "ffn_up": self.ffn}.get(module, self.hidden)
        return outputs, self.ffn if module == "ffn_down" else self.hidden


SMOLLM2 = Shape(layers=30, hidden=576, heads=9, kv_heads=3, ffn=1536)


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    """Factors by (layer, module), with rows in Hugging Face's order."""

    shape: Shape
    rank: int
    alpha: float
    factors: Mapping[tuple[int, str], tuple[Matrix, Matrix]]  # A (rank, inputs), B (outputs, rank)


def make(
    seed: int, rank: int = 8, shape: Shape = SMOLLM2, modules: Sequence[str] = tuple(MODULES), size: float = 0.02
) -> Adapter:
    """`size`: the root mean square of each entry of the delta, before scaling by alpha / rank."""
    rng = np.random.default_rng(seed)
    factors = {}
    for layer in range(shape.layers):
        for module in modules:
            outputs, inputs = shape.of(module)
            a = rng.standard_normal((rank, inputs), np.float32)
            b = rng.standard_normal((outputs, rank), np.float32) * np.float32(size / rank**0.5)
            factors[layer, module] = a, b
    return Adapter(shape=shape, rank=rank, alpha=float(rank), factors=factors)


def write_peft(adapter: Adapter, out: Path) -> Path:
    out.mkdir(parents=True, exist_ok=True)
    modules = sorted({MODULES[module].rpartition(".")[2] for _, module in adapter.factors})
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "HuggingFaceTB/SmolLM2-135M-Instruct",
        "r": adapter.rank,
        "lora_alpha": adapter.alpha,
        "target_modules": modules,
        "bias": "none",
    }
    (out / "adapter_config.json").write_text(json.dumps(config, indent=2))
    tensors = {}
    for (layer, module), (a, b) in adapter.factors.items():
        name = f"base_model.model.model.layers.{layer}.{MODULES[module]}"
        tensors[f"{name}.lora_A.weight"], tensors[f"{name}.lora_B.weight"] = a, b
    _write_safetensors(tensors, out / "adapter_model.safetensors")
    return out


def write_gguf(adapter: Adapter, out: Path) -> Path:
    tensors = {}
    for (layer, module), (a, b) in adapter.factors.items():
        name = f"blk.{layer}.{module}.weight"
        tensors[f"{name}.lora_a"], tensors[f"{name}.lora_b"] = a, _rows_of_gguf(b, module, adapter.shape)
    out.parent.mkdir(parents=True, exist_ok=True)
    values: dict[str, str | float] = {
        "general.type": "adapter",
        "general.architecture": "llama",
        "adapter.type": "lora",
        "adapter.lora.alpha": adapter.alpha,
    }
    with out.open("wb") as file:
        file.write(b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(values)))
        for key, value in values.items():
            file.write(_text(key) + (struct.pack("<If", 6, value) if isinstance(value, float) else _string(value)))
        at = 0
        for name, matrix in tensors.items():
            file.write(_text(name) + struct.pack("<IQQIQ", 2, *reversed(matrix.shape), F32, at))
            at += padded(matrix.nbytes, _ALIGNMENT)
        for matrix in tensors.values():
            file.write(bytes(padded(file.tell(), _ALIGNMENT) - file.tell()))
            file.write(matrix.tobytes())
    return out


def merged(base: Path, out: Path, adapter: Adapter | None, modules: Sequence[str] = tuple(MODULES)) -> Path:
    """`base`, a Q8_0 GGUF, with these projections in 32 bits, plus the delta if any: both ways of serving then compute
    with the same precision."""
    with base.open("rb") as file, mmap(file.fileno(), 0, access=ACCESS_READ) as data, out.open("wb") as made:
        reader = GgufReader(data)
        for _ in reader.values():
            pass
        tensors = list(reader.tensors())
        begin = reader.data_first
        head = bytearray(data[:begin])
        made.seek(begin)
        for tensor in tensors:
            numbers, kind = data[begin + tensor.offset : begin + tensor.offset + bytes_of(tensor)], tensor.kind
            layer, module = _place(tensor)
            if module in modules:
                matrix = _floats(numbers, kind).reshape(tuple(reversed(tensor.shape)))
                if adapter is not None and (layer, module) in adapter.factors:
                    a, b = adapter.factors[layer, module]
                    matrix = matrix + _rows_of_gguf(b, module, adapter.shape) @ a * (adapter.alpha / adapter.rank)
                numbers, kind = matrix.astype(np.float32).tobytes(), F32
            offset = padded(made.tell(), reader.alignment)
            made.seek(offset)
            made.write(numbers)
            struct.pack_into("<IQ", head, tensor.end - 4, kind, offset - begin)
        made.seek(0)
        made.write(head)
    return out


def merged_hf(base: Path, out: Path, adapter: Adapter) -> Path:
    out.mkdir()
    for other in base.iterdir():
        if other.name != "model.safetensors":
            shutil.copyfile(other, out / other.name)
    names = {f"model.layers.{n}.{MODULES[module]}.weight": (n, module) for n, module in adapter.factors}
    with (base / "model.safetensors").open("rb") as file, mmap(file.fileno(), 0, access=ACCESS_READ) as data:
        (length,) = struct.unpack_from("<Q", data)
        head = json.loads(data[8 : 8 + length])
        head.pop("__metadata__", None)
        tensors = {}
        for name, told in head.items():
            first, end = told["data_offsets"]
            matrix = np.frombuffer(data[8 + length + first : 8 + length + end], "<u2").astype("<u4")
            matrix = (matrix << 16).view("<f4").reshape(told["shape"])
            if name in names:
                a, b = adapter.factors[names[name]]
                matrix = matrix + b @ a * np.float32(adapter.alpha / adapter.rank)
            tensors[name] = matrix.astype(np.float32)
    _write_safetensors(tensors, out / "model.safetensors")
    return out


def _place(tensor: Tensor) -> tuple[int, str]:
    parts = tensor.name.split(".")
    return (int(parts[1]), parts[2]) if parts[0] == "blk" and parts[-1] == "weight" else (-1, "")


def _floats(numbers: bytes, kind: int) -> Matrix:
    if kind == Q8_0:
        blocks = np.frombuffer(numbers, np.dtype([("d", "<f2"), ("q", "i1", 32)]))
        return (blocks["q"].astype(np.float32) * blocks["d"].astype(np.float32)[:, None]).ravel()
    assert kind in (F32, F16), f"GGML's type {kind} is not unpacked here"
    return np.frombuffer(numbers, "<f4" if kind == F32 else "<f2").astype(np.float32)


def _rows_of_gguf(b: Matrix, module: str, shape: Shape) -> Matrix:
    """GGUF puts the halves of rotary pairs side by side in the rows of q and k."""
    if module not in ("attn_q", "attn_k"):
        return b
    heads = shape.heads if module == "attn_q" else shape.kv_heads
    rows, columns = b.shape
    return b.reshape(heads, 2, rows // heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)


def _write_safetensors(tensors: Mapping[str, Matrix], out: Path) -> None:
    head: dict[str, Any] = {}
    at = 0
    for name, matrix in tensors.items():
        head[name] = {"dtype": "F32", "shape": list(matrix.shape), "data_offsets": [at, at + matrix.nbytes]}
        at += matrix.nbytes
    text = json.dumps({"__metadata__": {"format": "pt"}, **head}).encode()
    text += b" " * (-len(text) % 8)
    with out.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.writelines(matrix.tobytes() for matrix in tensors.values())


def _text(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


def _string(text: str) -> bytes:
    return struct.pack("<I", 8) + _text(text)


def _all(out: Path, seed: int, rank: int) -> Iterator[Path]:
    adapter, base = make(seed, rank), prepare()
    yield write_peft(adapter, out / "peft")
    yield write_gguf(adapter, out / "adapter.gguf")
    yield merged(base, out / "base.gguf", None)
    yield merged(base, out / "merged.gguf", adapter)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--rank", type=int, default=8)
    given = parser.parse_args()
    print(*_all(given.out, given.seed, given.rank), sep="\n")
