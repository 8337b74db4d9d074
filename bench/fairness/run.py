"""Measure how a tenant with few requests fares beside others at one model, by fairness policy, in the simulator.

    python bench/fairness/run.py [--seconds 300] [--seeds 5] [--slots 8] [--policies fifo vtc ...]

One instance of a 7B model on an A10 (costs as measured). Each case runs the light tenant alone, then beside the other
one under each policy, the same requests each time; the figures are means over the seeds. `x alone`: p95 of the time to
the first token over that of the light tenant alone. Jain's index is over each tenant's weighted tokens served (1 for
each of a prompt, 2 for each of an answer) divided by those it asked for, so that 1 means that all had the same share of
their demand. Tokens a second count prompts and answers of all finished requests; `of fifo` compares them.

The engine chunks prefill as vLLM does by default: 2,048 tokens a step, of one prompt if it is the first. `threshold`:
with vLLM's `long_prefill_token_threshold`, the most tokens that a prompt has of a step beside others.
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from bench.measured.data import data_option, markdown, write_data
from glowplug_lab.simulator.results import Results
from glowplug_lab.simulator.scenario.load import load_tree
from glowplug_lab.simulator.world import World

LIGHT = "light"
NO_RECALLS = "vtc:most_recalls=0:unread_tokens=0"
POLICIES = ("fifo", "vtc", NO_RECALLS)


def lengths(prompt: float, response: float) -> dict[str, float]:
    return {"prompt_mean": prompt, "prompt_cv": 0.3, "response_mean": response, "response_cv": 0.5}


def tenant(name: str, rps: float, prompt: float, response: float, **more: Any) -> dict[str, Any]:
    return {"name": name, "workload": {"source": "gamma", "rps": rps, "lengths": lengths(prompt, response)}, **more}


@dataclass(frozen=True)
class Case:
    """A light tenant and the other one."""

    name: str
    light: dict[str, Any]
    other: dict[str, Any]
    threshold: int = 0  # most tokens of one prompt that the engine reads in a step beside others; 0: no limit
    num_gpus: int = 1  # each with an instance
    num_slots: int = 0  # of an instance; 0: as --slots says


SHORT, LONG = tenant(LIGHT, 0.2, 200, 100), tenant("long", 1.5, 5000, 100)
CASES = (
    Case("flood beside light", SHORT, tenant("flood", 8.0, 200, 100)),
    Case("long answers beside light, 4 slots", tenant(LIGHT, 0.5, 50, 20), tenant("flood", 4.0, 100, 800), num_slots=4),
    Case("long prompts beside short", SHORT, LONG),
    Case("long prompts beside short, threshold 512", SHORT, LONG, 512),
    Case("long prompts beside short, threshold 512, four instances", SHORT, LONG, 512, 4),
    Case(
        "batch beside interactive",
        tenant(LIGHT, 1.0, 200, 100, priority="interactive"),
        tenant("batch", 8.0, 200, 100, priority="batch"),
    ),
)


@dataclass(frozen=True)
class Row:
    """The figures of one case under one policy."""

    case: str
    policy: str
    ttft_s_p50: float
    ttft_s_p95: float
    ratio: float  # of p95 to that of the light tenant alone
    jain: float
    tokens_per_s: float
    num_light_refused: float
    num_light: float


def scenario(tenants: Sequence[dict[str, Any]], policy: str, seconds: float, slots: int, case: Case) -> dict[str, Any]:
    return {
        "name": "fairness",
        "seconds": seconds,
        "drain_s": 0,
        "servers": [
            {
                "name": "node", "num_servers": 1, "num_gpus": case.num_gpus, "gpu_bytes": "80GB", "gpu_kind": "a10",
                "weights_in_host": True, "host_cache_bytes": "64GB",
            }
        ],
        "models": [
            {
                "name": "m", "weights_bytes": "12.5GB", "kv_bytes": "40GB", "costs": "llama-2-7b", "keep_alive_s": -1,
                "preload": True, "min_instances": case.num_gpus, "max_instances": case.num_gpus,
                "max_concurrency": case.num_slots or slots, "context_tokens": 16384, "max_wait_s": 60,
            }
        ],
        "params": {"chunk_tokens": 2048, "long_prefill_tokens": case.threshold},
        "policies": {"routing": "union", "fairness": policy},
        "workload": {"source": "gamma", "lengths": lengths(200, 100), "tenants": list(tenants)},
    }  # fmt: skip


def run(tree: dict[str, Any], seed: int) -> Results:
    made = load_tree(tree, Path.cwd())
    return World(made.setup, made.arrivals(seed)).run(made.seconds, drain_s=0.0)


def jain(shares: Sequence[float]) -> float:
    """Jain's index (Jain, Chiu, Hawe 1984): 1 if all are equal, 1/n if one has everything."""
    squares = sum(share * share for share in shares)
    return sum(shares) ** 2 / (len(shares) * squares) if squares else 1.0


