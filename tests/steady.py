"""Are the tests steady? `make steady` runs each name of tests/steady.txt, and whatever the gate called unsteady here,
twenty times, three names at a time, so that each has the others beside it; then each lane three times beside two busy
processes. It takes hours: results are kept in build/steady, so that an interrupted run goes on. Prints a table; exits 1
if a test failed or a lane was unsteady."""

import argparse
import json
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
LIST = ROOT / "tests/steady.txt"
SEEN = ROOT / "build/unsteady.jsonl"  # from .ci/gate_ask.py, for every run here
KEPT = ROOT / "build/steady"
LANES = ("fast", "system")
MOST_UNSTEADY = 1  # per run of a lane
BOUND_S = 3600.0  # per run of a name
TOLD_LINES = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """One run of a name or, if "", of a lane. `unsteady`: tests that passed only when repeated."""

    commit: str
    lane: str
    name: str
    passed: bool
    seconds: float
    unsteady: list[str]
    told: str = ""


def names() -> list[tuple[str, str]]:
    lines = [line.split(maxsplit=1) for line in LIST.read_text().splitlines() if line and not line.startswith("#")]
    seen = [json.loads(line) for line in SEEN.read_text().splitlines()] if SEEN.exists() else []
    found = [(lane, name.strip()) for lane, name in lines]
    return list(dict.fromkeys([*found, *((row["lane"], row["test"].partition("::")[0]) for row in seen)]))


def kept(commit: str) -> list[Ran]:
    path = KEPT / f"{commit}.jsonl"
    return [Ran(**json.loads(line)) for line in path.read_text().splitlines()] if path.exists() else []


def keep(ran: Ran) -> None:
    KEPT.mkdir(parents=True, exist_ok=True)
    with (KEPT / f"{ran.commit}.jsonl").open("a") as file:
        file.write(json.dumps(asdict(ran)) + "\n")


def run(commit: str, lane: str, name: str) -> Ran:
    alone = [sys.executable, "-m", "pytest", "-qq", "-n0", "--lane", lane, name]
    began = time.monotonic()
    try:
        done = subprocess.run(
            alone if name else ["sh", ".ci/gate.sh", lane],
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=BOUND_S if name else None,  # the gate has its own bound
            check=False,
        )
        code, said = done.returncode, done.stdout
    except subprocess.TimeoutExpired:
        code, said = 124, f"ended after {BOUND_S:g} s"
    unsteady = [line.split()[1] for line in said.splitlines() if not name and line.startswith("UNSTEADY ")]
    passed = code == 0 and len(unsteady) <= MOST_UNSTEADY
    told = "" if code == 0 else " / ".join(said.strip().splitlines()[-TOLD_LINES:])
    if name and code == 5:
        told = "no test ran"
    return Ran(
        commit=commit,
        lane=lane,
        name=name,
        passed=passed,
        seconds=round(time.monotonic() - began, 1),
        unsteady=unsteady,
        told=told,
    )


def table(runs: Iterable[Ran]) -> str:
    by_name: dict[tuple[str, str], list[Ran]] = {}
    for ran in runs:
        by_name.setdefault((ran.lane, ran.name), []).append(ran)
    lines = ["| tests | runs | failed | seconds, longest | unsteady, first failure |", "|---|---|---|---|---|"]
    for (lane, name), group in by_name.items():
        failed = [ran for ran in group if not ran.passed]
        told = ", ".join(sorted({one for ran in group for one in ran.unsteady})) or (failed[0].told if failed else "")
        longest = max(ran.seconds for ran in group)
        lines.append(f"| {name or f'the {lane} lane'} | {len(group)} | {len(failed)} | {longest:.0f} | {told} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=20, help="runs of each name")
    parser.add_argument("--lanes", type=int, default=3, help="runs of each lane")
    parser.add_argument("--beside", type=int, default=3, help="names that run at a time")
    parser.add_argument("--busy", type=int, default=2, help="processes that keep a core busy beside a lane")
    parser.add_argument("--only", default="", help="names that contain this")
    args = parser.parse_args()
    asked = ["git", "rev-parse", "--short=12", "HEAD"]
    commit = subprocess.run(asked, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
    had = Counter((ran.lane, ran.name) for ran in kept(commit))
    is_ended = threading.Event()  # by Ctrl-C, which ends the tests, too: that is no failure
    signal.signal(signal.SIGINT, lambda *_: is_ended.set())

    def again(times: int, lane: str, name: str) -> None:
        for _ in range(times - had[lane, name]):
            ran = None if is_ended.is_set() else run(commit, lane, name)
            if ran is None or is_ended.is_set():
                return
            keep(ran)
            print(f"{'passed' if ran.passed else 'FAILED'} {ran.seconds:6.1f} s  {name or lane}", flush=True)

    with ThreadPoolExecutor(args.beside) as pool:  # never one name twice at a time
        list(pool.map(lambda one: again(args.times, *one), [one for one in names() if args.only in one[1]]))
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(0 if args.only else args.busy)]
    try:
        for lane in () if args.only else LANES:
            again(args.lanes, lane, "")
    finally:
        for process in busy:
            process.kill()
    print(table(kept(commit)))
    return 130 if is_ended.is_set() else int(any(not ran.passed for ran in kept(commit)))


if __name__ == "__main__":
    sys.exit(main())
