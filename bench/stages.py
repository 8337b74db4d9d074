"""A pipeline of real vLLM stages beside one engine: `python -m bench.stages [--stages S] [--rounds N]`.

Needs `make vllm-env`. Each stage is an engine process with a run directory of its own, on this machine's loopback; the
weights lie in host memory for all (page cache), so that nothing is fetched here. In turns, of one parked engine and of
a pipeline: seconds to READY and to the first token, and between tokens; what is between tokens beyond the one engine's
is the hop's. Then a pipeline becomes whole while it streams, once with the KV cache of what runs and once computed
anew: seconds of the move, and to the next token by the tokens there were. Tokens are compared with the one engine's.
"""

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from bench.measured.load import load_now
from glowplug.engines.port import EngineHandle, EngineSettings
from glowplug.engines.vllm import VllmDriver
from tests.contract.engine_rig import EngineCase
from tests.ports import free_port

NUM_TOKENS = 32
LENGTHS = (64, 128, 256, 512)  # tokens of the prompts that run when a pipeline becomes whole
ARGS = {"dtype": "float32", "num_threads": 1}
MODEL: dict[str, Any] = {"engine_args": ARGS, "kv_bytes": 256 << 20}  # memory for all that runs at once
LATEST = 1 << 30  # tokens: no cache is worth moving

Figures = dict[str, list[float]]


@dataclass
class Stream:
    """One greedy stream: token ids, and when each came."""

    token_ids: list[int] = field(default_factory=list)
    at: list[float] = field(default_factory=list)

    async def read(self, url: str, prompt: Sequence[int], num_tokens: int) -> "Stream":
        """To its end, or to where its engine's process ends."""
        body = {"model": "Contract/Tiny", "prompt": list(prompt), "max_tokens": num_tokens, "temperature": 0}
        asked = {**body, "ignore_eos": True, "stream": True, "return_token_ids": True}
        with suppress(httpx.RemoteProtocolError):
            async with (
                httpx.AsyncClient(timeout=300) as client,
                client.stream("POST", f"{url}/v1/completions", json=asked) as answer,
            ):
                async for line in answer.aiter_lines():
                    if line.startswith("data: {") and (choices := json.loads(line[6:])["choices"]):
                        new = choices[0].get("token_ids") or []
                        self.token_ids += new
                        self.at += [time.monotonic()] * len(new)
        return self

    @property
    def between_s(self) -> float:
        gaps = [later - sooner for sooner, later in zip(self.at, self.at[1:], strict=False)]
        return statistics.median(gaps) if gaps else 0.0


def prompt_of(num_tokens: int) -> list[int]:
    """Token ids that repeat nothing of another prompt, so that no engine's own cache has them."""
    return [1000 + (num_tokens * 7919 + n * 104729) % 40000 for n in range(num_tokens)]


@asynccontextmanager
async def pipeline(case: EngineCase, num_stages: int) -> AsyncIterator[EngineHandle]:
    """The first stage's handle, once it answers for all."""
    meet = {"num_stages": num_stages, "rendezvous": f"127.0.0.1:{free_port()}"}
    driver = case.driver
    assert isinstance(driver, VllmDriver)
    launched = [await case.launch(part={**meet, "stage": n}, **MODEL) for n in range(num_stages)]
    try:
        reports = await asyncio.gather(*(driver.load(handle, case.weights) for handle in launched))
        yield (await driver.serve_stages(reports[0].handle)).handle
    finally:
        for handle in launched:
            await driver.stop(handle, 0.0)


async def start_once(case: EngineCase, num_stages: int, figures: Figures) -> list[int]:
    """One start and one stream. Returns its tokens."""
    kind, began = f"{num_stages} stages" if num_stages > 1 else "one engine", time.monotonic()
    prompt = prompt_of(100)
    if num_stages > 1:
        async with pipeline(case, num_stages) as handle:
            ready = time.monotonic()
            stream = await Stream().read(handle.url, prompt, NUM_TOKENS)
    else:
        handle = (await case.start(**MODEL)).handle
        ready = time.monotonic()
        stream = await Stream().read(handle.url, prompt, NUM_TOKENS)
        await case.driver.stop(handle, 5.0)
    figures[f"{kind}: start to READY"].append(ready - began)
    figures[f"{kind}: start to first token"].append(stream.at[0] - began)
    figures[f"{kind}: between tokens"].append(stream.between_s)
    return stream.token_ids


