"""The import floors, and the list of services they are kept for."""

import subprocess
import sys
import tomllib
from typing import Any

import pytest

from tests.house.tree import ROOT, SERVICES, files


@pytest.fixture(scope="module")
def contracts() -> list[dict[str, Any]]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    return list(project["tool"]["importlinter"]["contracts"])


def test_nothing_imports_up_sideways_or_in_circles() -> None:
    """In a process of its own: import-linter sets up logging for the whole process."""
    code = "import sys; from importlinter.cli import lint_imports; sys.exit(lint_imports(no_cache=True))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]


def test_every_service_is_kept_apart_from_the_others(contracts: list[dict[str, Any]]) -> None:
    (apart,) = (c for c in contracts if c["type"] == "independence")
    found = {f.split("/")[1] for f in files() if f.startswith("services/") and f.count("/") > 1}
    assert set(apart["modules"]) == {f"services.{name}" for name in found}
    assert found == set(SERVICES)


def test_the_brains_may_not_touch_the_world(contracts: list[dict[str, Any]]) -> None:
    (brains,) = (c for c in contracts if c["type"] == "forbidden")
    pure = {f"glowplug.{name}" for name in ("domain", "policies", "fleet", "controllers")}
    assert set(brains["source_modules"]) == pure
    world = {"asyncio", "time", "random", "os", "socket", "logging", "nats", "redis", "fastapi"}
    assert set(brains["forbidden_modules"]) >= world


@pytest.mark.parametrize("service", SERVICES)
def test_a_service_package_has_the_files_each_has(service: str) -> None:
    expected = {"__init__.py", "__main__.py", "main.py", "settings.py"}
    assert expected <= {f.removeprefix(f"services/{service}/") for f in files()}
