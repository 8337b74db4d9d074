"""What gate.sh asks: `gate_ask.py rest|again|hopeless|stacks|sweep|touched|verdict ...`. Standard library only."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

OUT = Path(os.environ.get("GATE_OUT", "build/gate"))
TOLD = 3000  # characters of a failure


class Run:
    """What one file of results says."""

    def __init__(self, path):
        self.outcomes, self.texts, self.began = {}, {}, {}
        self.skipped = set()
        self.collected, self.hard, self.exit = {}, [], None
        for line in path.read_text().splitlines() if path.exists() else ():
            row = json.loads(line)
            if "collected" in row:
                self.collected |= dict.fromkeys(row["collected"])
            elif "hard" in row:
                self.hard.append(f"{row['hard']} cannot be collected: {row['text']}")
            elif "exit" in row:
                self.exit = row["exit"]
            elif "began" in row:
                self.began[row["began"]] = row["at"]
            else:
                self._take(row["test"], row["when"], row["outcome"], row["text"])

    def _take(self, test, when, outcome, text):
        if when == "???":
            text += _ended(test)
        if when in ("teardown", "???"):  # ???: its worker died
            self.began.pop(test, None)
        if outcome == "skipped":
            self.skipped.add(test)
        if outcome == "failed":
            self.outcomes[test] = outcome
            self.texts.setdefault(test, f"[{when}] {text}")
        elif when == "call" or outcome == "skipped":
            self.outcomes.setdefault(test, outcome)

    @property
    def failed(self):
        return [test for test, outcome in self.outcomes.items() if outcome == "failed"]

    def is_proved(self, test):
        """Hypothesis has found an example and seen it fail twice; alone it would draw others, which proves nothing."""
        text = self.texts.get(test, "")
        return bool(re.search(r"Falsifying example: |Failing test case: ", text)) and "Flaky" not in text

    @property
    def missing(self):
        """Collected, and no word of them since."""
        return [test for test in self.collected if test not in self.outcomes]


def rest(results, status):
    """Names what was collected and has no outcome, since a worker died. 1: no run that could be gone on with."""
    run = Run(Path(results))
    if run.hard or status not in ("0", "1", "2") or not run.outcomes:
        for test, at in run.began.items():
            print(f"gate: had run for {time.time() - at:.0f} s: {test}", file=sys.stderr)
        return 1
    print("".join(f"{test}\n" for test in run.missing), end="")
    return 0


def again(results):
    """Names what failed and may have failed by chance."""
    run = Run(Path(results))
    print("".join(f"{test}\n" for test in run.failed if not run.is_proved(test)), end="")
    return 0


def hopeless(results, test, status):
    """0: no further try, since it has passed, or hangs alone, too."""
    return int(Run(Path(results)).outcomes.get(test, "passed") != "passed" and status in ("0", "1"))


def _ended(test):
    """The stacks of the process that was ended in this test."""
    for path in (OUT / "stacks").iterdir():
        _, at, after = path.read_text(errors="replace").rpartition(f"\n{test}\n")
        if at and "Timeout (" in after:
            return f"\nended after its time limit, in:\n{after[:TOLD]}"
    return ""


def stacks(mark):
    """Tells the stacks of every pytest that carries the mark."""
    files = [path for path in sorted((OUT / "stacks").iterdir()) if int(path.name) in _ours(mark)]
    for path in files:
        os.kill(int(path.name), signal.SIGUSR1)
    time.sleep(2)
    for path in files:
        print(f"--- stacks of {path.name}, the last name is its test\n{path.read_text(errors='replace')[-6000:]}")
    for pid in sorted(_ours(mark)):
        print(
            f"--- {pid}:", Path(f"/proc/{pid}/cmdline").read_bytes()[:200].replace(b"\0", b" ").decode(errors="replace")
        )
    return 0


def sweep(mark):
    """Ends every process that carries the mark."""
    for number, within_s in ((signal.SIGTERM, 10.0), (signal.SIGKILL, 10.0)):
        until = time.monotonic() + within_s
        for pid in _ours(mark):
            _signal(pid, number)
        while _ours(mark) and time.monotonic() < until:
            time.sleep(0.2)
    return 0


def _signal(pid, number):
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return


def _ours(mark):
    """Living processes with the mark in their environment."""
    found, wanted = set(), f"GATE_MARK={mark}".encode()  # a prefix: all of a gate, or one part
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if any(one.startswith(wanted) for one in (path / "environ").read_bytes().split(b"\0")):
                state = (path / "stat").read_text().rpartition(")")[2].split()[0]
                found |= {int(path.name)} if state != "Z" else set()
        except OSError:  # it has ended meanwhile, or is not ours
            continue
    return found - {os.getpid()}


def touched(base):
    """Test files that changed since `base`, or name a module that did."""
    diff = subprocess.run(["git", "diff", "--name-only", base], capture_output=True, text=True, timeout=60, check=False)
    changed = set(diff.stdout.split())
    names = [
        name.removeprefix("libs/").removesuffix(".py").replace("/", ".") for name in changed if name.endswith(".py")
    ]
    wanted = re.compile("|".join(rf"\b{re.escape(name)}\b" for name in names) or r"(?!)")
    for path in sorted(Path("tests").rglob("test_*.py")):
        if path.as_posix() in changed or wanted.search(path.read_text(encoding="utf-8")):
            print(path.as_posix())
    return 0


def verdict(began, most_unsteady):
    """Tells all that was not plainly good, writes unsteady.jsonl, and closes as pytest does. 0: it may land."""
    counts, unsteady, failed = {}, [], []
    faults = (OUT / "faults").read_text().splitlines() if (OUT / "faults").exists() else []
    for path in sorted(OUT.glob("lane-*.jsonl")):
        lane, run = path.stem.removeprefix("lane-"), Run(path)
        tries = [Run(OUT / f"again-{number}-{lane}.jsonl") for number in (1, 2)]
        for outcome in run.outcomes.values():
            counts[outcome] = counts.get(outcome, 0) + 1
        faults += run.hard
        if run.missing:
            faults.append(f"{lane}: {len(run.missing)} tests have no outcome")
            print("".join(f"NO OUTCOME {test}\n" for test in run.missing), end="")
        for test in run.failed:
            later = [one.outcomes.get(test, "ended" if test in one.began else "-") for one in tries]
            later = ["not run, an example fails"] if run.is_proved(test) else later
            row = {"test": test, "lane": lane, "first": run.texts[test], "again": later}
            row["texts"] = [one.texts.get(test, "") for one in tries]
            good = {"passed", "skipped"} if test in run.skipped else {"passed"}  # skipped: its fixtures failed to end
            (unsteady if good & set(later) else failed).append(row)
    told = "".join(json.dumps(row) + "\n" for row in unsteady)
    (OUT / "unsteady.jsonl").write_text(told)
    with (OUT.parent / "unsteady.jsonl").open("a") as history:  # of every run here, for `make steady`
        history.write(told)
    for title, rows in (("UNSTEADY", unsteady), ("FAILED", failed)):
        for row in rows:
            print(f"\n____ {title}, again: {', '.join(row['again'])}: {row['test']}\n{row['first']}")
    if len(unsteady) > int(most_unsteady):
        faults.append(f"{len(unsteady)} tests are unsteady, {most_unsteady} may be")
    print("=" * 30 + " gate")
    for title, names in (("UNSTEADY", unsteady), ("FAILED", failed)):
        print("".join(f"{title} {row['test']}\n" for row in names), end="")
    print("".join(f"ERROR {what}\n" for what in faults), end="")
    counts |= {"failed": len(failed), "passed": counts.get("passed", 0) + len(unsteady), "error": len(faults)}
    counts["rerun"] = sum(row["again"][0] in ("passed", "failed", "skipped", "ended") for row in (*unsteady, *failed))
    order = ("failed", "passed", "skipped", "xfailed", "error", "rerun")
    took_s = int(time.time() - float(began))
    clock = f"{took_s // 3600}:{took_s // 60 % 60:02}:{took_s % 60:02}"
    print(f"{', '.join(f'{counts[name]} {name}' for name in order if counts.get(name))} in {took_s}.00s ({clock})")
    return int(bool(failed or faults or not counts["passed"]))


if __name__ == "__main__":
    sys.exit(globals()[sys.argv[1]](*sys.argv[2:]))
