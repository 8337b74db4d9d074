"""An hour of mixed load on real engines: nothing that a fleet keeps grows with time.

Eight llama.cpp models where three fit, so that they swap all the time. Samples memory, files and threads of each
process, logs, store and bus, and compares the median of the last third with that of the second. SOAK_S=300 makes it
shorter.
"""

import asyncio
import json
import os
import random
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Final

import httpx
import psutil
import pytest

from bench.measured.fleet import write_weights
from tests.fleet_runner import Fleet

SOAK_S: Final = float(os.environ.get("SOAK_S", "3600"))
pytestmark = [pytest.mark.fleet, pytest.mark.llamacpp, pytest.mark.long, pytest.mark.timeout(SOAK_S + 600)]
NUM_MODELS, NUM_CLIENTS, SAMPLES = 8, 6, 60
MODEL: Final = """
name: m{number}
engine: llamacpp
weights: {{uri: "file://{path}", sha256: {sha256}}}
kv_bytes: 140MiB
context_tokens: 2048
max_concurrency: 4
keep_alive_s: 10s
"""
MIB: Final = 1 << 20
SLACK: Final = {
    "rss": 24 * MIB,
    "files": 24,
    "threads": 6,
    "rows": 40,
    "bus bytes": 24 * MIB,
    "log bytes a second": 400,
}


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    root = tmp_path_factory.mktemp("soak")
    models = {}
    for number in range(NUM_MODELS):
        path = root / f"m{number}.gguf"
        models[f"m{number}"] = MODEL.format(number=number, path=path, sha256=write_weights(path, number))
    env = {"GLOWPLUG_GPU_BUDGETS": "350MiB", "GLOWPLUG_HOST_CACHE_BYTES": str(500 * MIB)}
    with Fleet.start(root, models, engine="llamacpp", nodes=3, **env) as made:
        yield made


@dataclass
class Watch:
    fleet: Fleet
    seen: defaultdict[tuple[str, str], list[float]] = field(default_factory=lambda: defaultdict(list))
    _logs: tuple[float, int] = (0.0, 0)

    def sample(self) -> None:
        for row in self.fleet.document["processes"]:
            try:
                process = psutil.Process(row["pid"])
                with process.oneshot():
                    self.seen["rss", row["name"]].append(process.memory_info().rss)
                    self.seen["files", row["name"]].append(process.num_fds())
                    self.seen["threads", row["name"]].append(process.num_threads())
            except psutil.NoSuchProcess:
                raise AssertionError(f"{row['name']} has ended: {self.fleet.logs(row['name'])}") from None
        self.seen["rows", "store"].append(self._num_rows())
        self.seen["bus bytes", "streams"].append(self._bus_bytes())
        now, size = time.monotonic(), sum(path.stat().st_size for path in self._log_files())
        before, size_before = self._logs
        if before:
            self.seen["log bytes a second", "all"].append(max(0, size - size_before) / (now - before))
        self._logs = now, size

    def _log_files(self) -> list[Path]:
        return [path for path in (self.fleet.state_dir / "logs").rglob("*") if path.is_file()]

    def _num_rows(self) -> int:
        rows = [self.fleet.url("placer") + f"/v1/{table}" for table in ("nodes", "instances", "decisions")]
        return sum(len(httpx.get(url, headers=self.fleet.admin, timeout=30).json()["data"]) for url in rows)

    def _bus_bytes(self) -> int:
        (ports,) = (self.fleet.state_dir / "nats").glob("nats-server_*.ports")
        monitor = json.loads(ports.read_text())["monitoring"][0]
        return int(httpx.get(f"{monitor}/jsz", timeout=30).json()["bytes"])

    def grown(self) -> list[str]:
        found = []
        for (kind, name), values in self.seen.items():
            third = len(values) // 3
            before, after = median(values[third : 2 * third]), median(values[2 * third :])
            if after > 1.25 * before + SLACK[kind]:
                found.append(f"{kind} of {name}: {before:.0f}, then {after:.0f}")
        return found


async def one(http: httpx.AsyncClient, chance: random.Random) -> str:
    kind = chance.choices(["stream", "whole", "leave", "long", "wrong"], [5, 3, 2, 1, 1])[0]
    words = chance.randrange(200, 400) if kind == "long" else chance.randrange(4, 20)
    body = {
        "model": f"m{min(int(chance.paretovariate(0.9)) - 1, NUM_MODELS - 1)}",
        "messages": [{"role": "user", "content": " ".join(["river"] * words)}],
        "max_tokens": chance.randrange(4, 32),
        "stream": kind in ("stream", "leave"),
    }
    if kind == "wrong":
        body["max_tokens"] = -1
    async with http.stream("POST", "/v1/chat/completions", json=body) as answer:
        num_lines = 0
        async for line in answer.aiter_lines():
            num_lines += bool(line.startswith("data: {"))
            if kind == "leave" and num_lines >= 2:
                return "left"
            if '"error"' in line and kind != "wrong":
                return f"error: {line[:200]}"
    return f"{kind} {answer.status_code}"


async def load(url: str, until: float, ends: Counter[str]) -> None:
    async def client(seed: int) -> None:
        chance = random.Random(seed)
        async with httpx.AsyncClient(base_url=url, timeout=120) as http:
            while time.monotonic() < until:
                ends[await one(http, chance)] += 1
                await asyncio.sleep(chance.expovariate(1.0))

    await asyncio.gather(*(client(seed) for seed in range(NUM_CLIENTS)))


async def watched(watch: Watch, every_s: float) -> None:
    while True:
        await asyncio.to_thread(watch.sample)
        await asyncio.sleep(every_s)


async def soak(fleet: Fleet, watch: Watch) -> Counter[str]:
    ends: Counter[str] = Counter()
    watching = asyncio.create_task(watched(watch, SOAK_S / SAMPLES))
    await load(fleet.url("data"), time.monotonic() + SOAK_S, ends)
    if watching.done():
        watching.result()
    watching.cancel()
    return ends


def test_nothing_grows_with_time_and_every_request_ends_as_it_should(fleet: Fleet) -> None:
    watch = Watch(fleet)
    ends = asyncio.run(soak(fleet, watch))
    print(dict(ends))
    assert set(ends) <= {"stream 200", "whole 200", "left", "long 200", "wrong 400"}, ends
    assert watch.grown() == []
    assert {row["name"]: row["restarts"] for row in fleet.document["processes"] if row["restarts"]} == {}
