"""A third-party package: its policy and command are found by name, and broken ones are refused.

Lane: fast. Cost: 8 s, a build with setuptools and some Pythons."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.howto.blocks import read

PAGE = "docs/extend/package.md"
POLICY = """
from glowplug.policies.caching.ordering import Resident
from glowplug.policies.registry import choose, installed
small, large = Resident(name="s", num_bytes=10, last_used_at=1.0), Resident(name="l", num_bytes=40, last_used_at=0.0)
print(choose("eviction", "smallest_first")([small, large], 5).victims, "smallest_first" in installed("eviction"))
"""
OTHERS = """
from glowplug.domain.errors import GlowplugError
from glowplug.engines.drivers import driver, installed
from glowplug.policies.registry import choose
from glowplug.weights.sources import open_source
print(installed()[-1], open_source("mem://a").uri, choose("eviction", "lru").__module__)
for broken in (lambda: choose("eviction", "absent"), lambda: driver("no_module")):
    try:
        broken()
    except GlowplugError as error:
        print(error.message)
"""


def run(*argv: str, path: Path) -> str:
    environment = {**os.environ, "PYTHONPATH": str(path)}
    done = subprocess.run(
        [sys.executable, *argv], env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("packages")
    for block in read(PAGE).blocks:
        if block.path:
            (folder / block.path).parent.mkdir(exist_ok=True)
            (folder / block.path).write_text(block.text)
    into = folder / "installed"
    quiet = ("-m", "pip", "install", "-q", "--disable-pip-version-check", "--no-index", "--no-deps")
    run(*quiet, "--no-build-isolation", "--target", str(into), str(folder / "smallest_first"), path=folder)
    return into


def test_a_policy_is_chosen_by_its_name(installed: Path) -> None:
    assert run("-c", POLICY, path=installed) == "('s',) True\n"


def test_a_command_is_listed_and_runs(installed: Path) -> None:
    main = "from glowplug.cli.main import main; main()"
    assert re.search(r"^ +greet +Greet somebody\.$", run("-c", main, "--help", path=installed), re.MULTILINE)
    assert run("-c", main, "greet", "--name", "you", path=installed) == "hello, you\n"


def test_engines_and_sources_are_found_and_what_cannot_be_imported_is_refused_by_its_name(tmp_path: Path) -> None:
    (tmp_path / "other.py").write_text("class Mem:\n    def __init__(self, uri, options):\n        self.uri = uri\n")
    metadata = tmp_path / "other-1.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: other\nVersion: 1\n")
    (metadata / "entry_points.txt").write_text(
        "[glowplug.engines]\nzz_engine = other:Engine\nno_module = absent:Engine\n"
        "[glowplug.sources]\nmem = other:Mem\n"
        "[glowplug.policies.eviction]\nabsent = other:absent\nlru = other:Mem\n"
    )
    found, policy, engine = run("-c", OTHERS, path=tmp_path).splitlines()
    assert found == "zz_engine mem://a glowplug.policies.eviction.lru"  # a built-in name keeps its meaning
    assert "eviction policy 'absent'" in policy and "other" in policy
    assert "engine 'no_module'" in engine and "other" in engine
