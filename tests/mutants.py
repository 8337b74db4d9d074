"""Mutation tests: put one fault at a time into the code and see if tests notice it: `python -m tests.mutants`.

Each mutant is one change of one place: an operator replaced, a condition dropped, a number off by one, a statement left
out. It is made in a copy of the tree, and the nearest test files of the fast lane run against it: the golden scripts,
those that import the changed module, then those that import its importers. A mutant that no file notices has survived,
and is printed with its place and its change. The sample is drawn by a seed, so that two runs on one commit try the same
mutants. Tests of style, browsers and fleets of processes are not used.
"""

import argparse
import ast
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

import grimp

from tests import lanes

ROOT = Path(__file__).parent.parent
PACKAGES = (
    "libs/glowplug/controllers",
    "libs/glowplug/policies",
    "libs/glowplug/fleet",
    "libs/glowplug/memory",
    "libs/glowplug/runtime/privileges.py",
    "libs/glowplug/domain/gguf.py",
    "libs/glowplug/engines/gguf.py",
    "services/router",
)
COPIED = (
    "libs",
    "services",
    "tests",
    "bench",
    "proto",
    "deploy",
    "docs",
    "scenarios",
    "pyproject.toml",
    "Makefile",
    "README.md",
)
LEFT_OUT = ("tests/house", "tests/e2e", "tests/howto", "tests/k8s", "tests/compose", "tests/golden", "tests/unit/bench")
SCRIPTED = tuple(f"libs/glowplug/{package}/" for package in ("controllers", "policies", "fleet"))
GOLDEN = "tests/golden/test_scripts.py"  # its scripts run these
NEAR, FAR = 8, 24
TRY_S = 120.0  # per round; an endless mutant counts as noticed
_TURNED: dict[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.And: ast.Or,
    ast.Or: ast.And,
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
}
_SWAPPED = {"min": "max", "max": "min", "any": "all", "all": "any"}
_QUIET = frozenset({"log", "warnings"})  # log texts are no behaviour for tests


@dataclass(frozen=True, slots=True)
class Mutant:
    path: str  # relative to the checkout, with slashes
    number: int
    line: int
    change: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.change}"


class _Changes(ast.NodeTransformer):
    def __init__(self, wanted: int = -1) -> None:
        self.wanted, self.found = wanted, list[tuple[int, str]]()

    def _is_wanted(self, node: ast.AST, change: str) -> bool:
        self.found.append((getattr(node, "lineno", 0), change))
        return len(self.found) - 1 == self.wanted

    def visit_Compare(self, node: ast.Compare) -> ast.AST:
        self.generic_visit(node)
        for position, operator in enumerate(node.ops):
            other = _TURNED[type(operator)]
            if self._is_wanted(node, f"{ast.unparse(node)}: {type(operator).__name__} becomes {other.__name__}"):
                node.ops[position] = other()  # type: ignore[call-overload]
        return node

    def visit_BoolOp(self, node: ast.BoolOp) -> ast.AST:
        self.generic_visit(node)
        if self._is_wanted(node, f"{ast.unparse(node)}: {type(node.op).__name__} is turned"):
            node.op = _TURNED[type(node.op)]()  # type: ignore[assignment]
        if self._is_wanted(node, f"{ast.unparse(node)}: the last part is dropped"):
            return node.values[0] if len(node.values) == 2 else ast.BoolOp(node.op, node.values[:-1])
        return node

    def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
        self.generic_visit(node)
        is_text = any(isinstance(side, ast.JoinedStr) or _is_text(side) for side in (node.left, node.right))
        if (
            type(node.op) in _TURNED
            and not is_text
            and self._is_wanted(node, f"{ast.unparse(node)}: the operator is turned")
        ):
            node.op = _TURNED[type(node.op)]()  # type: ignore[assignment]
        return node

    def visit_UnaryOp(self, node: ast.UnaryOp) -> ast.AST:
        self.generic_visit(node)
        if isinstance(node.op, ast.Not) and self._is_wanted(node, f"{ast.unparse(node)}: the not is dropped"):
            return node.operand
        return node

    def visit_If(self, node: ast.If) -> ast.AST:
        self.generic_visit(node)
        for value in (True, False):
            if self._is_wanted(node, f"if {ast.unparse(node.test)}: the condition becomes {value}"):
                node.test = ast.Constant(value)
        return node

    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        if type(node.value) is int and self._is_wanted(node, f"{node.value} becomes {node.value + 1}"):
            return ast.copy_location(ast.Constant(node.value + 1), node)
        if type(node.value) is bool and self._is_wanted(node, f"{node.value} becomes {not node.value}"):
            return ast.copy_location(ast.Constant(not node.value), node)
        return node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        if _is_quiet(node):
            return node
        self.generic_visit(node)
        other = _SWAPPED.get(node.func.id) if isinstance(node.func, ast.Name) else None
        if other and self._is_wanted(node, f"{ast.unparse(node)}: becomes {other}"):
            node.func = ast.Name(other, ast.Load())
        return node

    def visit_Expr(self, node: ast.Expr) -> ast.AST:
        if isinstance(node.value, ast.Constant) or (isinstance(node.value, ast.Call) and _is_quiet(node.value)):
            return node
        self.generic_visit(node)
        if isinstance(node.value, ast.Call) and self._is_wanted(node, f"{ast.unparse(node)}: is left out"):
            return ast.copy_location(ast.Pass(), node)
        return node

    def visit_AugAssign(self, node: ast.AugAssign) -> ast.AST:
        self.generic_visit(node)
        if self._is_wanted(node, f"{ast.unparse(node)}: is left out"):
            return ast.copy_location(ast.Pass(), node)
        return node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        if node.value is not None:
            node.value = self.visit(node.value)
        return node

    def visit_Raise(self, node: ast.Raise) -> ast.AST:
        return node  # error texts are no behaviour for mutants

    def visit_Assert(self, node: ast.Assert) -> ast.AST:
        return node

    def visit_arguments(self, node: ast.arguments) -> ast.AST:
        node.defaults = [self.visit(one) for one in node.defaults]
        node.kw_defaults = [one and self.visit(one) for one in node.kw_defaults]
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> ast.AST:
        """Leave decorators and the return annotation."""
        node.args = self.visit(node.args)
        node.body = [self.visit(one) for one in node.body]
        return node

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_Module(self, node: ast.Module | ast.ClassDef) -> ast.AST:
        """Leave constants and declarations, which are tuned, not tested."""
        kept = ast.Assign | ast.AnnAssign
        node.body = [one if isinstance(one, kept) else self.visit(one) for one in node.body]
        return node

    visit_ClassDef = visit_Module


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str | bytes)


