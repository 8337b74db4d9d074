"""Measure a model's rungs on this machine: seconds to the first token, and private memory.

    python -m bench.swap [ENGINE] [--cycles N] [--json FILE]

The rungs are a fresh start, a prewarmed replica and a sleeping engine. Also measures the exchange of two models: sleep
A, wake B, first token of B. A greedy answer that differs from the one before the first sleep ends the run. The weights
are in host memory already (page cache), as the prefetcher leaves them. Figures of the emulated engine are modelled.
"""

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from collections import defaultdict
from pathlib import Path

import httpx
import psutil

from bench.measured.data import data_option, write_data
from glowplug.engines.port import Ability, EngineHandle, Sleeper
from glowplug.engines.process import anonymous_bytes
from tests.contract.engine_rig import EngineCase

PROMPT, NUM_TOKENS = "Once upon a time there was a small", 24
MIB = 1 << 20
RUNGS = {"prewarmed": Ability.PREWARM, "swapped_out": Ability.SWAP}

Figures = dict[str, list[float]]
"""By name, whose end is the unit: `_s` seconds, `_mib` MiB of private memory."""


async def first_token(handle: EngineHandle) -> tuple[float, str]:
    """(seconds to the first token, whole text) of one greedy stream."""
    body = {"model": "Contract/Tiny", "prompt": PROMPT, "max_tokens": NUM_TOKENS, "temperature": 0, "stream": True}
    began, first_s, texts = time.monotonic(), 0.0, list[str]()
    async with (
        httpx.AsyncClient(base_url=handle.url, timeout=120) as client,
        client.stream("POST", "/v1/completions", json=body) as answer,
    ):
        async for line in answer.aiter_lines():
            if line.startswith("data: {") and (choices := json.loads(line[6:])["choices"]):
                first_s = first_s or time.monotonic() - began
                texts.append(choices[0]["text"])
    return first_s, "".join(texts)


def private_mib(handle: EngineHandle) -> float:
    """MiB of anonymous memory of the process and its children; pages shared by forks count in parts."""
    leader = psutil.Process(handle.pid)
    of_each = (anonymous_bytes(process.pid) for process in (leader, *leader.children(recursive=True)))
    return sum(of_each) / MIB


async def cold(case: EngineCase, figures: Figures) -> EngineHandle:
    """Start one engine, which stays, and add its times to `figures`."""
    began = time.monotonic()
    handle = (await case.start()).handle
    ready = time.monotonic()
    first, _ = await first_token(handle)
    start = "parked_start" if handle.data.get("parked") else "start"
    figures[f"{start}_to_ready_s"].append(ready - began)
    figures[f"{start}_to_first_token_s"].append(ready - began + first)
    return handle


async def cycle(sleeper: Sleeper, handle: EngineHandle, becomes: str, text: str, figures: Figures) -> None:
    """Let an engine sleep and wake it, add the times to `figures`, and check its answer. Raises SystemExit if that
    differs."""
    began = time.monotonic()
    await sleeper.sleep(handle, becomes)
    slept = time.monotonic()
    figures[f"{becomes}_mib"].append(private_mib(handle))
    woken = time.monotonic()
    await sleeper.wake(handle)
    ready = time.monotonic()
    first, told = await first_token(handle)
    if told != text:
        raise SystemExit(f"after {becomes} it says {told!r} instead of {text!r}")
    figures[f"to_{becomes}_s"].append(slept - began)
    figures[f"{becomes}_to_ready_s"].append(ready - woken)
    figures[f"{becomes}_to_first_token_s"].append(ready - woken + first)


async def exchange(sleeper: Sleeper, pair: list[EngineHandle], figures: Figures) -> None:
    """Let the awake one of two engines sleep and wake the other, add the time to `figures`, and swap the pair."""
    awake, asleep = pair
    began = time.monotonic()
    await sleeper.sleep(awake, "swapped_out")
    await sleeper.wake(asleep)
    figures["exchange_to_first_token_s"].append(time.monotonic() - began + (await first_token(asleep))[0])
    pair.reverse()


async def measure(engine: str, num_cycles: int) -> Figures:
    """Measure all rungs of one engine, and print the table. Raises SystemExit if the engine is missing."""
    figures: Figures = defaultdict(list)
    with tempfile.TemporaryDirectory(prefix="gp-bench-") as folder:
        case = EngineCase(engine, Path(folder))
        if reason := case.driver.unavailable():
            raise SystemExit(reason)
        await case.driver.warm()
        able = case.driver.abilities("host")
        await case.driver.stop(await cold(case, defaultdict(list)), 5.0)  # fills the bytecode and page caches
        pair = [await cold(case, figures) for _ in range(2)]
        for _ in range(max(0, num_cycles // 2 - 2)):
            await case.driver.stop(await cold(case, figures), 5.0)
        _, text = await first_token(pair[0])
        figures["awake_mib"].append(private_mib(pair[0]))
        if isinstance(case.driver, Sleeper):
            for becomes in (rung for rung, ability in RUNGS.items() if ability in able):
                for _ in range(num_cycles):
                    await cycle(case.driver, pair[0], becomes, text, figures)
            if Ability.SWAP in able:
                await case.driver.sleep(pair[1], "swapped_out")
                for _ in range(num_cycles):
                    await exchange(case.driver, pair, figures)
        await case.close()
    print(f"{engine}{' (EMULATED)' if case.driver.capabilities.emulated else ''}, load {psutil.getloadavg()[0]:.1f}")
    print(f"{'':34} {'median':>8} {'worst':>8} {'runs':>5}")
    for name, values in figures.items():
        print(f"{name:34} {statistics.median(values):8.3f} {max(values):8.3f} {len(values):5}", flush=True)
    return figures


def main() -> None:
    """Measure, and write the data to `--json`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine", nargs="?", default="llamacpp")
    parser.add_argument("--cycles", type=int, default=10, help="of sleep and wake, and exchanges")
    data_option(parser)
    args = parser.parse_args()
    write_data(args.json, {"figures": asyncio.run(measure(args.engine, args.cycles))})


if __name__ == "__main__":
    main()
