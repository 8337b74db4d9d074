"""The docs site builds without a warning and loads nothing from the network."""

import re
import subprocess
from pathlib import Path

import pytest

from tests.house.tree import ROOT

MKDOCS = ROOT / ".venv-docs/bin/mkdocs"


@pytest.mark.long
@pytest.mark.skipif(not MKDOCS.exists(), reason="no .venv-docs: make site")
def test_the_site_builds_and_loads_nothing_from_elsewhere(tmp_path: Path) -> None:
    subprocess.run(["make", "--silent", "docs"], cwd=ROOT, check=True)
    done = subprocess.run(
        [MKDOCS, "build", "--quiet", "--site-dir", tmp_path], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert '"title":"Glossary"' in (tmp_path / "search/search_index.json").read_text().replace(": ", ":")
    loaded = [
        (page.name, address)
        for page in tmp_path.rglob("*.html")
        for tag in re.findall(r"<(?:script|link|img|iframe)\b[^>]*>", page.read_text())
        for address in re.findall(r'(?:src|href)="((?:https?:)?//[^"]*)"', tag)
    ]
    assert loaded == []
