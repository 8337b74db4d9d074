"""The style of the house, file by file."""

import ast
import re

import pytest

from tests import lanes
from tests.house.tree import files, files_in, literals, nodes, python, text

JUNK_NAMES = {"utils", "util", "helpers", "helper", "common", "manager", "misc"}
Function = ast.FunctionDef | ast.AsyncFunctionDef
CODE = python("libs", "services", "tests", "bench", "deploy")


def functions(path: str) -> list[Function]:
    return [n for n in nodes(path) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]


def test_no_folder_or_file_is_a_junk_drawer() -> None:
    named = [f for f in files() if {part.removesuffix(".py") for part in f.split("/")} & JUNK_NAMES]
    assert not named


def test_no_error_is_passed_over_in_silence() -> None:
    silent = [
        (f, node.lineno)
        for f in CODE
        for node in nodes(f)
        if isinstance(node, ast.ExceptHandler) and all(isinstance(s, ast.Pass) for s in node.body)
    ]
    assert not silent


def test_units_are_seconds_and_bytes() -> None:
    odd = re.compile(r"_(ms|millis|minutes|mins|kb|mb|gb|kib|mib|gib)$")
    wrong = [
        (f, node.target.id)
        for f in python(
            "libs/glowplug/domain", "libs/glowplug/events", "libs/glowplug/policies", "libs/glowplug/controllers"
        )
        for node in nodes(f)
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and odd.search(node.target.id)
    ]
    assert not wrong


@pytest.mark.parametrize(
    ("pattern", "place", "folders"),
    [
        ("glowplug" + r"\.v1", "libs/glowplug/events/subjects.py", ("libs", "services", "bench")),
        (
            r"^(?!glowplug_(?:vllm|lab)$)glowplug_[a-z_]+$",
            "libs/glowplug/telemetry/semconv.py",
            ("libs/glowplug", "services"),
        ),
    ],
    ids=["subjects", "metrics"],
)
def test_names_of_a_kind_are_built_in_one_place(pattern: str, place: str, folders: tuple[str, ...]) -> None:
    found = [
        (f, *named) for f in python(*folders) if f != place for named in literals(f) if re.search(pattern, named[1])
    ]
    assert not found


def test_tests_patch_nothing_of_ours() -> None:
    """Doubles are Memory* and Fake* adapters; a test that patches knows too much."""
    patched = [
        f for f in python("tests") if re.search(r"\bmock\.patch|MagicMock|mocker\b", text(f)) and "house" not in f
    ]
    assert not patched


def test_every_test_asserts() -> None:
    asserts = re.compile(
        r"\bassert\b|\braises\(|\b(check|expect|assert|until|wait_until|eventually|settle|hear|all_calls)\w*\("
    )
    silent = [
        (f, node.name)
        for f in python("tests")
        for node in functions(f)
        if node.name.startswith("test_") and not asserts.search(ast.unparse(node))
    ]
    assert not silent


def test_every_test_runs_in_a_lane() -> None:
    """The system lane skips files of the fast lane unless BOTH names them."""
    marked = [f for f in python("tests") if re.search(r"mark\.(system|vllm)\b", text(f)) and "/test_" in f]
    found = [f for f in marked if lanes.lane(f) == lanes.FAST and f not in lanes.BOTH and "mark.long" not in text(f)]
    assert marked and found == [], "add these to tests/lanes.py, BOTH"


def test_nothing_in_the_tree_is_of_one_machine() -> None:
    homes = re.compile(
        r"/(?:home|Users)/[a-z][\w.-]*/|/root/|/work/|\bpypi\.org|files\.pythonhosted|registry\.npmjs|proxy\.golang"
    )
    named = [
        (f, match.group())
        for f in files()
        if not f.startswith("tests/house/") and not f.endswith((".png", ".svg", ".ico", ".woff2", ".npz"))
        if (match := homes.search(text(f)))
    ]
    assert not named


def test_shell_scripts_stop_at_the_first_error() -> None:
    scripts = [f for f in files_in("deploy", "proto", ".ci") if text(f).startswith("#!/bin/sh")]
    assert scripts
    assert not [f for f in scripts if not re.search(r"^set -e?u", text(f), re.MULTILINE)]
