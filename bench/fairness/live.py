"""A light tenant's time to the first token alone, and beside a flood, long prompts and batch, on a real fleet.

    python bench/fairness/live.py [--engine emulated | llamacpp] [--seconds 40] [--policies vtc fifo]

A fleet of its own with one model of four slots and a key for each tenant; every process is real. With `emulated`
engines (the default) the times inside the engine are modelled, those of llama 2 7B on an A100; the table says so. With
`llamacpp` the sample model answers on one thread of this machine. Each case asks as the light tenant alone, then again
while the other tenant keeps `--others` streams open. `x alone`: p95 over p95. Needs no GPU.
"""

import argparse
import asyncio
import contextlib
import subprocess
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Final

import httpx

from bench.measured.data import data_option, markdown, write_data
from bench.measured.fleet import GLOWPLUG, Live, at, fleet, write_weights

WAIT_S: Final = 60.0
EMULATED: Final = """
name: shared
engine: emulated
weights_bytes: 1GB
kv_bytes: 16GiB
context_tokens: 16384
max_concurrency: 4
max_instances: 1
keep_alive_s: 600s
max_wait_s: 60s
engine_args: {profile: llama-2-7b/a100}
"""
LLAMACPP: Final = """
name: shared
engine: llamacpp
weights: {uri: "file://PATH", sha256: SHA256}
kv_bytes: 140MiB
context_tokens: 2048
max_concurrency: 4
max_instances: 1
keep_alive_s: 600s
max_wait_s: 60s
engine_args: {n_threads: 1}
"""


@dataclass(frozen=True, slots=True)
class Load:
    """Streams of one key. Words of the prompts, most tokens of the answers."""

    tenant: str
    num_words: int
    max_tokens: int


@dataclass(frozen=True, slots=True)
class Row:
    """The light tenant's figures in one case, and the other tenant's streams that ended meanwhile."""

    policy: str
    case: str
    p50_s: float
    p95_s: float
    ratio: float
    num_light: int
    num_others: int


def key_of(live: Live, tenant: str, *options: str) -> str:
    """Make a tenant and return a key of it."""
    for command in (
        ("tenants", "put", tenant, *options),
        ("keys", "create", "--tenant", tenant, "--name", tenant, "--models", "*"),
    ):
        done = subprocess.run([*GLOWPLUG, *command], env=live.env, check=True, capture_output=True, text=True)
    return done.stdout.strip()


async def first_token_s(http: httpx.AsyncClient, key: str, load: Load, chance: Random) -> float:
    """Stream one answer to its end. Return the seconds to its first token; nan if it failed."""
    words = " ".join(chance.choice(("river", "stone", "lamp", "garden")) for _ in range(load.num_words))
    body = {"model": "shared", "prompt": words, "max_tokens": load.max_tokens, "stream": True}
    began, first = time.monotonic(), float("nan")
    headers = {"Authorization": f"Bearer {key}"}
    async with http.stream("POST", "/v1/completions", json=body, headers=headers) as answer:
        async for line in answer.aiter_lines():
            if first != first and line.startswith("data: {"):
                first = time.monotonic() - began
    return first if answer.status_code == httpx.codes.OK else float("nan")


async def keep_open(http: httpx.AsyncClient, key: str, load: Load, ended: list[float], seed: int) -> None:
    """Ask again whenever an answer ends."""
    chance = Random(seed)
    while True:
        ended.append(await first_token_s(http, key, load, chance))


async def light_beside(
    live: Live, light: tuple[str, Load], other: tuple[str, Load] | None, num_others: int, seconds: float
) -> tuple[list[float], int]:
    """Ask as the light tenant about once a second. Returns its times, and how many streams of the other one ended."""
    chance, times, ended = Random(0), list[float](), list[float]()
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=live.urls["data"], timeout=WAIT_S, limits=limits) as http:
        tasks = [asyncio.create_task(keep_open(http, *other, ended, n)) for n in range(num_others)] if other else []
        until = time.monotonic() + seconds
        await asyncio.sleep(2.0)
        while time.monotonic() < until:
            times.append(await first_token_s(http, *light, chance))
            await asyncio.sleep(chance.expovariate(1.0))
        for task in tasks:
            task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.gather(*tasks)
    return [one for one in times if one == one], len(ended)


def rows_of(live: Live, policy: str, num_others: int, seconds: float, sizes: tuple[int, int, int]) -> list[Row]:
    """All cases of one policy. `sizes`: words of a short and of a long prompt, tokens of an answer."""
    short, long, answer = sizes
    cases = {
        "flood": ((), Load("flood", short, answer)),
        "long prompts": ((), Load("long", long, answer)),
        "batch": (("--priority", "batch"), Load("batch", short, answer)),
    }
    light = key_of(live, "light"), Load("light", short, answer // 4)
    asyncio.run(light_beside(live, light, None, 0, 3.0))  # the model's start
    alone, _ = asyncio.run(light_beside(live, light, None, 0, seconds))
    rows = [Row(policy, "alone", at(alone, 0.5), at(alone, 0.95), 1.0, len(alone), 0)]
    for name, (options, load) in cases.items():
        other = key_of(live, load.tenant, *options), load
        found, ended = asyncio.run(light_beside(live, light, other, num_others, seconds))
        p50_s, p95_s = at(found, 0.5), at(found, 0.95)
        rows.append(Row(policy, f"beside {name}", p50_s, p95_s, p95_s / at(alone, 0.95), len(found), ended))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=("emulated", "llamacpp"), default="emulated")
    parser.add_argument("--seconds", type=float, default=40.0)
    parser.add_argument("--others", type=int, default=12, help="streams that the other tenant keeps open")
    parser.add_argument("--policies", nargs="+", default=["vtc", "fifo"])
    data_option(parser)
    asked = parser.parse_args()
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="glowplug-fairness-") as folder:
        text, sizes = EMULATED, (150, 5000, 100)
        if asked.engine == "llamacpp":
            path = Path(folder, "m.gguf")
            text = LLAMACPP.replace("SHA256", write_weights(path, 0)).replace("PATH", str(path))
            sizes = (30, 700, 60)
        models = Path(folder, "models")
        models.mkdir()
        (models / "shared.yaml").write_text(text)
        for policy in asked.policies:
            settings = {"GLOWPLUG_MODELS_DIR": str(models), "GLOWPLUG_POLICY_FAIRNESS": policy}
            with fleet("--engine", asked.engine, "--nodes", "1", "--port-base", "0", settings=settings) as live:
                rows += rows_of(live, policy, asked.others, asked.seconds, sizes)
    head = (
        f"{asked.engine} engine, policy",
        "light tenant",
        "TTFT p50 s",
        "p95 s",
        "x alone",
        "requests",
        "others ended",
    )
    cells = (
        (
            row.policy,
            row.case,
            f"{row.p50_s:.3f}",
            f"{row.p95_s:.3f}",
            f"{row.ratio:.2f}",
            row.num_light,
            row.num_others,
        )
        for row in rows
    )
    print(markdown(head, cells))
    write_data(asked.json, {f"{row.policy}, {row.case}": [row.p50_s, row.p95_s, row.ratio] for row in rows})


if __name__ == "__main__":
    main()
