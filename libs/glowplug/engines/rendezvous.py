"""How a driver and the engine process it started exchange messages: small JSON files in the run directory.

    spec.json    driver -> host  what to serve, written before the process starts
    go.json      driver -> host  {"path"}: the weights are complete, or arrive there (landing.py)
    ready.json   host -> driver  {"port", "phases": [[name, started_at, ended_at], ...]}, and what the engine holds, as
                                 far as it says so: "num_slots", "kv_tokens", "lacks", "step_s"
    loaded-N.json  worker N of a pipeline's stage -> driver  {"phases"}: its weights are loaded
    failed.json  host -> driver  {"message", "code" where waiting for another start would not help}

Files, not pipes: either side may be killed and come back, and saying a thing twice is harmless.
Standard library only, since engine processes import it.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

API_KEY = "ENGINE_API_KEY"  # variable of the engine's environment; a file or an argument would be read by more
SPEC, GO, READY, FAILED = "spec.json", "go.json", "ready.json", "failed.json"


def loaded(local_rank: int) -> str:
    """The file by which one worker of a pipeline's stage says that its weights are loaded."""
    return f"loaded-{local_rank}.json"


def write(run_dir: Path, name: str, message: dict[str, Any]) -> None:
    """Write one message atomically: readers see all of it or nothing."""
    part = run_dir / f".{name}.{os.getpid()}"
    part.write_text(json.dumps(message))
    part.replace(run_dir / name)


def read(run_dir: Path, name: str) -> dict[str, Any] | None:
    """The message, or None while it has not been written."""
    try:
        message: dict[str, Any] = json.loads((run_dir / name).read_text())
    except FileNotFoundError:
        return None
    return message


def of_this_process() -> tuple[Path, dict[str, Any]]:
    """The run directory that an engine process was started with (argv 1), and its spec; SIGTERM ends the process from
    now on. Exits with 2 when there is no spec."""
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))  # drained before it is stopped; nothing to save
    run_dir = Path(sys.argv[1])
    spec = read(run_dir, SPEC)
    if spec is None:
        print(f"no {SPEC} in {run_dir}", file=sys.stderr)
        sys.exit(2)
    return run_dir, spec


def wait(run_dir: Path, name: str, timeout_s: float, poll_s: float = 0.01) -> dict[str, Any]:
    """Block until the message is there. Raises TimeoutError, or FileNotFoundError when the directory goes away."""
    deadline = time.monotonic() + timeout_s
    while (message := read(run_dir, name)) is None:
        if not run_dir.is_dir():
            raise FileNotFoundError(f"run directory {run_dir} is gone")
        if time.monotonic() > deadline:
            raise TimeoutError(f"no {name} in {run_dir} within {timeout_s:g} s")
        time.sleep(poll_s)
    return message
