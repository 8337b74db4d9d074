"""Facts of a LoRA adapter from its files: a PEFT directory (vLLM), or a GGUF file (llama.cpp)."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import Any

from glowplug.domain.gguf import GgufReader, InvalidGguf, NeedMore

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
MAX_CONFIG_BYTES = 1 << 20
MAX_RANK = 1 << 16


class InvalidAdapter(ValueError):
    """The files are not a LoRA adapter that an engine could take."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraFacts:
    engine: str  # whose format it has
    rank: int  # the largest
    modules: tuple[str, ...]  # names of the projections it changes


def read(path: Path) -> LoraFacts | None:
    """Return None for neither format: an emulated engine takes it. Raises InvalidAdapter, OSError."""
    if path.is_dir():
        return _peft(path)
    with path.open("rb") as file:
        if file.read(4) != b"GGUF":
            return None
        with mmap(file.fileno(), 0, access=ACCESS_READ) as data:
            try:
                return _gguf(data)
            except (InvalidGguf, NeedMore) as error:
                raise InvalidAdapter(f"{path.name}: {error}") from error


def _peft(path: Path) -> LoraFacts:
    config = path / CONFIG
    if not config.is_file():
        raise InvalidAdapter(f"{path.name} has no {CONFIG}")
    if config.stat().st_size > MAX_CONFIG_BYTES:
        raise InvalidAdapter(f"{CONFIG} has more than {MAX_CONFIG_BYTES} bytes")
    try:
        said: Any = json.loads(config.read_bytes())
    except ValueError as error:
        raise InvalidAdapter(f"{CONFIG} is not JSON: {error}") from error
    if not isinstance(said, Mapping) or str(said.get("peft_type", "")).upper() != "LORA":
        raise InvalidAdapter(f"{CONFIG} does not declare a LoRA adapter (peft_type)")
    if not (path / WEIGHTS).is_file() and not (path / "adapter_model.bin").is_file():
        raise InvalidAdapter(f"{path.name} has no {WEIGHTS}")
    pattern = said.get("rank_pattern") or {}
    ranks = [said.get("r"), *(pattern.values() if isinstance(pattern, Mapping) else ())]
    if any(type(rank) is not int or not 0 < rank <= MAX_RANK for rank in ranks):
        raise InvalidAdapter(f"{CONFIG}: r is {said.get('r')!r:.40}, not a whole number from 1 to {MAX_RANK}")
    modules = said.get("target_modules") or ()
    names = (modules,) if isinstance(modules, str) else modules if isinstance(modules, list) else ()
    return LoraFacts(engine="vllm", rank=max(ranks), modules=tuple(sorted(map(str, names))))


def _gguf(data: mmap) -> LoraFacts:
    reader = GgufReader(data)
    for _ in reader.values():
        pass
    ranks, modules = [], set()
    for tensor in reader.tensors():
        if tensor.name.endswith(".lora_a") and len(tensor.shape) >= 2:
            ranks.append(tensor.shape[1])
            modules.add(tensor.name.removesuffix(".lora_a").removesuffix(".weight").rpartition(".")[2])
    if not ranks:
        raise InvalidAdapter("the GGUF file holds a whole model, not an adapter")
    return LoraFacts(engine="llamacpp", rank=max(ranks), modules=tuple(sorted(modules)))
