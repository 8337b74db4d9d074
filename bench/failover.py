"""Failover of placer, autoscaler and predictor: seconds until the standby leads, and what a cold request sent at that
moment waits.

`python -m bench.failover [LEASE_S ...]` starts NATS, Valkey and a fleet with two processes of each deciding service
(emulated engine, one node), for each lease in turn. Harm: kill -9; SIGSTOP (the process lives, and is let go later);
SIGTERM (a rolling update). The bound is the lease and one look at the store; a lease is renewed three times in its
time, so a leader that dies has between two thirds and all of it left. The processes are real; tokens are emulated.
"""

import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.ha_fleet import HaFleet, Process, emulated
from tests.servers import Infra, NatsProcess, ValkeyProcess
from tests.waiting import wait_until

ROUNDS = 5
HARMS: dict[str, Callable[[Process], None]] = {
    "kill -9": lambda process: process.kill(),
    "SIGSTOP": lambda process: process.signal(signal.SIGSTOP),
    "SIGTERM": lambda process: process.signal(signal.SIGTERM),
}


def mend(fleet: HaFleet, victim: Process) -> None:
    """The victim is a standby again, started anew if it has ended."""
    if victim.process is not None:
        victim.signal(signal.SIGCONT)

    def stands_by() -> bool:
        if victim.process is None or victim.process.poll() is not None:
            victim.start()
        return victim.health().get("role") == "standby"

    wait_until(f"{victim.name} stands by", stands_by, 60)


def one(fleet: HaFleet, service: str, harm: Callable[[Process], None]) -> tuple[float, float]:
    """Seconds to the next leader, seconds a cold request waited that was sent right after the harm."""
    victim, _ = fleet.roles(service)
    wait_until("the model is cold", lambda: not fleet.instances("cold"), 30)
    answered: list[float] = []
    with ThreadPoolExecutor(1) as pool:

        def harm_and_ask(leader: Process) -> None:
            harm(leader)
            pool.submit(ask)

        def ask() -> None:
            began = time.monotonic()
            assert fleet.chat("cold").status_code == 200
            answered.append(time.monotonic() - began)

        took = fleet.failover_s(service, harm_and_ask, 60)
    mend(fleet, victim)
    return took, answered[0]


def measure(lease_s: float) -> None:
    with tempfile.TemporaryDirectory(prefix="glowplug-failover-", ignore_cleanup_errors=True) as folder:
        root = Path(folder)
        infra = Infra(NatsProcess(root / "nats").start(), ValkeyProcess(root / "valkey").start())
        fleet = HaFleet(root / "fleet", infra, lease_s=lease_s, models={"cold": emulated("cold", 0.5)})
        try:
            fleet.start()
            fleet.chat("cold")
            for service in ("placer", "autoscaler", "predictor"):
                for name, harm in HARMS.items():
                    rounds = [one(fleet, service, harm) for _ in range(ROUNDS)]
                    took, waited = [r[0] for r in rounds], [r[1] for r in rounds]
                    print(
                        f"| {lease_s:g} | {service} | {name} | {statistics.median(took):.2f} | {max(took):.2f} "
                        f"| {statistics.median(waited):.2f} | {max(waited):.2f} |",
                        flush=True,
                    )
        finally:
            fleet.stop()
            infra.nats.kill()
            infra.valkey.kill()


def main() -> None:
    leases = [float(word) for word in sys.argv[1:]] or [2.0, 5.0]
    print(f"cores {os.cpu_count()}, load {os.getloadavg()[0]:.1f}, {ROUNDS} rounds each, emulated engine\n")
    print("| lease, s | leader of | harm | next leads, s: median | max | cold request, s: median | max |")
    print("|---|---|---|---|---|---|---|")
    for lease_s in leases:
        measure(lease_s)


if __name__ == "__main__":
    main()
