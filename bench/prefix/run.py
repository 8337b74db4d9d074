"""Compare routing by prefixes with other policies, simulated: cached tokens, time to first token and throughput.

    python bench/prefix/run.py [--cases mooncake chats apart slots ...] [--seeds 3] [--policies round_robin ...]

Instances of qwen2.5-7b on A100 (step costs as measured), whose engines keep blocks of 512 tokens of the prompts they
have read. `mooncake`: the first 20 minutes of the shared conversation trace with its own blocks, three times as fast as
recorded. `chats`: conversations of several turns; the prompt of each turn includes all turns before it; no policy was
tuned on the seed. `apart`: prompts that never repeat. `slots`, `slots_full`, `slots_apart`: engines of four slots that
keep one sequence in each, as llama.cpp does, with chats that take some of them or nearly all, and with prompts that
never repeat. All policies see the same requests; the figures are means over the seeds.
"""

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from statistics import fmean
from typing import Any

from bench.measured.data import data_option, markdown, write_data
from glowplug_lab.simulator.results import Results
from glowplug_lab.simulator.scenario.load import load_tree
from glowplug_lab.simulator.workload.arrival import Arrival
from glowplug_lab.simulator.world import World

POLICIES = ("round_robin", "least_loaded", "sticky", "llmd_like", "preserve_load_aware", "prefix", "union")
BLOCK_TOKENS = 512
TURN_S, MOST_TURNS = 30.0, 12
OURS = ("prefix", "union")


@dataclass(frozen=True)
class Row:
    """The figures of one workload under one policy, simulated."""

    case: str
    policy: str
    cached_ratio: float
    ttft_s_mean: float
    ttft_s_p95: float
    e2e_s_mean: float
    tokens_per_s: float
    of_best_other: float  # mean TTFT over that of the best policy that is not ours


def scenario(policy: str, how: "Case") -> dict[str, Any]:
    num_gpus = how.num_gpus
    return {
        "seconds": how.seconds,
        "drain_s": 0,
        "servers": [
            {
                "name": "node", "num_servers": 1, "num_gpus": num_gpus, "gpu_bytes": "80GB", "gpu_kind": how.gpu_kind,
                "weights_in_host": True, "host_cache_bytes": "64GB",
            }
        ],
        "models": [
            {
                "name": "m", "engine": how.engine, "weights_bytes": "15.2GB", "kv_bytes": "56GB",
                "kv_bytes_per_token": 57344, "costs": "qwen2.5-7b", "keep_alive_s": -1,
                "min_instances": num_gpus, "max_instances": num_gpus,
                "preload": True, "max_concurrency": how.slots, "context_tokens": 131072,
                "max_wait_s": 600, "max_queue": 10000,
            }
        ],
        "params": {"block_tokens": BLOCK_TOKENS, "router": {"balancer": {"block_tokens": BLOCK_TOKENS}}},
        "policies": {"routing": policy, "scaling": "static"},
        "workload": {"source": "mooncake_conversation", "squeeze": how.rate},
    }  # fmt: skip


def chats(seconds: float, rps: float, seed: int, mean_s: float = TURN_S) -> Iterator[Arrival]:
    """Conversations that begin with one of four system prompts and grow by a question and an answer each turn."""
    chance = Random(f"chats {seed}")
    made: list[Arrival] = []
    at_s, block = 0.0, 1_000_000
    systems = [tuple(range(n * 100, n * 100 + 4)) for n in range(4)]
    while at_s < seconds:
        at_s += chance.expovariate(rps / ((1 + MOST_TURNS) / 2))
        prefix, tokens, turn_s = chance.choice(systems), 4 * BLOCK_TOKENS, at_s
        for _ in range(chance.randint(1, MOST_TURNS)):
            tokens += int(chance.lognormvariate(5.5, 1.0)) + 1
            while len(prefix) < tokens // BLOCK_TOKENS:
                prefix, block = (*prefix, block), block + 1
            answer = int(chance.lognormvariate(5.3, 0.7)) + 1
            if turn_s < seconds:
                made.append(Arrival(turn_s, "m", tokens, answer, prefix=prefix))
            tokens += answer
            turn_s += chance.expovariate(1 / mean_s)
    return iter(sorted(made))


