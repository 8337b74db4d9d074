"""The papers' tables, reproduced in the simulator: `python -m bench.papers [--only W1,M2] [--seeds 10] [--quick]`.

Every figure is simulated. Outcomes are kept per case, seed and code version, so that a second run computes only what
has changed. Writes docs/papers/results.md and its plots (a quick run prints the table and writes nothing).
"""

import argparse
import multiprocessing
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from bench.papers import cache
from bench.papers.catalogue import EXPERIMENTS, by_id
from bench.papers.experiment import Experiment, Outcome, Runs, Verdict
from bench.papers.table import Row, show, write

QUICK_SEEDS = 1
CASES_PER_PROCESS = 64  # a new process reads the traces again; an old one holds memory it no longer needs


@dataclass(frozen=True, slots=True)
class Job:
    """One case with one seed."""

    experiment_id: str
    case: str
    seed: int
    quick: bool


def carry_out(job: Job) -> tuple[Job, Outcome | None, str, float]:
    """(job, outcome or None, what went wrong, seconds it took). The outcome is kept."""
    experiment = by_id(job.experiment_id)
    made_by, began = cache.digest(tuple(experiment.reads)), time.perf_counter()
    try:
        outcome = experiment.run(job.case, job.seed, job.quick)
    except Exception as error:  # noqa: BLE001 - one failed case must not take the other sixteen rows with it
        return job, None, f"{type(error).__name__}: {error}", time.perf_counter() - began
    seconds = time.perf_counter() - began
    cache.store(experiment.kept_as, job.case, job.seed, job.quick, made_by, outcome, seconds)
    return job, outcome, "", seconds


def seeds_of(experiment: Experiment, num_seeds: int, quick: bool) -> list[int]:
    return experiment.seeds(QUICK_SEEDS if quick else num_seeds)


def missing(chosen: Sequence[Experiment], num_seeds: int, quick: bool, *, fresh: bool, stale: bool) -> Iterator[Job]:
    """What must be computed, seed by seed, so that a broken-off run has whole seeds."""
    found: set[tuple[str, str, int]] = set()
    for seed in sorted({seed for experiment in chosen for seed in seeds_of(experiment, num_seeds, quick)}):
        for experiment in chosen:
            if seed not in seeds_of(experiment, num_seeds, quick):
                continue
            for case in experiment.cases(quick):
                kept = (
                    None if fresh else cache.load(experiment.kept_as, case, seed, quick, experiment.reads, stale=stale)
                )
                if kept is None and (experiment.kept_as, case, seed) not in found:
                    found.add((experiment.kept_as, case, seed))
                    yield Job(experiment.id, case, seed, quick)


def longest_first(jobs: Sequence[Job], num_seeds: int) -> list[Job]:
    """Seed by seed, and in each what took longest the last time first, so that no process waits for the other's last
    case; what was never timed may take long."""
    seconds: dict[tuple[str, str], float] = {}
    for job in jobs:
        kept_as, seeds = by_id(job.experiment_id).kept_as, range(1, num_seeds + 1)
        if (job.experiment_id, job.case) not in seconds:
            seconds[job.experiment_id, job.case] = cache.took_s(kept_as, job.case, seeds, job.quick)
    return sorted(jobs, key=lambda job: (job.seed, -seconds[job.experiment_id, job.case]))


def compute(jobs: Sequence[Job], num_jobs: int) -> dict[Job, str]:
    """Carry out all jobs; returns those that failed with their reasons."""
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


def judged(experiment: Experiment, num_seeds: int, quick: bool, *, stale: bool) -> tuple[Runs, Verdict] | None:
    """The verdict over the seeds for which every case is kept; None when there is none."""
    outcomes: dict[str, dict[int, Outcome]] = {case: {} for case in experiment.cases(quick)}
    for seed in seeds_of(experiment, num_seeds, quick):
        found = {
            case: cache.load(experiment.kept_as, case, seed, quick, experiment.reads, stale=stale) for case in outcomes
        }
        if all(outcome is not None for outcome in found.values()):
            for case, outcome in found.items():
                outcomes[case][seed] = outcome or {}
    runs = Runs(outcomes)
    return (runs, experiment.judge(runs)) if runs.seeds else None


def older(rows: Sequence[Row], num_seeds: int) -> Iterator[str]:
    """Ids of the rows that stand, wholly or in part, on outcomes of an earlier version of the code."""
    for experiment, shown in rows:
        fresh = judged(experiment, num_seeds, False, stale=False) if shown else None
        if shown and (fresh is None or len(fresh[0].seeds) < len(shown[0].seeds)):
            yield experiment.id


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.papers", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", default="", help="comma-separated rows, such as W1,M2")
    parser.add_argument("--seeds", type=int, default=10, help="seeds per case (fewer where a row says so)")
    parser.add_argument("--quick", action="store_true", help="one seed and short traces; prints, writes nothing")
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument("--fresh", action="store_true", help="compute everything, whatever is kept")
    parser.add_argument("--stale", action="store_true", help="take kept outcomes although the code has changed since")
    options = parser.parse_args(arguments)
    if options.seeds < 1 or options.jobs < 1:
        parser.error("--seeds and --jobs: at least 1")
    wanted = [name.strip() for name in options.only.split(",") if name.strip()]
    try:
        chosen = [by_id(name) for name in wanted] if wanted else list(EXPERIMENTS)
    except KeyError as error:
        parser.error(f"--only: {error.args[0]}")
    found = list(missing(chosen, options.seeds, options.quick, fresh=options.fresh, stale=options.stale))
    jobs = longest_first(found, options.seeds)
    failed = compute(jobs, options.jobs) if jobs else {}
    rows = [(e, judged(e, options.seeds, options.quick, stale=options.stale)) for e in EXPERIMENTS]
    print(show([row for row in rows if row[0] in chosen]))
    for job, problem in failed.items():
        print(f"FAILED {job.experiment_id} {job.case}, seed {job.seed}: {problem}", file=sys.stderr)
    if not options.quick:
        for path in write(rows, tuple(older(rows, options.seeds))):
            print(f"wrote {path.relative_to(cache.ROOT)}")
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
