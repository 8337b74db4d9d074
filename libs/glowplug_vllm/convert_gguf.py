"""A GGUF file re-saved as a HF directory with bfloat16 safetensors: `python -m glowplug_vllm.convert_gguf SRC OUT`.

This vLLM has no GGUF loader; transformers reads the file, unpacks it and saves it. OUT appears
whole or not at all. About 20 s and 1.5 GB of memory for SmolLM2-135M.
"""

import argparse
import os
import shutil
import sys
import time
from pathlib import Path
from typing import Any


def convert(source: Path, out: Path) -> None:
    """Raises FileExistsError if `out` exists, OSError and ValueError for a file that transformers cannot read."""
    if out.exists():
        raise FileExistsError(out)
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer  # type: ignore[import-not-found]

    folder, name = str(source.parent), source.name
    began = time.monotonic()

    def say(step: str) -> None:
        print(f"[{time.monotonic() - began:5.1f} s] {step}", flush=True)

    say("reading the tokenizer")
    tokenizer: Any = AutoTokenizer.from_pretrained(folder, gguf_file=name)
    say("unpacking the weights")
    model: Any = AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype=torch.bfloat16)
    _forget_quantisation(model)
    part = out.with_name(f".{out.name}.{os.getpid()}")
    try:
        say("writing safetensors")
        model.save_pretrained(part)
        tokenizer.save_pretrained(part)
        for file in part.iterdir():
            file.chmod(0o644)
        part.rename(out)
    finally:
        shutil.rmtree(part, ignore_errors=True)
    say(f"done: {sum(f.stat().st_size for f in out.iterdir()) / 1e6:.0f} MB in {out}")


def _forget_quantisation(model: Any) -> None:
    """Unpacked weights still count as quantised, which cannot be saved."""
    model.hf_quantizer = None
    model.is_quantized = False
    if hasattr(model, "quantization_method"):
        model.quantization_method = None
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="glowplug_vllm.convert_gguf", description=__doc__)
    parser.add_argument("source", type=Path)
    parser.add_argument("out", type=Path)
    options = parser.parse_args(argv)
    convert(options.source, options.out)
    return 0


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    sys.exit(main())
