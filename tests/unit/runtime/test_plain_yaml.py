"""Bounded YAML: expansion bombs are refused."""

import re
import tracemalloc
from pathlib import Path

import pytest
import yaml

from glowplug.domain.errors import GlowplugError
from glowplug.runtime import model_files, plain_yaml
from glowplug_lab.simulator.scenario.load import load as load_scenario


def bomb(depth: int, width: int = 10) -> str:
    lines = [f"a0: &a0 [{', '.join(['x'] * width)}]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * width)}]" for n in range(1, depth)]
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize("depth", [7, 8, 30])
def test_an_alias_counts_for_all_that_it_names(depth: int) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(yaml.YAMLError, match=r"holds more than 100000 values(.|\n)*line \d+"):
            plain_yaml.load(bomb(depth))
        assert tracemalloc.get_traced_memory()[1] < 2 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("merge", [True, False])
def test_aliases_within_the_bounds_are_taken(merge: bool) -> None:
    text = "base: &b {x: 1}\nmore: {<<: *b, y: 2}\n" if merge else "base: &b {x: 1}\nmore: *b\n"
    more = {"x": 1, "y": 2} if merge else {"x": 1}
    assert plain_yaml.load(text) == {"base": {"x": 1}, "more": more}


def test_plain_numbers_are_taken() -> None:
    assert plain_yaml.load("[0, -1, +12, 1_000, 0x1f, 0.5]") == [0, -1, 12, 1000, 31, 0.5]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("a: &a [*a]", "refers to itself"),
        ("a: &a {b: *a}", "refers to itself"),
        ("[" * 65 + "]" * 65, "nested more than"),
        ("a: 2020-02-31", "cannot be read"),
        ("a: " + "9" * 5000, "cannot be read"),
        ("x" * (plain_yaml.MAX_CHARS + 1), "characters are more"),
        ("a: 1\n---\nb: 2\n", "more than one document"),
        ("{[a]: 1}", "unhashable"),
        ("a: 1\nb: {c: 1, d: 2, c: 3}\n", "c is given twice"),
        ("a: 010", "010 is no plain number"),
        ("a: [1:30]", "1:30 is no plain number"),
    ],
)
def test_what_is_no_plain_text_is_refused(text: str, problem: str) -> None:
    with pytest.raises(yaml.YAMLError, match=problem):
        plain_yaml.load(text)


@pytest.mark.parametrize("text", [bomb(8), "name: 2020-02-31\n", "[" * 2000, "a: &a [*a]\n", "{[a]: 1}\n"])
def test_files_that_people_hand_in_are_refused_in_words(tmp_path: Path, text: str) -> None:
    path = tmp_path / "m.yaml"
    path.write_text(text)
    with pytest.raises(GlowplugError):
        model_files.load(path)
    with pytest.raises((GlowplugError, ValueError), match=r"m\.yaml|yaml|line|value"):
        load_scenario(path)


def test_one_place_reads_yaml() -> None:
    root = Path(plain_yaml.__file__).parents[2]
    reads = re.compile(r"(?<!plain_)yaml\.(?:safe_|full_|unsafe_)?load")
    files = [*(root / "glowplug").rglob("*.py"), *(root.parent / "services").rglob("*.py")]
    found = [path.name for path in files if reads.search(path.read_text("utf-8"))]
    assert len(files) > 300 and found == []
