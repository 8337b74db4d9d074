"""kill -9 of each process of the local fleet: seconds until the fleet is whole again, and what its clients saw.

`python -m bench.recovery` starts a fleet of its own (emulated engine, two nodes), keeps streams running against a warm
model, and kills one process after the other. "Whole" is: the process is back under a new pid and every process is
ready by its own word. The processes are real; the tokens are emulated.
"""

import asyncio
import os
import signal
import tempfile
import time
from pathlib import Path

from tests.chaos.test_kill_services import Ledger, under_load
from tests.fleet_runner import EMULATED, Fleet
from tests.waiting import wait_until

VICTIMS = (
    "predictor-1", "placer-1", "autoscaler-1", "console-1", "prefetcher-1", "agent-1", "router-1", "nats", "valkey",
)  # fmt: skip


def kill_and_time(fleet: Fleet, name: str) -> float:
    """Seconds from the kill until the fleet is whole."""
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


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="glowplug-recovery-") as folder:
        models = {"warm": EMULATED.format(name="warm", keep_alive_s=-1)}
        with Fleet.start(Path(folder), models) as fleet:
            fleet.chat("warm")
            print(f"cores {os.cpu_count()}, load {os.getloadavg()[0]:.1f}; 10 streams a second, emulated engine\n")
            print("| killed | whole again, s | streams | done | connection lost | error event | truncated |")
            print("|---|---|---|---|---|---|---|")
            for name in VICTIMS:
                seconds, ledger = one(fleet, name)
                ends = ledger.ends
                counts = " | ".join(str(ends[how]) for how in ("done", "connection lost", "error event", "truncated"))
                print(f"| {name} | {seconds:.1f} | {sum(ends.values())} | {counts} |", flush=True)


if __name__ == "__main__":
    main()
