"""A million random operations on the memory of a host GPU, held against a model; owner, engines and agent are killed.

    python -m bench.memory [--operations 1000000] [--requests 20000] [--seed 1]

The first part is one process (tests/memory_model.py): ledger, pool and slots. The second is an owner with its clients
(tests/memory_processes.py). It ends with an error at the first thing that differs, and its seed is the report.
"""

import argparse
import random
import time

import psutil

from tests.memory_model import MemoryModel
from tests.memory_processes import run


def main() -> int:
    """Print how many of each were done, and the seconds."""
    parser = argparse.ArgumentParser(description="random operations on the memory of a host GPU")
    parser.add_argument("--operations", type=int, default=1_000_000)
    parser.add_argument("--requests", type=int, default=20_000, help="to an owner's processes, kills among them")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    print(f"host memory, not a GPU; seed {args.seed}, load {psutil.getloadavg()[0]:.1f}")
    model, chance, began = MemoryModel(), random.Random(args.seed), time.monotonic()
    for _ in range(args.operations):
        model.step(chance)
    model.close()
    _show(f"{args.operations} operations in one process", time.monotonic() - began, dict(model.done))
    began = time.monotonic()
    done = run(args.seed, args.requests)
    _show(f"{args.requests} requests among processes", time.monotonic() - began, done)
    return 0


def _show(what: str, seconds: float, done: dict[str, int]) -> None:
    print(f"{what}: as the model, {seconds:.1f} s")
    for name, number in sorted(done.items()):
        print(f"    {name:24} {number:10,}")


if __name__ == "__main__":
    raise SystemExit(main())
