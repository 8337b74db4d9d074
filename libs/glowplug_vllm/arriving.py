"""Start a server while its weights arrive: wait for what vLLM needs first, and choose whether it reads weights as they
land (arriving_load.py) or after all are there."""

import json
import os
import struct
from pathlib import Path
from typing import Any

from glowplug_vllm.landing import Landing

_MARK = "_GLOWPLUG_WEIGHTS_ARRIVE"
_LENGTH = struct.Struct("<Q")
_FORMATS = ("auto", "hf", "safetensors")
_MAX_HEADER_BYTES = 100_000_000


class NotAsTheyLand(RuntimeError):
    """This vLLM loads its weights in an unknown way."""


def wait_for_headers(landing: Landing) -> None:
    """Wait for configuration, tokenizer and the headers of all safetensors files. Raises WeightsDropped,
    TimeoutError."""
    landing.wait_small_files()
    for path in sorted(landing.root.glob("*.safetensors")):
        landing.wait(path, 0, min(_LENGTH.size, path.stat().st_size))
        with path.open("rb") as file:
            start = file.read(_LENGTH.size)
        if len(start) == _LENGTH.size:
            num_bytes = min(_LENGTH.unpack(start)[0], _MAX_HEADER_BYTES)
            landing.wait(path, 0, min(_LENGTH.size + num_bytes, path.stat().st_size))


def begin(landing: Landing, args: Any, run_dir: Path) -> None:
    """Let vLLM with these arguments read weights as they land, or wait for all of them, or those of its stage of
    `nnodes`. Raises WeightsDropped, TimeoutError."""
    if why := _not_as_they_land(landing.root, args):
        print(f"waiting for all weights: {why}", flush=True)
        landing.wait_whole(getattr(args, "node_rank", 0), getattr(args, "nnodes", 1))
        return
    os.environ[_MARK] = str(run_dir / "arrived")
    from glowplug_vllm import arriving_load

    arriving_load.install()  # for forked engine cores; plugin.register does it in fresh ones


def is_on() -> bool:
    return bool(os.environ.get(_MARK))


def mark() -> None:
    """Note that a model was loaded correctly. Raises OSError."""
    Path(os.environ[_MARK]).touch()


def check() -> None:
    """Raises NotAsTheyLand if a model was loaded in another way, from incomplete files."""
    if is_on() and not Path(os.environ[_MARK]).exists():
        raise NotAsTheyLand("vLLM has loaded weights that were still on their way without waiting for them")


def _not_as_they_land(root: Path, args: Any) -> str:
    load_format = str(getattr(args, "load_format", "auto"))
    if load_format not in _FORMATS:
        return f"--load-format {load_format} reads its files in its own way"
    if (getattr(args, "model_loader_extra_config", None) or {}) != {}:
        return "--model-loader-extra-config may read files ahead"
    if "bitsandbytes" in (str(getattr(args, "quantization", "")), _quantization(root)):
        return "bitsandbytes reads its files in its own way"
    return "" if any(root.glob("*.safetensors")) else "they are not safetensors"


def _quantization(root: Path) -> str:
    try:
        config = json.loads((root / "config.json").read_bytes()).get("quantization_config") or {}
        return str(config.get("quant_method", ""))
    except (OSError, ValueError, AttributeError):
        return ""
