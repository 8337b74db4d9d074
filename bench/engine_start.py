"""Measure an engine's times from launch to the first token, its tokens a second and its memory.

    python -m bench.engine_start [ENGINE] [--starts N] [--json FILE]

The weights are in host memory already (page cache), as the prefetcher leaves them, and are granted at once. The first
start of each kind is dropped, since it fills the bytecode and page caches. Starts of llama.cpp and of vLLM (`make
vllm-env`) from a fresh interpreter and from a parked process take turns, and their ratio is printed with the load
average. Figures of the emulated engine are modelled, except its process start and memory.
"""

import argparse
import asyncio
import os
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import httpx
import psutil

from bench.measured.data import data_option, write_data
from bench.measured.load import Ratio, Timed, compare, load_now
from bench.measured.stream import text_of
from glowplug.engines.hosted import HostedDriver
from glowplug.engines.port import EngineSettings
from glowplug.engines.process import anonymous_bytes
from glowplug.engines.vllm import VllmDriver
from tests.contract.engine_rig import EngineCase, park
from tests.waiting import WAIT_S

NUM_TOKENS = 64


async def first_token_and_rate(url: str) -> tuple[float, float]:
    """(epoch seconds of the first token, tokens per second after it) of one greedy stream."""
    body = {"prompt": "The sea is", "max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True, "stream": True}
    async with (
        httpx.AsyncClient(base_url=url, timeout=120) as client,
        client.stream("POST", "/v1/completions", json=body) as answer,
    ):
        moments = [time.time() async for line in answer.aiter_lines() if text_of(line)]
    return moments[0], (len(moments) - 1) / (moments[-1] - moments[0])


async def one_start(case: EngineCase, engine_args: Mapping[str, object]) -> dict[str, float]:
    """Start an engine once. Returns seconds since the launch and of each phase, tokens a second, megabytes of
    memory, and the load average before."""
    load, began = load_now(), time.time()
    report = await case.start(engine_args=engine_args)
    ready = time.time()
    first, rate = await first_token_and_rate(report.handle.url)
    memory, anonymous = psutil.Process(report.handle.pid).memory_full_info(), anonymous_bytes(report.handle.pid)
    await case.driver.stop(report.handle, grace_s=5.0)
    return {
        **{f"{phase.name.value}_s": phase.actual_s for phase in report.phases},
        "ready_s": ready - began,
        "first_token_s": first - began,
        "tokens_per_s": rate,
        "private_mb": memory.uss / 1e6,
        "anonymous_mb": anonymous / 1e6,
        "load": load,
    }


def cases(engine: str, folder: Path) -> dict[str, tuple[EngineCase, dict[str, object]]]:
    """(case, engine_args) by kind of start: plain (a fresh interpreter) and parked, of the emulated engine just one."""
    if engine == "llamacpp":
        by_name = {"plain": EngineSettings(llamacpp_parked=False), "parked": EngineSettings()}
        return {name: (EngineCase(engine, folder, settings), {}) for name, settings in by_name.items()}
    case = EngineCase(engine, folder)
    if engine == "vllm":
        threads = min(4, os.cpu_count() or 1)
        return {name: (case, {"parked": name == "parked", "num_threads": threads}) for name in ("plain", "parked")}
    return {engine: (case, dict(case.model().engine_args))}


def as_data(starts: Mapping[str, Sequence[Mapping[str, float]]]) -> dict[str, object]:
    """The data by kind of start: each figure of every start, in order; and the ratio of the two kinds' first tokens."""
    data: dict[str, object] = {
        "starts": {kind: {name: [one[name] for one in some] for name in some[0]} for kind, some in starts.items()},
    }
    return data if len(starts) < 2 else data | {"plain_over_parked": plain_over_parked(starts).data()}


def plain_over_parked(starts: Mapping[str, Sequence[Mapping[str, float]]]) -> Ratio:
    plain, parked = ([Timed(one["first_token_s"], one["load"]) for one in starts[kind]] for kind in ("plain", "parked"))
    return compare(plain, parked)


async def measure(engine: str, num_starts: int) -> tuple[dict[str, list[dict[str, float]]], bool]:
    """Measure all starts. Returns (figures by kind of start, whether they are emulated)."""
    with tempfile.TemporaryDirectory(prefix="gp-bench-") as folder:
        by_name = cases(engine, Path(folder))
        starts: dict[str, list[dict[str, float]]] = {name: [] for name in by_name}
        for case, engine_args in by_name.values():
            if reason := case.driver.unavailable():
                raise SystemExit(reason)
            if isinstance(case.driver, VllmDriver):
                await park(case.driver)
            if isinstance(case.driver, HostedDriver) and case.driver.is_parked:
                case.driver.zygote.until_parked(WAIT_S)
            await one_start(case, engine_args)
        for _ in range(num_starts):
            for name, (case, engine_args) in by_name.items():
                starts[name].append(await one_start(case, engine_args))
        for case, _args in by_name.values():
            await case.close()
    return starts, case.driver.capabilities.emulated


def shown(values: list[float], name: str) -> str:
    """The median and the worst of the values."""
    worst = min(values) if name == "tokens_per_s" else max(values)
    return f" {statistics.median(values):8.3f} {worst:8.3f}"


def main() -> None:
    """Measure, print the table, and write the data where `--json` says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine", nargs="?", default="llamacpp")
    parser.add_argument("--starts", type=int, default=5, help="of each kind")
    data_option(parser)
    args = parser.parse_args()
    starts, emulated = asyncio.run(measure(args.engine, args.starts))
    mark = " (EMULATED)" if emulated else ""
    print(f"{args.engine}{mark}, {args.starts} starts of each, load {psutil.getloadavg()[0]:.1f}")
    print(f"{'':14}" + "".join(f" {name:>17}" for name in starts))
    print(f"{'':14}" + f" {'median':>8} {'worst':>8}" * len(starts))
    for name in next(iter(starts.values()))[0]:
        print(f"{name:14}" + "".join(shown([start[name] for start in of_kind], name) for of_kind in starts.values()))
    if len(starts) > 1:
        print(f"plain / parked, first token: {plain_over_parked(starts).show('.1f')}")
    write_data(args.json, as_data(starts))


if __name__ == "__main__":
    main()
