"""Files between the agent's driver and one server, in the instance's run directory.

    spec.json    driver -> server  {"argv", "launched_at", "wait_s", "system_prompt"}, before the process starts
    go.json      driver -> server  {"path"}: the weights are complete, or arrive there (landing.py)
    ready.json   server -> driver  {"port", "phases": [[name, started_at, ended_at], ...], "num_slots", "kv_tokens"}
    loaded-N.json  worker N of a pipeline's stage -> driver  {"phases"}; renewed while a later stage lives
    failed.json  server -> driver  {"message"}
    exit.json    zygote -> driver  {"code", "at"}: how a parked-started server ended

The other side is glowplug/engines/rendezvous.py. Times are epoch seconds. Standard library only."""

import json
import os
import time
from pathlib import Path
from typing import Any

SPEC, GO, READY, FAILED, EXIT = "spec.json", "go.json", "ready.json", "failed.json", "exit.json"


def loaded(local_rank: int) -> str:
    return f"loaded-{local_rank}.json"


def write(run_dir: Path, name: str, message: dict[str, Any]) -> None:
    part = run_dir / f".{name}.{os.getpid()}"
    part.write_text(json.dumps(message))
    part.replace(run_dir / name)


def read(run_dir: Path, name: str) -> dict[str, Any]:
    """Raises FileNotFoundError before the message is written."""
    message: dict[str, Any] = json.loads((run_dir / name).read_text())
    return message


def wait(run_dir: Path, name: str, timeout_s: float, poll_s: float = 0.01) -> dict[str, Any]:
    """Wait for a message. Raises TimeoutError, or FileNotFoundError if the directory is removed."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            return read(run_dir, name)
        except FileNotFoundError:
            if not run_dir.is_dir():
                raise
        if time.monotonic() > deadline:
            raise TimeoutError(f"no {name} in {run_dir} within {timeout_s:g} s")
        time.sleep(poll_s)