def _is_quiet(node: ast.Call) -> bool:
    owner = node.func.value if isinstance(node.func, ast.Attribute) else None
    return isinstance(owner, ast.Name) and owner.id in _QUIET


def mutants_of(path: str, source: str) -> list[Mutant]:
    changes = _Changes()
    changes.visit(ast.parse(source))
    return [Mutant(path, number, line, change) for number, (line, change) in enumerate(changes.found)]


def mutated(source: str, number: int) -> str:
    tree = _Changes(number).visit(ast.parse(source))
    return ast.unparse(ast.fix_missing_locations(tree))


def sample(packages: Sequence[str], num: int, seed: int) -> list[Mutant]:
    files = [file for package in packages for file in _python_files(ROOT / package)]
    found = [one for file in files for one in mutants_of(file.relative_to(ROOT).as_posix(), file.read_text())]
    return random.Random(seed).sample(found, min(num, len(found)))


def _python_files(place: Path) -> Iterator[Path]:
    """Raises FileNotFoundError, so that a package that has moved is not left out."""
    place.stat()
    yield from [place] if place.is_file() else sorted(place.rglob("*.py"))


class Nearest:
    def __init__(self) -> None:
        self._graph = grimp.build_graph("glowplug", "bench", "tests", cache_dir=None)

    def files(self, path: str) -> list[str]:
        """The golden scripts, and at most NEAR + FAR files; among equals, first those named after the module."""
        module = path.removeprefix("libs/").removesuffix(".py").replace("/", ".").removesuffix(".__init__")
        module = f"glowplug.{module}" if module.startswith("services.") else module
        stem, asked, seen, found = module.rpartition(".")[2], {module}, {module}, list[str]()
        while asked and len(found) < NEAR + FAR:
            importers = {one for name in asked for one in self._graph.find_modules_that_directly_import(name)} - seen
            files = [f"{one.replace('.', '/')}.py" for one in importers if one.startswith("tests.")]
            near = [file for file in files if Path(file).name.startswith("test_") and _is_asked(file)]
            found += sorted(near, key=lambda file: (stem not in file, not file.startswith("tests/unit"), file))
            seen |= importers
            asked = importers
        return [*([GOLDEN] if path.startswith(SCRIPTED) else []), *found[: NEAR + FAR]]


