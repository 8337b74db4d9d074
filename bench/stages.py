"""A pipeline of real vLLM stages beside one engine: `python -m bench.stages [--stages S] [--rounds N]`.

    python -m bench.stages --consolidations 100    pipelines that become one engine under streams, one after the other

Needs `make vllm-env`. Each stage is an engine process with a run directory of its own, on this machine's loopback; the
weights lie in host memory for all (page cache), so that nothing is fetched here. In turns, of one parked engine and of
a pipeline: seconds to READY and to the first token, and between tokens; what is between tokens beyond the one engine's
is the hop's. Then a pipeline becomes whole while it streams, once with the KV cache of what runs and once computed
anew: seconds of the move, and to the next token by the tokens there were. Tokens are compared with the one engine's.

With `--consolidations` nothing else is measured: two streams run in each pipeline and are continued in the engine that
it becomes. What breaks, and tokens that differ from one engine's, are counted; then that engine and one that was never
a pipeline take turns with the same streams, and the ratio of their seconds between tokens is printed.
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
from glowplug.domain.errors import EngineFailed
from glowplug.engines.port import EngineHandle, EngineSettings
from glowplug.engines.vllm import VllmDriver
from tests.contract.engine_rig import EngineCase
from tests.ports import free_port

NUM_TOKENS = 32
LENGTHS = (64, 128, 256, 512)  # tokens of the prompts that run when a pipeline becomes whole
ARGS = {"dtype": "float32", "num_threads": 1}
MODEL: dict[str, Any] = {"engine_args": ARGS, "kv_bytes": 256 << 20}  # memory for all that runs at once
LATEST = 1 << 30  # tokens: no cache is worth moving
TURNS = 3  # of two engines with a stream each, one after the other

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
        await driver.end_stage(whole)
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


@dataclass
class Consolidated:
    """One pipeline that became one engine under streams. `why` says what went wrong."""

    why: str = ""
    num_pulled: int = 0  # tokens of KV cache that moved
    gap_s: list[float] = field(default_factory=list)  # of each stream: its last token there, its next one here
    between_s: list[tuple[float, float]] = field(default_factory=list)  # ... of the new engine, of one that was none


async def consolidate_once(
    case: EngineCase, num_stages: int, alone: EngineHandle, expected: dict[int, list[int]]
) -> Consolidated:
    """Both streams to their ends, through the consolidation."""
    driver, out = case.driver, Consolidated()
    assert isinstance(driver, VllmDriver)
    async with pipeline(case, num_stages) as handle:
        streams = {n: Stream() for n in expected}
        most = NUM_TOKENS * 16
        reads = [asyncio.create_task(stream.read(handle.url, prompt_of(n), most)) for n, stream in streams.items()]
        while not all(stream.token_ids for stream in streams.values()):
            await asyncio.sleep(0.01)
        await driver.consolidate(handle, case.model(**MODEL), case.weights)
        report = driver.whole(handle)
        assert report is not None
        case.handles.append(report.handle)
        out.num_pulled = (await driver.move_requests(report.handle)).num_tokens
        await driver.end_stage(report.handle)
        await asyncio.gather(*reads)
        url = report.handle.url
        prompts = {n: [*prompt_of(n), *stream.token_ids] for n, stream in streams.items()}
        more = await asyncio.gather(*(Stream().read(url, prompts[n], NUM_TOKENS) for n in streams))
        for n, rest in zip(streams, more, strict=True):
            said = [*streams[n].token_ids, *rest.token_ids]
            if len(rest.token_ids) != NUM_TOKENS:
                out.why = f"the stream behind a prompt of {n} has {len(rest.token_ids)} tokens more, not {NUM_TOKENS}"
            elif (common := min(len(said), len(expected[n]))) and said[:common] != expected[n][:common]:
                out.why = f"the tokens behind a prompt of {n} differ from one engine's"
            out.gap_s.append(rest.at[0] - streams[n].at[-1] if rest.at else float("inf"))
        for turn in range(TURNS):
            prompt = prompt_of(100 + turn)
            here = await Stream().read(url, prompt, NUM_TOKENS)
            there = await Stream().read(alone.url, prompt, NUM_TOKENS)
            out.between_s.append((here.between_s, there.between_s))
        await driver.stop(report.handle, 0.0)
    return out


async def consolidations(num_stages: int, num: int) -> None:
    """As many in a row; an engine that is none of them lives beside."""
    seen: list[Consolidated] = []
    loads = [load_now()]
    with tempfile.TemporaryDirectory(prefix="gp-bench-") as folder:
        case = EngineCase("vllm", Path(folder), settings=EngineSettings(extra={"vllm_recompute_below": 1}))
        if reason := case.driver.unavailable():
            raise SystemExit(reason)
        try:
            alone = (await case.start(**MODEL)).handle
            lengths = (64, 256)
            reads = (Stream().read(alone.url, prompt_of(length), NUM_TOKENS * 4) for length in lengths)
            expected = {n: s.token_ids for n, s in zip(lengths, await asyncio.gather(*reads), strict=True)}
            for number in range(num):
                try:
                    one = await consolidate_once(case, num_stages, alone, expected)
                except (EngineFailed, httpx.HTTPError) as error:
                    one = Consolidated(why=f"{type(error).__name__}: {error}")
                seen.append(one)
                loads.append(load_now())
                print(f"{number + 1}: {one.why or 'whole'}, gaps {[round(s, 2) for s in one.gap_s]}", flush=True)
        finally:
            await case.close()
    gaps = [gap for one in seen for gap in one.gap_s]
    ratios = [here / there for one in seen for here, there in one.between_s if there]
    lost = [one.why for one in seen if one.why]
    print(f"\n{len(seen)} consolidations of {num_stages} stages in a row, load {min(loads):.1f} to {max(loads):.1f}")
    print(f"lost, or with other tokens: {len(lost)} {lost or ''}")
    print(f"KV cache that moved, tokens: {statistics.median(one.num_pulled for one in seen):.0f} each time (median)")
    print(f"gap in a stream: median {statistics.median(gaps):.2f} s, longest {max(gaps):.2f} s")
    print(
        f"seconds between tokens, of an engine that was a pipeline over one that was none, in turns: median "
        f"{statistics.median(ratios):.3f} of {len(ratios)}, {min(ratios):.2f} to {max(ratios):.2f}"
    )


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
    parser.add_argument("--consolidations", type=int, default=0, help="so many in a row, and nothing else")
    given = parser.parse_args()
    asyncio.run(
        consolidations(given.stages, given.consolidations) if given.consolidations else main(given.stages, given.rounds)
    )
