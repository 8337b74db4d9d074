"""Where the environment that holds vLLM is, and what it lacks."""

import os
import sys
from pathlib import Path

import glowplug

ENV_VARIABLE = "GLOWPLUG_VLLM_ENV"
INSTALL = "make vllm-env"
_CHECKOUT = Path(glowplug.__file__).resolve().parents[2]


def environment_dir() -> Path:
    """$GLOWPLUG_VLLM_ENV, else `.venv-vllm` of this checkout. It may not exist."""
    return Path(os.environ.get(ENV_VARIABLE) or _CHECKOUT / ".venv-vllm").expanduser().absolute()


def interpreter(given: str = "") -> Path:
    """The interpreter that runs vLLM: as given, else the one of `environment_dir`."""
    return Path(given) if given else environment_dir() / "bin" / "python"


def missing(python: Path) -> str:
    """Why no vLLM can start from that interpreter, with the command that mends it; '' when it can.

    Looks at files only: importing vLLM takes 15 s.
    """
    if not sys.platform.startswith("linux"):
        return "vLLM's CPU and CUDA builds run on Linux only; this node can use llamacpp"
    if not python.exists():
        return f"no vLLM environment: {python} does not exist ({INSTALL}, or set {ENV_VARIABLE})"
    libraries = sorted((python.parent.parent / "lib").glob("python3*/site-packages"))
    if not any((library / "vllm" / "__init__.py").exists() for library in libraries):
        return f"vLLM is not installed in {python.parent.parent} ({INSTALL} goes on where it stopped)"
    if not any(library.glob("glowplug_vllm-*.dist-info") for library in libraries):
        return f"the plug-in glowplug-vllm is not installed in {python.parent.parent} ({INSTALL})"
    return ""
