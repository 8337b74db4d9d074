"""The tree as git tracks or would track it, parsed once."""

import ast
import gc
import gzip
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
SERVICES = ("router", "predictor", "placer", "autoscaler", "prefetcher", "agent", "console", "operator")
ON_THE_BUS = SERVICES[:-1]  # the operator uses only the fleet's REST


@cache
def files() -> tuple[str, ...]:
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    )
    names = listed.stdout.decode().split("\0")
    return tuple(sorted({name for name in names if name and (ROOT / name).is_file()}))


def files_in(*folders: str, suffix: str = "") -> list[str]:
    return [f for f in files() if f.endswith(suffix) and any(f.startswith(f"{folder}/") for folder in folders)]


def python(*folders: str) -> list[str]:
    return files_in(*folders, suffix=".py")


@cache
def text(path: str) -> str:
    whole = (ROOT / path).read_bytes()
    return (gzip.decompress(whole) if path.endswith(".gz") else whole).decode()


@cache
def tree(path: str) -> ast.Module:
    gc.disable()  # a collection would scan every tree in vain: all of them stay
    try:
        return ast.parse(text(path), path)
    finally:
        gc.freeze()
        gc.enable()


@cache
def nodes(path: str) -> tuple[ast.AST, ...]:
    gc.disable()
    try:
        return tuple(ast.walk(tree(path)))
    finally:
        gc.freeze()
        gc.enable()


def literals(path: str) -> Iterator[tuple[int, str]]:
    """(line, text) of every string, inside f-strings too, without docstrings."""
    owners = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    docs = {_opening(n.body) for n in nodes(path) if isinstance(n, owners)}
    for node in nodes(path):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docs:
            yield node.lineno, node.value


def _opening(body: list[ast.stmt]) -> int:
    first = body[0] if body else None
    return id(first.value) if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) else 0
