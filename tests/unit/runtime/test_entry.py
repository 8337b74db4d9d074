"""A service's modules load with the collector off and run with it on."""

import gc
import subprocess
import sys
from pathlib import Path

import pytest

from glowplug.runtime.entry import run_service

MODULE = """
import gc
WHILE_IMPORTED = gc.isenabled()
seen = []
def main():
    seen.append(gc.isenabled())
"""


def test_a_service_is_imported_without_the_collector_and_runs_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a_service_of_a_test.py").write_text(MODULE, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    try:
        run_service("a_service_of_a_test")
    finally:
        gc.unfreeze()
        gc.enable()
    import a_service_of_a_test as made

    assert not made.WHILE_IMPORTED and made.seen == [True]


@pytest.mark.parametrize("service", ["placer", "predictor", "router"])
def test_a_service_imports_no_command_line_no_exporter_and_no_numpy(service: str) -> None:
    """A fleet starts a dozen processes at once on shared cores."""
    code = f"import sys, glowplug.services.{service}.main; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    late = {"httpx", "requests", "rich", "typer", "numpy", "yaml", "opentelemetry.exporter", "glowplug_lab.simulator"}
    assert not late & set(done.stdout.split())
    assert "glowplug.policies.scaling.union" not in done.stdout.split(), "the autoscaler's alone"
