"""Routing by prefixes live, on real llama.cpp: conversations of several turns over two instances of SmolLM2.

    python bench/prefix/live.py [--policies least_loaded union] [--rounds 2] [--chats 6] [--think-s 12] [--shared]

Each round starts a fleet for each policy in turns. The conversations run beside one another; each begins with a system
prompt of about 300 tokens (its own, or with `--shared` the same for all) and waits between its turns. Each instance has
two slots, and llama.cpp keeps the last sequence of each. Prints, for all turns but the first, the share of prompt
tokens that engines had cached, by their own counts; the mean time to the first token; and how many went to the instance
of the turn before. Prints the load average, too.
"""

import argparse
import asyncio
import contextlib
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from random import Random
from statistics import fmean
from typing import Any, Final

import httpx

from bench.measured.data import data_option, markdown, write_data
from bench.measured.fleet import Live, fleet
from bench.measured.load import load_now
from glowplug.engines.samples import sample_weights_path
from tests.waiting import wait_until

NUM_INSTANCES, SLOTS, WAIT_S, ANSWER_TOKENS = 2, 2, 300.0, 16
MODEL: Final = f"""
name: smol
engine: llamacpp
weights: {{{{uri: "file://{{path}}"}}}}
kv_bytes: 96MiB
context_tokens: 2048
max_concurrency: {SLOTS}
min_instances: {NUM_INSTANCES}
max_instances: {NUM_INSTANCES}
max_wait_s: {WAIT_S:.0f}
keep_alive_s: -1
"""
WORDS: Final = ("river", "stone", "garden", "winter", "letter", "music", "engine", "mountain", "bread", "harbor")


@dataclass(frozen=True)
class Turn:
    instance_id: str
    prompt_tokens: int
    cached_tokens: int
    ttft_s: float


@dataclass(frozen=True)
class Row:
    policy: str
    cached_ratio: float
    ttft_s_mean: float
    returned: float
    load: float

    def cells(self) -> tuple[str, ...]:
        shares = f"{self.cached_ratio:.1%}", f"{self.ttft_s_mean:.2f}", f"{self.returned:.0%}"
        return self.policy, *shares, f"{self.load:.1f}"


@contextlib.contextmanager
def two_instances(policy: str) -> Iterator[Live]:
    path = sample_weights_path()
    budget = NUM_INSTANCES * (path.stat().st_size + (96 << 20)) + (64 << 20)
    with tempfile.TemporaryDirectory(prefix="glowplug-bench-models-") as folder:
        (Path(folder) / "smol.yaml").write_text(MODEL.format(path=path), encoding="utf-8")
        settings = {"GLOWPLUG_MODELS_DIR": folder, "GLOWPLUG_GPU_BUDGETS": str(budget)}
        settings |= {"GLOWPLUG_POLICY_ROUTING": policy, "GLOWPLUG_READY_TIMEOUT_S": "240"}
        with fleet("--engine", "llamacpp", "--nodes", "1", "--port-base", "0", settings=settings) as live:
            wait_until("both instances are ready", lambda: num_ready(live) == NUM_INSTANCES)
            yield live


def num_ready(live: Live) -> int:
    rows = httpx.get(live.urls["placer"] + "/v1/instances", headers=dict(live.admin)).json()["data"]
    return sum(row["state"] == "ready" for row in rows)


async def ask(http: httpx.AsyncClient, messages: list[dict[str, str]]) -> Turn:
    """Stream one answer, and add it to the conversation."""
    body = {"model": "smol", "messages": messages, "max_tokens": ANSWER_TOKENS, "temperature": 0, "ignore_eos": True}
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    began, first_at, text, usage = time.monotonic(), 0.0, "", dict[str, Any]()
    async with http.stream("POST", "/v1/chat/completions", json=body) as answer:
        answer.raise_for_status()
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                event = json.loads(line[6:])
                said = "".join(choice["delta"].get("content") or "" for choice in event["choices"])
                first_at, text = first_at or (time.monotonic() if said else 0.0), text + said
                usage = event.get("usage") or usage
        instance_id = answer.headers.get("x-glowplug-instance", "")  # "" if held: its headers came before the choice
    messages.append({"role": "assistant", "content": text})
    cached = int(usage["prompt_tokens_details"]["cached_tokens"])
    return Turn(instance_id, int(usage["prompt_tokens"]), cached, first_at - began)


async def converse(http: httpx.AsyncClient, name: str, args: argparse.Namespace) -> list[Turn]:
    system, chance = Random("all" if args.shared else name), Random(f"turns of {name}")
    messages = [{"role": "system", "content": " ".join(system.choice(WORDS) for _ in range(280))}]
    turns = []
    for _ in range(args.turns):
        await asyncio.sleep(chance.expovariate(1 / args.think_s))
        messages.append({"role": "user", "content": " ".join(chance.choice(WORDS) for _ in range(30))})
        turns.append(await ask(http, messages))
    return turns


async def measure(live: Live, policy: str, args: argparse.Namespace) -> Row:
    load = load_now()
    async with httpx.AsyncClient(base_url=live.urls["data"], timeout=WAIT_S) as http:
        chats = await asyncio.gather(*(converse(http, f"chat {n}", args) for n in range(args.chats)))
    later = [turn for turns in chats for turn in turns[1:]]
    pairs = ((a.instance_id, b.instance_id) for turns in chats for a, b in pairwise(turns))
    returned = [here == there for here, there in pairs if here and there]
    cached = sum(turn.cached_tokens for turn in later) / sum(turn.prompt_tokens for turn in later)
    return Row(policy, cached, fmean(turn.ttft_s for turn in later), fmean(returned or [0.0]), (load + load_now()) / 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policies", nargs="+", default=("least_loaded", "union"))
    for name, default in (("rounds", 2), ("chats", 6), ("turns", 4), ("think-s", 12)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--shared", action="store_true", help="one system prompt for all conversations")
    data_option(parser)
    args, rows = parser.parse_args(), list[Row]()
    for _ in range(args.rounds):
        for policy in args.policies:
            with two_instances(policy) as live:
                rows.append(asyncio.run(measure(live, policy, args)))
            print(rows[-1], file=sys.stderr, flush=True)
    print(markdown(("real llama.cpp, routing", "cached", "TTFT mean s", "returned", "load"), map(Row.cells, rows)))
    write_data(args.json, {"rows": [asdict(row) for row in rows]})


if __name__ == "__main__":
    main()
