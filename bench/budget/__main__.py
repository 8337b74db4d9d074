"""Count the cost of a warm request, a chunk, a placement, an event and a simulated request.

    python -m bench.budget [--only NAME] [--write] [--json FILE]

Prints calls of Python functions and bytes allocated at once, which are the same on every machine, beside the budget
(budget.json). `--write` makes these counts the budget; a change that is worth its price does so in its own commit, and
says why. tests/house/test_budget.py refuses a count more than 5 % over budget.
"""

import argparse
import json
import subprocess
from pathlib import Path

from bench.budget import budget
from bench.budget.cases import CASES


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=CASES, action="append")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--json", type=Path, help="write the counts here, as data")
    args = parser.parse_args()
    counts = {name: count() for name, count in CASES.items() if not args.only or name in args.only}
    known = budget.read() if budget.FILE.exists() else {}
    for name, found in counts.items():
        before = known.get(name)
        beside = f"; budget {before.num_calls} and {before.num_bytes}" if before else ""
        print(f"{name}: {found.num_calls} calls, {found.num_bytes} bytes{beside}")
        if before and (excess := before.excess(found)):
            print(f"  over: {excess}")
    if args.json:
        data = {name: {"num_calls": one.num_calls, "num_bytes": one.num_bytes} for name, one in counts.items()}
        args.json.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    if args.write:
        head = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True)
        budget.write(counts, head.stdout.strip())


if __name__ == "__main__":
    main()
