"""Messages between a driver and its engine process: small JSON files in the run directory.

    spec.json    driver -> host  the model to serve, written before the process starts
    go.json      driver -> host  {"path"}: the weights are complete, or arrive there (landing.py)
    ready.json   host -> driver  {"port", "phases": [[name, started_at, ended_at], ...]}, and its known
                                 capacities: "num_slots", "kv_tokens", "lacks", "step_s"
    loaded-N.json  worker N of a pipeline's stage -> driver  {"phases"}: its weights are loaded; renewed while it lives
    failed.json  host -> driver  {"message", "code" where another start would not help}

Files, not pipes: either side may be killed and come back, and repeating a message is harmless. Times are epoch seconds.
Standard library only: glowplug/engines links to this file.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

API_KEY = "ENGINE_API_KEY"  # an environment variable: more can read a file or an argument
SPEC, GO, READY, FAILED = "spec.json", "go.json", "ready.json", "failed.json"


def loaded(local_rank: int) -> str:
    return f"loaded-{local_rank}.json"


def write(run_dir: Path, name: str, message: dict[str, Any]) -> None:
    """Atomic for readers."""
    part = run_dir / f".{name}.{os.getpid()}"
    part.write_text(json.dumps(message))
    part.replace(run_dir / name)


def read(run_dir: Path, name: str) -> dict[str, Any] | None:
    try:
        message: dict[str, Any] = json.loads((run_dir / name).read_text())
    except FileNotFoundError:
        return None
    return message


def of_this_process() -> tuple[Path, dict[str, Any]]:
    """Make SIGTERM end the process; return its run directory (argv 1) and spec. Exits with 2 without a spec."""
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))  # drained before it is stopped; nothing to save
    run_dir = Path(sys.argv[1])
    spec = read(run_dir, SPEC)
    if spec is None:
        print(f"no {SPEC} in {run_dir}", file=sys.stderr)
        sys.exit(2)
    return run_dir, spec


def wait(run_dir: Path, name: str, timeout_s: float, poll_s: float = 0.01) -> dict[str, Any]:
    """Raises TimeoutError, or FileNotFoundError when the directory vanishes."""
    deadline = time.monotonic() + timeout_s
    while (message := read(run_dir, name)) is None:
        if not run_dir.is_dir():
            raise FileNotFoundError(f"run directory {run_dir} is gone")
        if time.monotonic() > deadline:
            raise TimeoutError(f"no {name} in {run_dir} within {timeout_s:g} s")
        time.sleep(poll_s)
    return message