def served(results: Results, asked: dict[str, int]) -> list[float]:
    """Each tenant's weighted tokens served, over those that it asked for."""
    return [(one.prompt_tokens + 2 * one.response_tokens) / asked[name] for name, one in results.by_tenant.items()]


def demand(tree: dict[str, Any], seed: int) -> dict[str, int]:
    asked: dict[str, int] = {}
    for one in load_tree(tree, Path.cwd()).arrivals(seed):
        asked[one.tenant] = asked.get(one.tenant, 0) + one.prompt_tokens + 2 * one.response_tokens
    return asked


def rows_of(case: Case, seconds: float, seeds: range, slots: int, policies: Sequence[str] = POLICIES) -> list[Row]:
    alone = [run(scenario([case.light], "fifo", seconds, slots, case), seed) for seed in seeds]
    alone_s = fmean(one.by_tenant[LIGHT].ttft.at(0.95) for one in alone)
    rows = [_row(case.name, "alone", alone, [1.0] * len(alone), alone_s)]
    for policy in policies:
        tree = scenario([case.light, case.other], policy, seconds, slots, case)
        found = [run(tree, seed) for seed in seeds]
        index = [jain(served(one, demand(tree, seed))) for one, seed in zip(found, seeds, strict=True)]
        rows.append(_row(case.name, policy, found, index, alone_s))
    return rows


def _row(case: str, policy: str, found: Sequence[Results], index: Sequence[float], alone_s: float) -> Row:
    light, totals = [one.by_tenant[LIGHT] for one in found], [one.total() for one in found]
    p95_s = fmean(one.ttft.at(0.95) for one in light)
    return Row(
        case,
        policy,
        fmean(one.ttft.at(0.5) for one in light),
        p95_s,
        p95_s / alone_s,
        fmean(index),
        fmean((one.prompt_tokens + one.response_tokens) / run.seconds for one, run in zip(totals, found, strict=True)),
        fmean(one.num_refused.total() for one in light),
        fmean(one.num_arrived for one in light),
    )


def table(rows: Sequence[Row]) -> str:
    head = (
        "simulated case", "policy", "light TTFT p50 s", "p95 s", "x alone", "light refused", "Jain", "tokens/s",
        "of fifo",
    )  # fmt: skip
    fifo = {row.case: row.tokens_per_s for row in rows if row.policy == "fifo"}
    return markdown(
        head,
        (
            (
                row.case, row.policy, f"{row.ttft_s_p50:.3f}", f"{row.ttft_s_p95:.3f}", f"{row.ratio:.2f}",
                f"{row.num_light_refused:.0f} of {row.num_light:.0f}", f"{row.jain:.2f}", f"{row.tokens_per_s:.0f}",
                f"{row.tokens_per_s / fifo[row.case]:.2f}" if row.case in fifo and row.policy != "alone" else "",
            )
            for row in rows
        ),
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--slots", type=int, default=8)
    parser.add_argument("--policies", nargs="+", default=list(POLICIES))
    parser.add_argument("--cases", nargs="+", default=[], metavar="WORD", help="the first words of their names")
    data_option(parser)
    asked = parser.parse_args()
    cases = [case for case in CASES if not asked.cases or case.name.startswith(tuple(asked.cases))]
    seeds = range(asked.seeds)
    rows = [row for case in cases for row in rows_of(case, asked.seconds, seeds, asked.slots, asked.policies)]
    print(table(rows))
    write_data(asked.json, {f"{row.case}, {row.policy}": [row.ttft_s_p95, row.ratio, row.jain] for row in rows})


if __name__ == "__main__":
    main()
