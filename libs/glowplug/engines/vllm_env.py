"""Find vLLM's environment, and name a missing part."""

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
    return Path(given) if given else environment_dir() / "bin" / "python"


def missing(python: Path) -> str:
    """Return why vLLM cannot start, with a remedy; '' when it can. Checks only files: importing vLLM takes 15 s."""
    if not sys.platform.startswith("linux"):
        return "vLLM's CPU and CUDA builds run on Linux only; this node can use llamacpp"
    if not python.exists():
        return f"no vLLM environment: {python} does not exist ({INSTALL}, or set {ENV_VARIABLE})"
    libraries = _libraries(python)
    if not any((library / "vllm" / "__init__.py").exists() for library in libraries):
        return f"vLLM is not installed in {python.parent.parent} ({INSTALL} resumes where it stopped)"
    if not any(found for library in libraries for found in library.glob("glowplug_vllm-*.dist-info")):
        return f"the plug-in glowplug-vllm is not installed in {python.parent.parent} ({INSTALL})"
    return ""


def version(python: Path) -> str:
    """Return a string that changes when vLLM or the plug-in is reinstalled, or this checkout's plug-in is edited. A
    parked process of another version is left to its lease holders."""
    installed = [
        d for lib in _libraries(python) for name in ("vllm", "glowplug_vllm") for d in lib.glob(f"{name}*-info")
    ]
    edited = (_CHECKOUT / "libs" / "glowplug_vllm").rglob("*.py")
    return (
        "/".join(sorted(d.name for d in installed)) + f"@{max((_mtime(p) for p in (*installed, *edited)), default=0)}"
    )


def _libraries(python: Path) -> list[Path]:
    return sorted((python.parent.parent / "lib").glob("python3*/site-packages"))


def _mtime(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except FileNotFoundError:
        return 0  # an editor's scratch file
