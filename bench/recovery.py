"""Kill -9 each process of the local fleet: seconds until the fleet is whole again, and the ends of its streams.

    python -m bench.recovery [--only NAME ...] [--json FILE]

Starts a fleet of its own (emulated engine, two nodes), keeps streams running against a warm model, and kills one
process after the other. The fleet is whole when the process is back under a new pid and every process reports that it
is ready. The processes are real; the tokens are emulated.
"""

import argparse
import asyncio
import os
import signal
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from bench.measured.data import data_option, markdown, markdown_row, write_data
from tests.chaos.test_kill_services import Ledger, under_load
from tests.fleet_runner import EMULATED, Fleet
from tests.waiting import wait_until

VICTIMS = (
    "predictor-1", "placer-1", "autoscaler-1", "console-1", "prefetcher-1", "agent-1", "router-1", "nats", "valkey",
)  # fmt: skip
ENDS = ("done", "connection lost", "error event", "truncated")


def kill_and_time(fleet: Fleet, name: str) -> float:
    """Kill a process. Returns the seconds from the kill until the fleet is whole."""
    pid = int(fleet.process(name)["pid"])
    began = time.monotonic()
    os.kill(pid, signal.SIGKILL)

    def whole() -> bool:
        row = fleet.process(name)
        return row["pid"] not in (pid, None, 0) and row["state"] == "ready" and fleet.ready()

    wait_until(f"{name} is back", whole, 60.0, 0.05)
    return time.monotonic() - began


def one(fleet: Fleet, name: str) -> tuple[float, Ledger]:
    took: list[float] = []
    ledger = asyncio.run(
        under_load(fleet.url("data"), ["warm"], 8.0, 10, lambda: took.append(kill_and_time(fleet, name)))
    )
    return took[0], ledger


def as_data(seen: Mapping[str, tuple[float, Ledger]]) -> dict[str, object]:
    """The data by killed process: seconds until the fleet was whole again, and the ends of the clients' streams."""
    return {
        "killed": {
            name: {"whole_again_s": seconds, "ends": dict(ledger.ends)} for name, (seconds, ledger) in seen.items()
        }
    }


def main() -> None:
    """Kill the processes in turn, print the table, and write the data to `--json`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=VICTIMS, default=VICTIMS, metavar="NAME", help="kill these alone")
    data_option(parser)
    args = parser.parse_args()
    seen: dict[str, tuple[float, Ledger]] = {}
    with tempfile.TemporaryDirectory(prefix="glowplug-recovery-") as folder:
        models = {"warm": EMULATED.format(name="warm", keep_alive_s=-1)}
        with Fleet.start(Path(folder), models) as fleet:
            fleet.chat("warm")
            print(f"cores {os.cpu_count()}, load {os.getloadavg()[0]:.1f}; 10 streams a second, emulated engine\n")
            print(markdown(("killed", "whole again, s", "streams", *ENDS)))
            for name in args.only:
                seconds, ledger = seen[name] = one(fleet, name)
                ends = ledger.ends
                print(
                    markdown_row(name, f"{seconds:.1f}", sum(ends.values()), *(ends[how] for how in ENDS)), flush=True
                )
    write_data(args.json, as_data(seen))


if __name__ == "__main__":
    main()
