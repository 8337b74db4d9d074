"""From launch to the first token, and what an engine then gives and takes: `python -m bench.engine_start [ENGINE] [N]`.

The weights are in host memory already (page cache), as the prefetcher leaves them, and are given at once. The first
start of each kind is thrown away: it pays for bytecode and page cache. llama.cpp's starts from a fresh interpreter and
from a parked process take turns. Figures of the emulated engine are modelled, except its own process start and memory.
"""

import asyncio
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

import httpx
import psutil

from glowplug.engines.hosted import HostedDriver
from glowplug.engines.port import EngineSettings
from glowplug.engines.process import anonymous_bytes
from tests.contract.engine_rig import WAIT_S, EngineCase

NUM_TOKENS = 64


async def first_token_and_rate(url: str) -> tuple[float, float]:
    """(epoch seconds of the first token, tokens per second after it) of one greedy stream."""
    body = {"prompt": "The sea is", "max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True, "stream": True}
    async with (
        httpx.AsyncClient(base_url=url, timeout=120) as client,
        client.stream("POST", "/v1/completions", json=body) as answer,
    ):
        chunks = (line[6:] async for line in answer.aiter_lines() if line.startswith("data: {"))
        moments = [time.time() async for chunk in chunks if json.loads(chunk)["choices"][0]["text"]]
    return moments[0], (len(moments) - 1) / (moments[-1] - moments[0])


async def one_start(case: EngineCase) -> dict[str, float]:
    began = time.time()
    report = await case.start()
    ready = time.time()
    first, rate = await first_token_and_rate(report.handle.url)
    memory, anonymous = psutil.Process(report.handle.pid).memory_full_info(), anonymous_bytes(report.handle.pid)
    await case.driver.stop(report.handle, grace_s=5.0)
    return {
        **{f"{phase.name.value} s": phase.actual_s for phase in report.phases},
        "ready s": ready - began,
        "first token s": first - began,
        "tokens/s": rate,
        "private MB": memory.uss / 1e6,
        "anonymous MB": anonymous / 1e6,
    }


def cases(engine: str, folder: Path) -> dict[str, EngineCase]:
    """By how its engines start: all of them from an interpreter of their own, or also from a parked process."""
    if engine != "llamacpp":
        return {engine: EngineCase(engine, folder)}
    by_name = {"plain": EngineSettings(llamacpp_parked=False), "parked": EngineSettings()}
    return {name: EngineCase(engine, folder, settings) for name, settings in by_name.items()}


async def main(engine: str, num_starts: int) -> None:
    with tempfile.TemporaryDirectory(prefix="gp-bench-") as folder:
        by_name = cases(engine, Path(folder))
        starts: dict[str, list[dict[str, float]]] = {name: [] for name in by_name}
        for case in by_name.values():
            if reason := case.driver.unavailable():
                raise SystemExit(reason)
            if isinstance(case.driver, HostedDriver) and case.driver.is_parked:
                case.driver.zygote.until_parked(WAIT_S)
            await one_start(case)
        for _ in range(num_starts):
            for name, case in by_name.items():
                starts[name].append(await one_start(case))
        for case in by_name.values():
            await case.close()
    mark = " (EMULATED)" if next(iter(by_name.values())).driver.capabilities.emulated else ""
    print(f"{engine}{mark}, {num_starts} starts of each, load {psutil.getloadavg()[0]:.1f}")
    print(f"{'':14}" + "".join(f" {name:>17}" for name in starts))
    print(f"{'':14}" + f" {'median':>8} {'worst':>8}" * len(starts))
    for name in next(iter(starts.values()))[0]:
        print(f"{name:14}" + "".join(shown([start[name] for start in of_kind], name) for of_kind in starts.values()))


def shown(values: list[float], name: str) -> str:
    """Their median and the worst of them."""
    worst = min(values) if name == "tokens/s" else max(values)
    return f" {statistics.median(values):8.3f} {worst:8.3f}"


if __name__ == "__main__":
    asyncio.run(main(*(sys.argv[1:2] or ["llamacpp"]), int((sys.argv[2:] or ["5"])[0])))
