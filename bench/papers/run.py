"""Reproduce the papers' tables in the simulator: `python -m bench.papers [--only W1,M2] [--seeds 10] [--quick]`.

Every figure is simulated. Outcomes are kept per case and seed under build/papers, with the version of the code, so that
a second run computes only outdated ones, and an interrupted run resumes. The outcomes are judged and written to
bench/papers/results/<row>.json (results.py describes the format), and docs/papers/results.md and its plots are rendered
from those files; `--page` does that alone. A quick run prints the table and writes nothing.
"""

import argparse
import multiprocessing
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from bench.papers import cache, results
from bench.papers.catalogue import EXPERIMENTS, by_id
from bench.papers.experiment import Experiment, Outcome, Runs
from bench.papers.table import show, write

QUICK_SEEDS = 1
CASES_PER_PROCESS = 64  # a new process reads the traces again; an old one holds unused memory


@dataclass(frozen=True, slots=True)
class Job:
    """One case with one seed."""

    experiment_id: str
    case: str
    seed: int
    quick: bool


def carry_out(job: Job) -> tuple[Job, Outcome | None, str, float]:
    """(job, outcome or None, error, seconds it took). The outcome is kept."""
    experiment = by_id(job.experiment_id)
    made_by, load, began = cache.digest(tuple(experiment.reads)), os.getloadavg()[0], time.perf_counter()
    try:
        outcome = experiment.run(job.case, job.seed, job.quick)
    except Exception as error:  # noqa: BLE001 - a failed case must not end the other rows
        return job, None, f"{type(error).__name__}: {error}", time.perf_counter() - began
    seconds = time.perf_counter() - began
    kept = cache.made(made_by, outcome, seconds, load)
    cache.store(experiment.kept_as, job.case, job.seed, job.quick, kept)
    return job, outcome, "", seconds


def seeds_of(experiment: Experiment, num_seeds: int, quick: bool) -> list[int]:
    return experiment.seeds(QUICK_SEEDS if quick else num_seeds)


def missing(chosen: Sequence[Experiment], num_seeds: int, quick: bool) -> Iterator[Job]:
    """The jobs to compute, seed by seed, so that an interrupted run has whole seeds."""
    found: set[tuple[str, str, int]] = set()
    for seed in sorted({seed for experiment in chosen for seed in seeds_of(experiment, num_seeds, quick)}):
        for experiment in chosen:
            if seed not in seeds_of(experiment, num_seeds, quick):
                continue
            for case in experiment.cases(quick):
                kept = cache.load(experiment.kept_as, case, seed, quick, experiment.reads, stale=False)
                if kept is None and (experiment.kept_as, case, seed) not in found:
                    found.add((experiment.kept_as, case, seed))
                    yield Job(experiment.id, case, seed, quick)


def longest_first(jobs: Sequence[Job], num_seeds: int) -> list[Job]:
    """Order the jobs of each seed by their last duration, the longest first, so that no process waits for another's
    last case; jobs without one may take long."""
    seconds: dict[tuple[str, str], float] = {}
    for job in jobs:
        kept_as, seeds = by_id(job.experiment_id).kept_as, range(1, num_seeds + 1)
        if (job.experiment_id, job.case) not in seconds:
            seconds[job.experiment_id, job.case] = cache.took_s(kept_as, job.case, seeds, job.quick)
    return sorted(jobs, key=lambda job: (job.seed, -seconds[job.experiment_id, job.case]))


def compute(jobs: Sequence[Job], num_jobs: int) -> dict[Job, str]:
    """Carry out all jobs. Returns the failed ones with their reasons."""
    failed: dict[Job, str] = {}
    context = multiprocessing.get_context("spawn")
    with context.Pool(num_jobs, maxtasksperchild=CASES_PER_PROCESS) as pool:
        for at, (job, _, problem, seconds) in enumerate(pool.imap_unordered(carry_out, jobs), start=1):
            verdict = problem or "done"
            line = f"[{at}/{len(jobs)}] {job.experiment_id} {job.case}, seed {job.seed}: {verdict} in {seconds:.1f} s"
            print(line, file=sys.stderr, flush=True)
            if problem:
                failed[job] = problem
    return failed


def judged(experiment: Experiment, num_seeds: int, quick: bool, *, stale: bool) -> results.Result | None:
    """The result over the seeds for which every case is kept; None if there is none."""
    outcomes: dict[str, dict[int, Outcome]] = {case: {} for case in experiment.cases(quick)}
    made: list[cache.Kept] = []
    for seed in seeds_of(experiment, num_seeds, quick):
        found = {
            case: cache.load(experiment.kept_as, case, seed, quick, experiment.reads, stale=stale) for case in outcomes
        }
        whole = {case: kept for case, kept in found.items() if kept is not None}
        if len(whole) == len(outcomes):
            made += whole.values()
            for case, kept in whole.items():
                outcomes[case][seed] = kept.outcome
    return results.judged(experiment, Runs(outcomes), made) if made else None


def changed() -> set[str]:
    """Rows whose code has changed since their results."""
    return {
        found.row for found in results.saved(EXPERIMENTS) if found.digest != cache.digest(tuple(by_id(found.row).reads))
    }


def render() -> None:
    """Write the page from the saved results."""
    for path in write(list(results.saved(EXPERIMENTS)), changed()):
        print(f"wrote {path.relative_to(cache.ROOT)}")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.papers", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", default="", help="comma-separated rows, such as W1,M2")
    parser.add_argument("--seeds", type=int, default=10, help="seeds per case (fewer where a row says so)")
    parser.add_argument("--quick", action="store_true", help="one seed and short traces; prints, writes nothing")
    parser.add_argument("--page", action="store_true", help="run nothing: render the page from the saved results")
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument("--kept", action="store_true", help="run nothing: judge the kept outcomes, of any code")
    options = parser.parse_args(arguments)
    if options.seeds < 1 or options.jobs < 1:
        parser.error("--seeds and --jobs: at least 1")
    wanted = [name.strip() for name in options.only.split(",") if name.strip()]
    try:
        chosen = [by_id(name) for name in wanted] if wanted else list(EXPERIMENTS)
    except KeyError as error:
        parser.error(f"--only: {error.args[0]}")
    if options.page:
        render()
        return 0
    found = () if options.kept else missing(chosen, options.seeds, options.quick)
    jobs = longest_first(list(found), options.seeds)
    failed = compute(jobs, options.jobs) if jobs else {}
    rows = [judged(e, options.seeds, options.quick, stale=options.kept) for e in chosen]
    made = [row for row in rows if row is not None]
    print(show(made))
    for job, problem in failed.items():
        print(f"FAILED {job.experiment_id} {job.case}, seed {job.seed}: {problem}", file=sys.stderr)
    if not options.quick:
        for row in made:
            print(f"wrote {results.save(row).relative_to(cache.ROOT)}")
        render()
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