async def move_once(case: EngineCase, num_stages: int, kind: str, expected: dict[int, list[int]], out: Figures) -> None:
    """A pipeline becomes whole while one stream of each length runs; `kind`: with KV, or anew."""
    driver = case.driver
    assert isinstance(driver, VllmDriver)
    async with pipeline(case, num_stages) as handle:
        streams = {n: Stream() for n in LENGTHS}
        reads = [asyncio.create_task(s.read(handle.url, prompt_of(n), NUM_TOKENS * 16)) for n, s in streams.items()]
        while not all(stream.token_ids for stream in streams.values()):
            await asyncio.sleep(0.01)
        began = time.monotonic()
        await driver.consolidate(handle, case.model(**MODEL), case.weights)
        report = driver.whole(handle)
        assert report is not None
        whole, ready = report.handle, time.monotonic()
        case.handles.append(whole)
        moved = await driver.move_requests(whole)
        gone = time.monotonic()
        await driver.end_stage(whole)
        await asyncio.gather(*reads)
        out["becomes whole, the pipeline serves on"].append(ready - began)
        out[f"move, {kind}: {moved.num_requests} requests"].append(gone - ready)
        if moved.num_pulled:
            out[f"move, {kind}: MiB of KV cache"].append(moved.num_bytes / (1 << 20))
        for length, stream in streams.items():
            asked = time.monotonic()
            more = await Stream().read(whole.url, [*prompt_of(length), *stream.token_ids], 8)
            out[f"next token, {kind}: a prompt of {length}"].append(more.at[0] - asked)
            said = (stream.token_ids + more.token_ids)[: len(expected[length])]
            if said != expected[length][: len(said)]:
                print(f"{kind}: the tokens after a prompt of {length} differ from one engine's")
        await driver.stop(whole, 0.0)


async def main(num_stages: int, num_rounds: int) -> None:
    figures: Figures = defaultdict(list)
    loads = []
    with tempfile.TemporaryDirectory(prefix="gp-bench-") as folder:
        settings = {kind: EngineSettings(extra={"vllm_recompute_below": n}) for kind, n in MOVES.items()}
        cases = {kind: EngineCase("vllm", Path(folder), settings=given) for kind, given in settings.items()}
        case = cases["with KV"]
        if reason := case.driver.unavailable():
            raise SystemExit(reason)
        try:
            alone = (await case.start(**MODEL)).handle
            reads = (Stream().read(alone.url, prompt_of(length), NUM_TOKENS * 2) for length in LENGTHS)
            expected = {n: s.token_ids for n, s in zip(LENGTHS, await asyncio.gather(*reads), strict=True)}
            await case.driver.stop(alone, 5.0)
            for _ in range(num_rounds):
                loads.append(load_now())
                if await start_once(case, 1, figures) != await start_once(case, num_stages, figures):
                    print("the tokens of the pipeline differ from one engine's")
            for _ in range(num_rounds):
                for kind, one in cases.items():
                    loads.append(load_now())
                    await move_once(one, num_stages, kind, expected, figures)
        finally:
            for one in cases.values():
                await one.close()
    hop = [
        s - p
        for s, p in zip(
            figures[f"{num_stages} stages: between tokens"], figures["one engine: between tokens"], strict=True
        )
    ]
    figures["one hop between tokens"] = [extra / (num_stages - 1) for extra in hop]
    print(f"vLLM on a CPU, float32, one thread for each stage; load {min(loads):.1f} to {max(loads):.1f}")
    print(f"{'':50} {'median':>8} {'worst':>8} {'runs':>5}")
    for name, values in sorted(figures.items()):
        print(f"{name:50} {statistics.median(values):8.3f} {max(values):8.3f} {len(values):5}")


MOVES: dict[str, Any] = {"with KV": 1, "anew": LATEST}

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    asyncio.run(main(given.stages, given.rounds))
