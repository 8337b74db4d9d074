"""The `glowplug` command as a person types it, against the sample fleet of real llama.cpp engines."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from glowplug.runtime.supervisor.sweep import processes_of

GLOWPLUG = (sys.executable, "-m", "glowplug.cli.main")
WAIT_S = 60.0


def glowplug(state: Path, *argv: str, check: bool = True, **env: str) -> subprocess.CompletedProcess[str]:
    """One command against the fleet of `state`."""
    full = {k: v for k, v in os.environ.items() if not k.startswith("GLOWPLUG_")} | env
    ended = subprocess.run(
        [*GLOWPLUG, argv[0], "--state-dir", str(state), *argv[1:]],
        capture_output=True,
        text=True,
        env=full,
        timeout=240,
    )
    assert not check or ended.returncode == 0, ended.stdout + ended.stderr
    return ended


def as_json(state: Path, *argv: str) -> Any:
    return json.loads(glowplug(state, *argv, "--output", "json").stdout)


@contextmanager
def running() -> Iterator[Path]:
    """The state directory of a fleet that runs; afterwards nothing of it is left."""
    with tempfile.TemporaryDirectory(prefix="gp-e2e-", ignore_cleanup_errors=True) as folder:
        path = Path(folder) / "s"
        try:
            said = glowplug(path, "up", "--detach", "--port-base", "0").stdout
            assert "curl -N http://127.0.0.1:" in said
            yield path
        finally:
            glowplug(path, "down", check=False)
            assert not processes_of(path)


def document(state: Path) -> dict[str, Any]:
    """What a running fleet says of itself: addresses, processes."""
    found: dict[str, Any] = json.loads((state / "fleet.json").read_text())
    return found
