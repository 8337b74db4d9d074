"""Measure figures as data, write them into the pages, or check the pages.

python -m bench.figures [--only NAME]    run the benchmarks without a result at this commit, and render
python -m bench.figures --render         write the saved results into the pages
python -m bench.figures --check          write nothing; exit with 1 if a page differs from its rendering
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from bench.figures import page
from bench.figures.declared import BENCHMARKS, Benchmark
from bench.figures.results import ROOT, Result, git, has_changed, memory_gib, save, saved
from bench.measured.load import load_now
from bench.papers.cache import machine

PAGES = tuple(sorted({name for one in BENCHMARKS for name in one.pages}))
BY_HAND = frozenset(one.name for one in BENCHMARKS if one.read is None)


def age() -> Mapping[str, bool | None]:
    """Return for each saved result, by name, whether its code has changed since; None if git cannot tell."""
    found = saved()
    return {one.name: has_changed(found[one.name].commit, one.sources) for one in BENCHMARKS if one.name in found}


def rendered(name: str, ages: Mapping[str, bool | None]) -> str:
    text = (ROOT / name).read_text(encoding="utf-8")
    return page.render(text, saved(), lambda result: ages[result.name], BY_HAND)


def problems(*, release: bool) -> list[str]:
    """The problems of the pages, one line each. Before a release no figure may be older than its code."""
    ages, found = age(), []
    for name in PAGES:
        text = (ROOT / name).read_text(encoding="utf-8")
        wanted = rendered(name, ages)
        if page.without_age(text) != page.without_age(wanted) or (release and text != wanted):
            found.append(f"{name} differs from its results: run make figures-page")
        if release:
            found += [f"{name}: {one} is older than its code" for one in page.named(text) if ages[one]]
    return found


def measure(benchmarks: Sequence[Benchmark]) -> list[Result]:
    """Run the command that these benchmarks share, and read the figures of each. A benchmark that misses its bound ends
    with an error but writes its data, which is kept. Raises CalledProcessError when nothing was written, and
    LookupError, TypeError or ValueError when the data lack a figure."""
    command = benchmarks[0].command
    with tempfile.TemporaryDirectory(prefix="gp-figures-") as folder:
        file, before = Path(folder) / "figures.json", load_now()
        dirty = {one.name: bool(git("status", "--porcelain", "--", *one.sources)) for one in benchmarks}
        commit = git("rev-parse", "--short=12", "HEAD")
        if commit is None:
            raise SystemExit("git finds no commit for the results")
        argv = [sys.executable, *(part.replace("{json}", str(file)) for part in command)]
        path = f"{ROOT}:{ROOT / 'libs'}"
        done = subprocess.run(argv, cwd=ROOT, env=os.environ | {"PYTHONPATH": path}, check=False)
        if not file.exists():
            raise subprocess.CalledProcessError(done.returncode or 1, argv)
        if done.returncode:
            print(f"{benchmarks[0].name} wrote its figures, but exited with {done.returncode}", file=sys.stderr)
        data = json.loads(file.read_text(encoding="utf-8"))
    return [
        Result(
            name=one.name,
            commit=commit + ("-dirty" if dirty[one.name] else ""),
            date=time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime()),
            machine=f"{machine()}, memory {memory_gib()}",
            load=f"{before:.1f} to {load_now():.1f}",
            command="python " + " ".join(part.replace("{json}", "FILE") for part in command),
            figures=one.read(data),
        )
        for one in benchmarks
        if one.read is not None
    ]


def run(only: str) -> int:
    """Run each benchmark that writes data and has no result at this commit. Returns 1 if one failed; the others still
    run."""
    found, head, failed = saved(), git("rev-parse", "--short=12", "HEAD"), 0
    wanted: dict[tuple[str, ...], list[Benchmark]] = {}
    for benchmark in BENCHMARKS:
        if (only and benchmark.name != only) or (benchmark.name in found and found[benchmark.name].commit == head):
            continue
        if benchmark.name in BY_HAND:
            print(f"{benchmark.name} is measured by hand: its figures stay")
            continue
        wanted.setdefault(benchmark.command, []).append(benchmark)
    for benchmarks in wanted.values():
        try:
            for result in measure(benchmarks):
                print(f"wrote {save(result).relative_to(ROOT)}")
        except (subprocess.CalledProcessError, LookupError, TypeError, ValueError) as error:
            print(f"FAILED {', '.join(one.name for one in benchmarks)}: {error!r}", file=sys.stderr)
            failed = 1
    return failed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", choices=["", *(one.name for one in BENCHMARKS)], metavar="NAME")
    parser.add_argument("--render", action="store_true", help="run nothing: write the saved results into the pages")
    parser.add_argument("--check", action="store_true", help="write nothing: name pages that differ from their results")
    args = parser.parse_args()
    if args.check:
        found = problems(release=os.environ.get("GLOWPLUG_RELEASE") == "1")
        unknown = [name for name, changed in age().items() if changed is None]
        if unknown:
            print(f"git lacks the commits of {', '.join(unknown)}: their age is not checked")
        print("\n".join(found) if found else "the pages agree with their results")
        return 1 if found else 0
    failed = 0 if args.render else run(args.only)
    ages = age()
    for name in PAGES:
        (ROOT / name).write_text(rendered(name, ages), encoding="utf-8")
    return failed


if __name__ == "__main__":
    raise SystemExit(main())
