"""kill -9 of the engine of running streams, again and again under load: how many streams break, how many texts differ.

`python -m bench.continuation [--kills 50] [--engine llamacpp|emulated|vllm] [--streams 3] [--tokens 80]` starts a fleet
of its own with two instances of one model, keeps that many greedy streams running, and kills the engine of a stream of
which its client has some tokens, once every instance is back from the kill before. A stream is broken when it ends
without its end (`[DONE]`); a text differs from that of the same prompt before the first kill. How far texts differ
without any kill is measured first, by the same load: engines that compute several requests at once round otherwise than
for one, and where two tokens are nearly as likely the other may win. vLLM computes in float32, where that hardly
happens; llama.cpp's weights here have 4 bits. Texts of the emulated engine are made up.
"""

import argparse
import asyncio
import json
import os
import signal
import statistics
import tempfile
import time
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import httpx

from tests.fleet_runner import Fleet

MODELS = {
    "llamacpp": "weights: sample:smollm2\nkv_bytes: 140MiB\ncontext_tokens: 1024\nmax_concurrency: 4\n",
    "vllm": "weights: sample:smollm2-hf\nkv_bytes: 200MiB\ncontext_tokens: 1024\nmax_concurrency: 4\n"
    "engine_args: {dtype: float32}\n",
    "emulated": 'weights_bytes: 1GiB\nkv_bytes: 1GiB\nmax_concurrency: 64\nengine_args: {profile: "llama-2-7b/h800"}\n',
}
MODEL = "name: kept\nengine: {engine}\nkeep_alive_s: -1\nmin_instances: 2\nmax_instances: 2\nmax_wait_s: 120\n"
PROMPTS = (
    "Tell me about the sea.", "Write a short story about a lighthouse.", "Explain why leaves are green.",
    "List five uses of a rope.", "What is a river delta?", "Describe a quiet morning in a village.",
)  # fmt: skip
READY_S = 120.0
COUNTER = "glowplug_stream_continuations_total"
BOUND = 3  # GLOWPLUG_MAX_CONTINUATIONS as it is by default: no stream is hit more often


@dataclass
class Told:
    """One stream as its client saw it."""

    prompt: str
    request_id: str
    text: str = ""
    end: str = "truncated"
    widest_gap_s: float = 0.0


@dataclass
class Run:
    """Every stream of one load."""

    streams: list[Told] = field(default_factory=list)
    num_killed: int = 0
    hits: Counter[str] = field(default_factory=Counter)  # by request: kills while it ran there
    is_over: bool = False


async def stream(client: httpx.AsyncClient, prompt: str, request_id: str, num_tokens: int) -> Told:
    told = Told(prompt, request_id)
    messages = [{"role": "user", "content": prompt}]
    body = {"model": "kept", "stream": True, "temperature": 0, "max_tokens": num_tokens, "messages": messages}
    last = 0.0
    try:
        headers = {"x-request-id": request_id}
        async with client.stream("POST", "/v1/chat/completions", json=body, headers=headers) as answer:
            async for line in answer.aiter_lines():
                if line == "data: [DONE]":
                    told.end = "done"
                elif line.startswith("data: {"):
                    event = json.loads(line[6:])
                    if "error" in event:
                        told.end = "error event: " + str(event["error"].get("message"))[:150]
                        continue
                    now = time.monotonic()
                    told.widest_gap_s, last = max(told.widest_gap_s, now - (last or now)), now
                    told.text += "".join(choice["delta"].get("content") or "" for choice in event["choices"])
    except httpx.HTTPError as error:
        told.end = f"connection lost: {error!r}"
    return told


async def keep_asking(client: httpx.AsyncClient, run: Run, name: str, num_tokens: int) -> None:
    for number in count():
        if run.is_over:
            return
        prompt = PROMPTS[number % len(PROMPTS)]
        run.streams.append(await stream(client, prompt, f"{name}-{number}", num_tokens))


def engine_pids(fleet: Fleet) -> dict[str, int]:
    """instance_id -> process, as the agents of both nodes remember it."""
    found: dict[str, int] = {}
    for memory in fleet.state_dir.rglob("agent.json"):
        found |= {name: handle["pid"] for name, handle in json.loads(memory.read_bytes())["handles"].items()}
    return found


async def until_ready(fleet: Fleet) -> None:
    deadline = time.monotonic() + READY_S
    while sum(i["state"] == "ready" for i in fleet.instances("kept")) < 2:
        if time.monotonic() > deadline:
            raise TimeoutError(f"two instances are not ready: {fleet.instances('kept')}")
        await asyncio.sleep(0.2)


async def kill_again_and_again(fleet: Fleet, run: Run, num_kills: int, tokens_first: int) -> None:
    requests = fleet.process("router")["url"] + "/v1/requests"
    async with httpx.AsyncClient(headers=fleet.admin) as admin:
        while run.num_killed < num_kills:
            await until_ready(fleet)
            rows = (await admin.get(requests, params={"limit": 50})).json()["data"]
            streams = defaultdict[str, list[dict[str, Any]]](list)
            for one in rows:
                if one["state"] == "streaming":
                    streams[one["instance_id"]].append(one)
            pids = engine_pids(fleet)
            for victim in {i["instance_id"] for i in fleet.instances("kept") if i["state"] == "ready"} & pids.keys():
                here = streams[victim]
                most = max((run.hits[one["request_id"]] for one in here), default=BOUND)
                if most < BOUND and any(one["response_tokens"] > tokens_first for one in here):
                    os.kill(pids[victim], signal.SIGKILL)
                    run.num_killed += 1
                    run.hits.update(one["request_id"] for one in here)
                    await asyncio.sleep(0.5)
                    break
            await asyncio.sleep(0.1)
    run.is_over = True