def apart(seconds: float, rps: float, seed: int, mean_s: float = TURN_S) -> Iterator[Arrival]:
    """Requests of the same lengths, no two prompts alike."""
    for number, one in enumerate(chats(seconds, rps, seed, mean_s)):
        yield one._replace(prefix=tuple(number * 1000 + n for n in range(len(one.prefix))))


@dataclass(frozen=True)
class Case:
    """A workload on a number of GPUs of one kind. `rate`: requests a second, or the speed-up of a replayed trace."""

    seconds: float
    num_gpus: int
    gpu_kind: str
    rate: float
    make: Callable[[float, float, int, float], Iterator[Arrival]] | None = None
    engine: str = "emulated"
    slots: int = 64  # requests that an instance runs at once
    turn_s: float = TURN_S  # mean, between two turns


CASES = {
    "mooncake": Case(400.0, 4, "h100", 3.0),
    "chats": Case(400.0, 4, "a100", 8.0, chats),
    "apart": Case(400.0, 4, "a100", 5.0, apart),
    "slots": Case(400.0, 4, "a100", 1.5, chats, "llamacpp", 4, 5.0),
    "slots_full": Case(400.0, 4, "a100", 2.5, chats, "llamacpp", 4, 5.0),
    "slots_apart": Case(400.0, 4, "a100", 1.5, apart, "llamacpp", 4, 5.0),
}


def run(how: Case, policy: str, seed: int) -> Results:
    made = load_tree(scenario(policy, how), Path.cwd())
    arrivals = how.make(how.seconds, how.rate, seed, how.turn_s) if how.make else made.arrivals(seed)
    return World(made.setup, arrivals).run(how.seconds, drain_s=120.0)


def rows_of(case: str, policies: Sequence[str], seeds: range) -> list[Row]:
    found = {policy: [run(CASES[case], policy, seed).total() for seed in seeds] for policy in policies}
    mean_s = {policy: fmean(one.ttft.mean for one in totals) for policy, totals in found.items()}
    best_s = min((mean_s[policy] for policy in policies if policy not in OURS), default=float("nan"))
    return [
        Row(
            case,
            policy,
            fmean(one.cached_tokens / max(1, one.prompt_tokens) for one in totals),
            mean_s[policy],
            fmean(one.ttft.at(0.95) for one in totals),
            fmean(one.e2e.mean for one in totals),
            fmean((one.prompt_tokens + one.response_tokens) / CASES[case].seconds for one in totals),
            mean_s[policy] / best_s,
        )
        for policy, totals in found.items()
    ]


def table(rows: Sequence[Row]) -> str:
    head = ("simulated", "routing", "cached", "TTFT mean s", "of best other", "p95 s", "E2E mean s", "tokens/s")
    return markdown(
        head,
        (
            (
                row.case, row.policy, f"{row.cached_ratio:.1%}", f"{row.ttft_s_mean:.3f}", f"{row.of_best_other:.2f}",
                f"{row.ttft_s_p95:.3f}", f"{row.e2e_s_mean:.2f}", f"{row.tokens_per_s:.0f}",
            )
            for row in rows
        ),
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--policies", nargs="+", default=POLICIES)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first-seed", type=int, default=1)
    data_option(parser)
    args = parser.parse_args()
    seeds = range(args.first_seed, args.first_seed + args.seeds)
    rows = [row for case in args.cases for row in rows_of(case, args.policies, seeds)]
    print(table(rows))
    write_data(args.json, {f"{row.case}, {row.policy}": [row.cached_ratio, row.ttft_s_mean] for row in rows})


if __name__ == "__main__":
    main()