def _is_asked(file: str) -> bool:
    return lanes.nearest(file, lanes.LANES) in ("", lanes.FAST) and not file.startswith(LEFT_OUT)


class Copies:
    def __init__(self, folder: Path, num: int) -> None:
        self._free: SimpleQueue[Path] = SimpleQueue()
        pages = [page.name for page in ROOT.glob("*.md")]
        for number in range(num):
            place = folder / str(number)
            place.mkdir()
            for name in (*COPIED, *pages):
                source = ROOT / name
                if source.is_dir():
                    ignored = shutil.ignore_patterns("__pycache__", "*.xml")
                    shutil.copytree(source, place / name, symlinks=True, ignore=ignored)
                elif source.exists():
                    shutil.copy(source, place / name)
            self._free.put(place)

    def failing(self, tests: Sequence[str], num_workers: int) -> str:
        """The end of pytest's output on the unchanged code; "" if all pass."""
        place = self._free.get()
        command = [*_PYTEST, "-n", f"{num_workers}", "--dist", "loadfile", *tests]
        done = subprocess.run(command, cwd=place, env=_env(place), capture_output=True, text=True, check=False)
        self._free.put(place)
        return "" if done.returncode == 0 else done.stdout[-3000:]

    def notices(self, mutant: Mutant, tests: Sequence[str]) -> bool:
        place = self._free.get()
        file = place / mutant.path
        source = file.read_text()
        try:
            file.write_text(mutated(source, mutant.number))
            return any(_fails(place, some) for some in (tests[:NEAR], tests[NEAR:]) if some)
        finally:
            file.write_text(source)
            self._free.put(place)


_PYTEST = (sys.executable, "-B", "-m", "pytest", "-q", "--no-header", "-p", "no:cacheprovider", "--timeout", "60", "-m")
_PYTEST += ("not fleet and not vllm and not docker and not long",)


def _env(place: Path) -> dict[str, str]:
    return dict(os.environ) | {"PYTHONPATH": f"{place}:{place / 'libs'}"}


def _fails(place: Path, tests: Sequence[str]) -> bool:
    with tempfile.TemporaryDirectory(prefix="gp-mutant-", ignore_cleanup_errors=True) as scratch:
        running = subprocess.Popen(
            [*_PYTEST, "-x", *tests, "--basetemp", f"{scratch}/t"],
            cwd=place,
            env=_env(place) | {"TMPDIR": scratch},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            return running.wait(TRY_S) not in (0, 5)  # 5: no test ran on this machine
        except subprocess.TimeoutExpired:
            return True
        finally:
            subprocess.run(["pkill", "-KILL", "-s", str(running.pid)], check=False)


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 1 if the share noticed is below `--least`, 2 if the unchanged code fails."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__.partition("\n")[0])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--num", type=int, default=300, help="how many mutants")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--least", type=float, default=0.9, help="the share that has to be noticed")
    parser.add_argument("packages", nargs="*", default=PACKAGES, help="folders and files, from the checkout")
    asked = parser.parse_args(argv)
    chosen, nearest = sample(asked.packages, asked.num, asked.seed), Nearest()
    survivors = []
    with tempfile.TemporaryDirectory(prefix="gp-mutants-", ignore_cleanup_errors=True) as folder:
        copies = Copies(Path(folder), asked.workers)
        whole = sorted({file for mutant in chosen for file in nearest.files(mutant.path)})
        if said := copies.failing(whole, asked.workers):
            print(f"{said}\nThe tests have to pass on the unchanged code first.")
            return 2
        with ThreadPoolExecutor(asked.workers) as workers:
            noticed = workers.map(lambda one: copies.notices(one, nearest.files(one.path)), chosen)
            for number, (mutant, is_noticed) in enumerate(zip(chosen, noticed, strict=True), 1):
                print(f"{number}/{len(chosen)} {'noticed ' if is_noticed else 'SURVIVED'} {mutant}", flush=True)
                survivors += [] if is_noticed else [mutant]
    share = 1 - len(survivors) / len(chosen) if chosen else 0.0
    print(f"\n{len(chosen) - len(survivors)} of {len(chosen)} noticed ({share:.1%}), by {len(whole)} test files")
    for mutant in survivors:
        print(f"survived: {mutant}")
    return 0 if share >= asked.least else 1


if __name__ == "__main__":
    raise SystemExit(main())
