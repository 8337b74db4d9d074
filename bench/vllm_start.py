"""How long a real vLLM takes from `launch` to its first streamed token: a fresh interpreter against a parked one.

    python bench/vllm_start.py [--rounds N] [--threads N]

Needs `make vllm-env`. Runs one engine at a time through the driver an agent uses, a plain start and a parked one in
turns; nothing is emulated. The table is seconds since `launch`: READY (the port accepts), first token of a stream, and
the tokens per second after it; then the ratio of the two, at the load there was.
"""

import argparse
import asyncio
import json
import os
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import httpx

from bench.measured.load import Timed, compare, load_now
from glowplug.domain.model import Model, WeightsRef
from glowplug.engines import vllm_sample
from glowplug.engines.port import EngineHandle, EngineSettings, LaunchRequest
from glowplug.engines.vllm import VllmDriver

NUM_TOKENS = 40


@dataclass(frozen=True)
class Start:
    ready_s: float
    first_token_s: float
    tokens_per_s: float
    load: float  # of the machine, before


async def start_once(driver: VllmDriver, weights: Path, parked: bool, num_threads: int) -> Start:
    model = Model(
        name="smol",
        key="smol",
        engine="vllm",
        weights=WeightsRef(uri=f"file:{weights}"),
        weights_bytes=270_000_000,
        kv_bytes=256 << 20,
        context_tokens=1024,
        engine_args={"parked": parked, "num_threads": num_threads},
    )
    with tempfile.TemporaryDirectory(prefix="gp-bench-", ignore_cleanup_errors=True) as folder:
        request = LaunchRequest(
            instance_id="bench", model=model, num_bytes=0, run_dir=Path(folder), log_path=Path(folder) / "engine.log"
        )
        load, began = load_now(), time.monotonic()
        handle: EngineHandle = await driver.launch(request)
        try:
            report = await driver.load(handle, weights)
            ready_s = time.monotonic() - began
            first_s, tokens_per_s = await stream(report.handle.url, began)
        finally:
            await driver.stop(handle, 10.0)
        return Start(ready_s, first_s, tokens_per_s, load)


async def stream(url: str, began: float) -> tuple[float, float]:
    body = {
        "model": "smol",
        "stream": True,
        "temperature": 0,
        "max_tokens": NUM_TOKENS,
        "ignore_eos": True,
        "messages": [{"role": "user", "content": "Tell me about the sea."}],
    }
    arrivals = []
    async with (
        httpx.AsyncClient(timeout=120) as client,
        client.stream("POST", f"{url}/v1/chat/completions", json=body) as answer,
    ):
        async for line in answer.aiter_lines():
            if line.startswith("data: {") and json.loads(line[6:])["choices"][0]["delta"].get("content"):
                arrivals.append(time.monotonic())  # noqa: PERF401 (the moment matters, not the list)
    return arrivals[0] - began, (len(arrivals) - 1) / (arrivals[-1] - arrivals[0])


def show(name: str, starts: list[Start]) -> None:
    for what in ("ready_s", "first_token_s", "tokens_per_s"):
        values = [getattr(start, what) for start in starts]
        print(f"{name:<10} {what:<14} median {statistics.median(values):6.2f}   all {[round(v, 2) for v in values]}")
    print(f"{name:<10} load before {[round(start.load, 1) for start in starts]}", flush=True)


def first_tokens(starts: list[Start]) -> list[Timed]:
    return [Timed(start.first_token_s, start.load) for start in starts]


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="of one plain start (20 s and more) and one parked one")
    parser.add_argument("--rest", type=float, default=0.0, help="seconds between two starts, for the load to settle")
    parser.add_argument("--threads", type=int, default=min(4, os.cpu_count() or 1))
    options = parser.parse_args()
    weights = vllm_sample.prepare()
    load = ", ".join(f"{value:.1f}" for value in os.getloadavg())
    print(f"{os.cpu_count()} cores, load average {load} at the start, {options.threads} threads, SmolLM2-135M bfloat16")
    driver = VllmDriver(EngineSettings())
    began = time.monotonic()
    await driver._zygote.ensure()
    print(f"{'zygote':<10} {'parked_s':<14}        {time.monotonic() - began:6.2f}   (once per node and fleet)")
    show("parked 1st", [await start_once(driver, weights, True, options.threads)])
    await asyncio.sleep(4)  # the zygote keeps the tokenizer now
    plain, parked = [], []
    for _ in range(options.rounds):
        for starts, is_parked in ((plain, False), (parked, True)):
            await asyncio.sleep(options.rest)
            starts.append(await start_once(driver, weights, is_parked, options.threads))
    show("plain", plain)
    show("parked", parked)
    print(f"plain / parked, first token: {compare(first_tokens(plain), first_tokens(parked)).show('.0f')}")
    await driver.close()
    print(f"load average at the end {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    asyncio.run(main())
