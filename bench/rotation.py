"""More models than fit, exchanged in turn: `python -m bench.rotation [ENGINE] [--models 4] [--fit 2] [--cycles 200]`.

Each cycle one engine that is awake goes to sleep, the one that has slept longest wakes, and answers. Prints the
seconds of an exchange (sleep of one, wake of the other, its first token) beside those of a start to the first token in
the same run, what a sleeper still holds and gives back, and how far both have moved between the first and the last
quarter of the cycles. Greedy answers are compared with those before the first sleep; one that differs ends the run. All
models have the same weights, in one file that is in the page cache; with `--shared` they read them there
(Model.weights_shared).
"""

import argparse
import asyncio
import statistics
import tempfile
import time
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from bench.swap import NUM_TOKENS, first_token, private_mib
from glowplug.engines.port import Ability, EngineHandle, Sleeper
from tests.contract.engine_rig import EngineCase

MOST_EXCHANGE_S, MOST_OF_A_START, MOST_DRIFT_MIB = 0.7, 1 / 3, 8.0
SHORT_TOKENS, WHOLE_EVERY = 4, 4  # every fourth answer is asked for in full, the others in part


@dataclass
class Seen:
    """Seconds by what took them; MiB that each engine held asleep and gave back, by cycle; loads of the machine."""

    seconds: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    held_mib: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    freed_mib: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    loads: list[float] = field(default_factory=list)
    num_compared: int = 0


def drift(values: Sequence[float]) -> float:
    """How far the median of the last quarter lies from that of the first. The very first value is left out: what an
    engine has after its start is not what it has after a wake."""
    after = values[1:]
    quarter = max(1, len(after) // 4)
    return statistics.median(after[-quarter:]) - statistics.median(after[:quarter]) if after else 0.0


class Rotation:
    """Engines of one kind, at most `fit` of them awake."""

    def __init__(self, case: EngineCase, sleeper: Sleeper, fit: int, shared: bool) -> None:
        self._case, self._sleeper, self._fit, self._shared = case, sleeper, fit, shared
        self._awake: deque[EngineHandle] = deque()
        self._asleep: deque[EngineHandle] = deque()
        self._texts: dict[str, str] = {}
        self.seen = Seen()

    async def add(self) -> None:
        """Start one engine; the one that has been awake longest makes way before."""
        if len(self._awake) == self._fit:
            await self._put_to_sleep()
        began = time.monotonic()
        handle = (await self._case.start(weights_shared=self._shared)).handle
        ready_s = time.monotonic() - began
        first_s, self._texts[handle.instance_id] = await first_token(handle)
        self.seen.seconds["start to the first token"].append(ready_s + first_s)
        self._awake.append(handle)

    async def exchange(self, number: int) -> None:
        """One sleeps, one wakes and answers."""
        slept_s = await self._put_to_sleep()
        handle = self._asleep.popleft()
        began = time.monotonic()
        await self._sleeper.wake(handle)
        woken_s = time.monotonic() - began
        num_tokens = NUM_TOKENS if number % WHOLE_EVERY == 0 else SHORT_TOKENS
        first_s, text = await first_token(handle, num_tokens)
        expected = self._texts[handle.instance_id]
        if not text or (text != expected if num_tokens == NUM_TOKENS else not expected.startswith(text)):
            raise SystemExit(f"in cycle {number} it says {text!r} instead of {expected!r}")
        self._awake.append(handle)
        parts = {"sleep": slept_s, "wake": woken_s, "first token": first_s, "exchange": slept_s + woken_s + first_s}
        for name, seconds in parts.items():
            self.seen.seconds[name].append(seconds)
        self.seen.loads.append(psutil.getloadavg()[0])
        self.seen.num_compared += 1

    async def _put_to_sleep(self) -> float:
        handle = self._awake.popleft()
        before = private_mib(handle)
        began = time.monotonic()
        await self._sleeper.sleep(handle, "swapped_out")
        seconds = time.monotonic() - began
        held = private_mib(handle)
        self.seen.held_mib[handle.instance_id].append(held)
        self.seen.freed_mib[handle.instance_id].append(before - held)
        self._asleep.append(handle)
        return seconds


def report(seen: Seen) -> str:
    """The tables, and what is asked for beside what was found."""
    lines = [f"{'':30} {'median':>8} {'worst':>8} {'runs':>5}"]
    for name, values in seen.seconds.items():
        lines.append(f"{name + ', s':30} {statistics.median(values):8.3f} {max(values):8.3f} {len(values):5}")
    for name, of_each in (("asleep, MiB", seen.held_mib), ("given back, MiB", seen.freed_mib)):
        for number, values in enumerate(of_each.values(), start=1):
            later = values[1:] or values
            lines.append(
                f"{f'model {number} {name}':30} {statistics.median(later):8.1f} {max(later):8.1f} {len(later):5}"
                f"   least {min(later):.1f}, drift {drift(values):+.1f}"
            )
    exchange_s = statistics.median(seen.seconds["exchange"])
    share = exchange_s / statistics.median(seen.seconds["start to the first token"])
    worst = max((abs(drift(values)) for held in (seen.held_mib, seen.freed_mib) for values in held.values()), default=0)
    asked = (
        (f"an exchange takes at most {MOST_EXCHANGE_S} s", f"{exchange_s:.3f} s", exchange_s <= MOST_EXCHANGE_S),
        (f"... at most {MOST_OF_A_START:.2f} of a start", f"{share:.2f}", share <= MOST_OF_A_START),
        (f"memory drifts by at most {MOST_DRIFT_MIB:g} MiB", f"{worst:.1f} MiB", worst <= MOST_DRIFT_MIB),
    )
    lines += [f"{what}: {found}, {'yes' if is_met else 'NO'}" for what, found, is_met in asked]
    lines.append(f"{seen.num_compared} answers, each as before the first sleep")
    loads = seen.loads or [0.0]
    lines.append(f"load average {min(loads):.1f} to {max(loads):.1f}, median {statistics.median(loads):.1f}")
    return "\n".join(lines)


async def main(engine: str, models: int, fit: int, cycles: int, shared: bool) -> None:
    with tempfile.TemporaryDirectory(prefix="gp-bench-") as folder:
        case = EngineCase(engine, Path(folder))
        if reason := case.driver.unavailable():
            raise SystemExit(reason)
        if not isinstance(case.driver, Sleeper) or Ability.SWAP not in case.driver.abilities("host"):
            raise SystemExit(f"{engine} does not sleep on this machine")
        try:
            await case.driver.warm()
            await case.driver.stop((await case.start()).handle, 5.0)  # it pays for bytecode and page cache
            rotation = Rotation(case, case.driver, fit, shared)
            for _ in range(models):
                await rotation.add()
            for number in range(cycles):
                await rotation.exchange(number)
        finally:
            await case.close()
    emulated = " (EMULATED)" if case.driver.capabilities.emulated else ""
    how = ", weights shared" if shared else ""
    print(f"{engine}{emulated}{how}: {models} models of which {fit} fit, {cycles} exchanges")
    print(report(rotation.seen))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine", nargs="?", default="llamacpp")
    parser.add_argument("--models", type=int, default=4)
    parser.add_argument("--fit", type=int, default=2)
    parser.add_argument("--cycles", type=int, default=200)
    parser.add_argument("--shared", action="store_true")
    given = parser.parse_args()
    if not 1 <= given.fit < given.models or given.cycles < 1:
        parser.error("--fit is at least 1 and below --models, --cycles at least 1")
    asyncio.run(main(**vars(given)))