async def load(fleet: Fleet, args: argparse.Namespace, num_kills: int, seconds: float = 0.0) -> Run:
    """Streams until so many kills, or for so long."""
    run = Run()
    async with httpx.AsyncClient(base_url=fleet.url("data"), timeout=180) as client:
        names = [f"{'kill' if num_kills else 'calm'}-{n}" for n in range(args.streams)]
        asking = [asyncio.create_task(keep_asking(client, run, name, args.tokens)) for name in names]
        if num_kills:
            killing = asyncio.create_task(kill_again_and_again(fleet, run, num_kills, args.tokens // 10))
            await asyncio.wait([killing, *asking], return_when=asyncio.FIRST_COMPLETED)
            run.is_over = True
            await killing
        else:
            await asyncio.sleep(seconds)
            run.is_over = True
        await asyncio.gather(*asking)
    return run


def differing(streams: list[Told], texts: dict[str, str]) -> int:
    return sum(told.end == "done" and told.text != texts[told.prompt] for told in streams)


async def measure(fleet: Fleet, args: argparse.Namespace) -> None:
    await until_ready(fleet)
    async with httpx.AsyncClient(base_url=fleet.url("data"), timeout=180) as client:
        alone = [await stream(client, prompt, f"alone-{n}", args.tokens) for n, prompt in enumerate(PROMPTS)]
    texts = {told.prompt: told.text for told in alone}
    began = time.monotonic()
    control = await load(fleet, args, 0, args.control_s)
    print(f"| without a kill | {row(control.streams, texts)} |", flush=True)
    run = await load(fleet, args, args.kills)
    async with httpx.AsyncClient(headers=fleet.admin) as admin:
        url = fleet.process("router")["url"] + "/v1/requests"
        rows = (await admin.get(url, params={"limit": 10_000})).json()["data"]
    times = {one["request_id"]: one.get("num_continued", 0) for one in rows}
    hit = [told for told in run.streams if times.get(told.request_id)]
    others = [told for told in run.streams if not times.get(told.request_id)]
    print(f"| beside kills, untouched | {row(others, texts)} |")
    print(f"| their engine killed | {row(hit, texts)} |")
    how_often = Counter(times[told.request_id] for told in hit)
    print(
        f"\n{run.num_killed} kills in {time.monotonic() - began:.0f} s; streams by times continued: {dict(how_often)}"
    )
    if hit:
        gaps = sorted(told.widest_gap_s for told in hit)
        print(f"widest gap between two events of a continued stream: median {statistics.median(gaps):.2f} s, "
              f"most {gaps[-1]:.2f} s")  # fmt: skip
    async with httpx.AsyncClient() as admin:
        metrics = (await admin.get(fleet.process("router")["url"] + "/metrics")).text
    print(*(line for line in metrics.splitlines() if line.startswith(COUNTER + "{")), sep="\n")
    for told in control.streams + run.streams:
        if told.end != "done":
            print(f"broken: {told.request_id}: {told.end}")
        elif told.text != texts[told.prompt]:
            print(f"differs: {told.request_id}: {where(told.text, texts[told.prompt])}")


def where(text: str, alone: str) -> str:
    """Where a text differs from that of the same prompt alone."""
    at = next((i for i, (one, other) in enumerate(zip(text, alone, strict=False)) if one != other), len(text))
    return (
        f"behind {at} characters ({alone[max(at - 30, 0) : at]!r}): {alone[at:][:12]!r} alone, {text[at:][:12]!r} here"
    )


def row(streams: list[Told], texts: dict[str, str]) -> str:
    num_broken = sum(told.end != "done" for told in streams)
    return f"{len(streams)} | {num_broken} | {differing(streams, texts)}"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--engine", choices=sorted(MODELS), default="llamacpp")
    parser.add_argument("--streams", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=80)
    parser.add_argument("--control-s", type=float, default=30.0)
    return parser.parse_args()


def main() -> None:
    args = arguments()
    env: dict[str, Any] = {"GLOWPLUG_REQUESTS_KEPT": "10000"}
    with tempfile.TemporaryDirectory(prefix="glowplug-continuation-") as folder:
        model = MODEL.format(engine=args.engine) + MODELS[args.engine]
        with Fleet.start(Path(folder), {"kept": model}, engine=args.engine, nodes=2, **env) as fleet:
            load_now = os.getloadavg()[0]
            print(f"{args.engine}, {os.cpu_count()} cores, load {load_now:.1f}; {args.streams} streams at once\n")
            print("| streams | number | broken | text differs from one alone |")
            print("|---|---|---|---|")
            asyncio.run(measure(fleet, args))


if __name__ == "__main__":
    main()
