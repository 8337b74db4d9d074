"""How much sooner an engine answers that loads its weights while they arrive: the same start, streamed and not.

    python -m bench.streaming [--engine vllm|llamacpp] [--rounds N] [--mb-per-s N]

Needs `make vllm-env` for vLLM. Real engines, parked, one at a time, through the driver an agent uses; the two kinds
take turns. The fetch is played: the files land in a region piece by piece at that rate, in the order in which the
prefetcher brings them, and no prefetcher, agent or router runs. The floor is the bytes over the rate. Greedy tokens of
both must be equal, else it fails.
"""

import argparse
import asyncio
import json
import shutil
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import httpx

from bench.measured.load import Timed, compare, load_now
from glowplug.domain.instance import PhaseName
from glowplug.domain.model import Model, WeightsRef
from glowplug.engines import vllm_sample
from glowplug.engines.drivers import driver
from glowplug.engines.port import EngineDriver, EngineSettings, LaunchRequest
from glowplug.engines.samples import sample_weights_path
from glowplug.engines.vllm import VllmDriver
from tests.arriving_region import ArrivingRegion

NUM_TOKENS = 24
PROMPT = "The sea is"
SHM = Path("/dev/shm")


@dataclass(frozen=True)
class Start:
    """Seconds since the launch; `text` is the greedy answer."""

    fetched_s: float
    loading_s: float  # its load began
    ready_s: float
    first_token_s: float
    text: str
    load: float  # of the machine, before

    @property
    def after_fetch_s(self) -> float:
        return self.first_token_s - self.fetched_s


def model_of(engine: str, num_bytes: int) -> Model:
    return Model(
        name="smol",
        key="smol",
        engine=engine,
        weights=WeightsRef(uri="file:played"),
        weights_bytes=num_bytes,
        kv_bytes=256 << 20,
        context_tokens=1024,
    )


async def start_once(engines: EngineDriver, weights: Path, rate: float, *, streamed: bool) -> Start:
    with tempfile.TemporaryDirectory(prefix="gp-bench-", ignore_cleanup_errors=True) as folder:
        memory = Path(tempfile.mkdtemp(prefix="gp-bench-", dir=SHM if SHM.is_dir() else None))
        region = ArrivingRegion(weights, memory)
        request = LaunchRequest(
            instance_id="bench",
            model=model_of(engines.name, region.num_bytes),
            num_bytes=0,
            run_dir=Path(folder),
            log_path=Path(folder) / "engine.log",
        )
        load, began = load_now(), time.time()
        fetch = asyncio.create_task(_fetch(region, rate))
        handle = await engines.launch(request)
        try:
            if not streamed:
                await fetch
            report = await engines.load(handle, region.root)
            ready_s, fetched_at = time.time() - began, await fetch
            text, first_at = await _answer(report.handle.url)
        finally:
            await engines.stop(handle, 10.0)
            region.close()
            shutil.rmtree(memory)
    loading_at = next(phase.started_at for phase in report.phases if phase.name is PhaseName.LOAD)
    return Start(fetched_at - began, loading_at - began, ready_s, first_at - began, text, load)


async def _fetch(region: ArrivingRegion, rate: float) -> float:
    await region.land(bytes_per_s=rate)
    region.complete()
    return time.time()


async def _answer(url: str) -> tuple[str, float]:
    """A greedy answer, and when its first token came."""
    body = {"model": "smol", "prompt": PROMPT, "stream": True, "temperature": 0, "max_tokens": NUM_TOKENS}
    text, first_at = "", 0.0
    async with (
        httpx.AsyncClient(timeout=120) as client,
        client.stream("POST", f"{url}/v1/completions", json=body) as answer,
    ):
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                first_at = first_at or time.time()
                text += "".join(choice["text"] for choice in json.loads(line[6:])["choices"])
    return text, first_at


def table(starts: dict[bool, list[Start]], floor_s: float) -> str:
    columns = ("fetched_s", "loading_s", "ready_s", "first_token_s", "after_fetch_s")
    names = ("fetched", "load began", "READY", "first token", "behind the last byte")
    lines = [f"| | {' | '.join(names)} |", f"|---|{'---|' * len(names)}"]
    for streamed, of_kind in starts.items():
        cells = [f"{statistics.median(getattr(one, name) for one in of_kind):.2f} s" for name in columns]
        lines.append(f"| {'streamed' if streamed else 'fetched, then loaded'} | {' | '.join(cells)} |")
    whole, streamed = ([Timed(one.first_token_s, one.load) for one in starts[kind]] for kind in (False, True))
    behind = (statistics.median(one.first_token_s for one in starts[kind]) - floor_s for kind in (False, True))
    left = " and ".join(f"{seconds:.2f} s" for seconds in behind)
    return "\n".join(
        [*lines, "", f"Above the floor of {floor_s:.2f} s (medians): {left}.", compare(whole, streamed).show()]
    )


async def run(engine: str, rounds: int, rate: float) -> int:
    engines = driver(engine, EngineSettings())
    if reason := engines.unavailable():
        print(reason, file=sys.stderr)
        return 1
    weights = vllm_sample.prepare() if engine == "vllm" else sample_weights_path()
    files = [path for path in weights.rglob("*") if path.is_file()] if weights.is_dir() else [weights]
    num_bytes = sum(path.stat().st_size for path in files)
    starts: dict[bool, list[Start]] = {False: [], True: []}
    await engines.warm()
    try:
        await start_once(engines, weights, 1e12, streamed=False)  # parks, and warms the page cache
        if isinstance(engines, VllmDriver):
            await asyncio.sleep(3.0)  # the tokenizer is kept meanwhile, or found to be gone
        for _ in range(rounds):
            for streamed in (False, True):
                one = await start_once(engines, weights, rate, streamed=streamed)
                starts[streamed].append(one)
                shown = "streamed" if streamed else "whole   "
                print(f"{shown} fetched {one.fetched_s:.2f} s, READY {one.ready_s:.2f} s, first token "
                      f"{one.first_token_s:.2f} s, load {one.load:.1f}", flush=True)  # fmt: skip
    finally:
        await engines.close()
    texts = {one.text for of_kind in starts.values() for one in of_kind}
    print(f"\n{engine}, {num_bytes / 1e6:.0f} MB at {rate / 1e6:.0f} MB/s, {rounds} rounds\n")
    print(table(starts, num_bytes / rate))
    print(f"greedy tokens: {'equal' if len(texts) == 1 else f'DIFFERENT: {texts}'}")
    return len(texts) != 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=("vllm", "llamacpp"), default="vllm")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--mb-per-s", type=float, default=20.0)
    asked = parser.parse_args()
    return asyncio.run(run(asked.engine, asked.rounds, asked.mb_per_s * 1e6))


if __name__ == "__main__":
    sys.exit(main())
