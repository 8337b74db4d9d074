"""The ladder of seconds of this machine: `python -m bench.swap [ENGINE] [CYCLES]`.

What it takes to the first token of one model from each rung (a start from nothing, a replica that is prewarmed, an
engine that sleeps), what each rung holds in private memory, and what it takes to exchange two models: sleep A, wake B,
first token of B. Greedy answers are compared with those before the first sleep; one that differs ends the run. The
weights are in host memory already (page cache), as the prefetcher leaves them. Figures of the emulated engine are
modelled.
"""

import asyncio
import json
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import httpx
import psutil

from glowplug.engines.port import Ability, EngineHandle, Sleeper
from glowplug.engines.process import anonymous_bytes
from tests.contract.engine_rig import EngineCase

PROMPT, NUM_TOKENS = "Once upon a time there was a small", 24
MIB = 1 << 20
RUNGS = {"prewarmed": Ability.PREWARM, "swapped_out": Ability.SWAP}

Figures = dict[str, list[float]]


async def streamed(handle: EngineHandle, **asked: Any) -> tuple[list[float], str]:
    """(seconds to each piece, all of the text) of one greedy stream of what is `asked`."""
    body = {"temperature": 0, "stream": True, **asked}
    began, moments, texts = time.monotonic(), list[float](), list[str]()
    async with (
        httpx.AsyncClient(base_url=handle.url, timeout=120) as client,
        client.stream("POST", "/v1/completions", json={"model": "Contract/Tiny", **body}) as answer,
    ):
        async for line in answer.aiter_lines():
            if line.startswith("data: {") and (choices := json.loads(line[6:])["choices"]):
                moments.append(time.monotonic() - began)
                texts.append(choices[0]["text"])
    return moments, "".join(texts)


async def first_token(handle: EngineHandle, num_tokens: int = NUM_TOKENS) -> tuple[float, str]:
    """(seconds to the first token, all of the text) of one greedy stream."""
    moments, text = await streamed(handle, prompt=PROMPT, max_tokens=num_tokens)
    return moments[0], text


def private_mib(handle: EngineHandle) -> float:
    """Anonymous memory of the process and its children; pages that forks share count in parts."""
    leader = psutil.Process(handle.pid)
    of_each = (anonymous_bytes(process.pid) for process in (leader, *leader.children(recursive=True)))
    return sum(of_each) / MIB


async def cold(case: EngineCase, figures: Figures) -> EngineHandle:
    """Start one engine; it stays."""
    began = time.monotonic()
    handle = (await case.start()).handle
    ready = time.monotonic()
    first, _ = await first_token(handle)
    start = "parked start" if handle.data.get("parked") else "start"
    figures[f"{start} to READY"].append(ready - began)
    figures[f"{start} to first token"].append(ready - began + first)
    return handle


async def cycle(sleeper: Sleeper, handle: EngineHandle, becomes: str, text: str, figures: Figures) -> None:
    """Sleep, wake, and ask for the same answer."""
    began = time.monotonic()
    await sleeper.sleep(handle, becomes)
    slept = time.monotonic()
    figures[f"{becomes}, MiB"].append(private_mib(handle))
    woken = time.monotonic()
    await sleeper.wake(handle)
    ready = time.monotonic()
    first, told = await first_token(handle)
    if told != text:
        raise SystemExit(f"after {becomes} it says {told!r} instead of {text!r}")
    figures[f"to {becomes}"].append(slept - began)
    figures[f"{becomes} to READY"].append(ready - woken)
    figures[f"{becomes} to first token"].append(ready - woken + first)


async def exchange(sleeper: Sleeper, pair: list[EngineHandle], figures: Figures) -> None:
    """Memory holds one of the two: A leaves, B comes."""
    awake, asleep = pair
    began = time.monotonic()
    await sleeper.sleep(awake, "swapped_out")
    await sleeper.wake(asleep)
    figures["exchange of two to first token"].append(time.monotonic() - began + (await first_token(asleep))[0])
    pair.reverse()


async def main(engine: str, num_cycles: int) -> None:
    figures: Figures = defaultdict(list)
    with tempfile.TemporaryDirectory(prefix="gp-bench-") as folder:
        case = EngineCase(engine, Path(folder))
        if reason := case.driver.unavailable():
            raise SystemExit(reason)
        await case.driver.warm()
        able = case.driver.abilities("host")
        await case.driver.stop(await cold(case, defaultdict(list)), 5.0)  # it pays for bytecode and page cache
        pair = [await cold(case, figures) for _ in range(2)]
        for _ in range(max(0, num_cycles // 2 - 2)):
            await case.driver.stop(await cold(case, figures), 5.0)
        _, text = await first_token(pair[0])
        figures["awake, MiB"].append(private_mib(pair[0]))
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
        print(f"{name:34} {statistics.median(values):8.3f} {max(values):8.3f} {len(values):5}")


if __name__ == "__main__":
    asyncio.run(main(*(sys.argv[1:2] or ["llamacpp"]), int((sys.argv[2:] or ["10"])[0])))
