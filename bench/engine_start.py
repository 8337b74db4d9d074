"""From launch to the first token, and what an engine then gives and takes: `python -m bench.engine_start [ENGINE] [N]`.

The weights are in host memory already (page cache), as the prefetcher leaves them, and are given at once. The first
start is thrown away: it pays for bytecode and page cache. Figures of the emulated engine are modelled, except its own
process start and memory.
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

from tests.contract.engine_rig import EngineCase

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
    memory = psutil.Process(report.handle.pid).memory_full_info()
    await case.driver.stop(report.handle, grace_s=5.0)
    return {
        **{f"{phase.name.value} s": phase.actual_s for phase in report.phases},
        "ready s": ready - began,
        "first token s": first - began,
        "tokens/s": rate,
        "private MB": memory.uss / 1e6,
    }


async def main(engine: str, num_starts: int) -> None:
    with tempfile.TemporaryDirectory(prefix="gp-bench-") as folder:
        case = EngineCase(engine, Path(folder))
        if reason := case.driver.unavailable():
            raise SystemExit(reason)
        await one_start(case)
        starts = [await one_start(case) for _ in range(num_starts)]
        await case.close()
    print(f"{engine}{' (EMULATED)' if case.driver.capabilities.emulated else ''}, {num_starts} starts")
    print(f"{'':14} {'median':>8} {'worst':>8}")
    for name in starts[0]:
        values = [start[name] for start in starts]
        worst = min(values) if name == "tokens/s" else max(values)
        print(f"{name:14} {statistics.median(values):8.3f} {worst:8.3f}")


if __name__ == "__main__":
    asyncio.run(main(*(sys.argv[1:2] or ["llamacpp"]), int((sys.argv[2:] or ["5"])[0])))
