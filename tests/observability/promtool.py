"""Debian's `prometheus` package: its server and promtool, and how tests run them."""

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HERE = ROOT / "deploy/observability"
needs_promtool = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="promtool is not here (apt install prometheus)"
)


def promtool(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["promtool", *args], capture_output=True, text=True, check=False, cwd=HERE)
