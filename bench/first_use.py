"""Measure how long a person waits who starts a fleet and asks a sample model, and the memory of the fleet.

    python -m bench.first_use [--rounds 3] [--warm 5] [--model NAME] [--json FILE]

Each round starts `glowplug up --detach` with its defaults (llama.cpp, three nodes, the sample models) on free ports and
in a state directory of its own, asks one sleeping sample model and then the same model again, and sums the memory of
the fleet's processes as `glowplug status` does, without engines: private memory, and each process's part of shared
memory. A request's seconds run from sending it to its first text.
"""

import argparse
import json
import subprocess
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any, Final

import httpx

from bench.measured.data import data_option, markdown, markdown_row, write_data
from bench.measured.fleet import GLOWPLUG, WAIT_S, Live, fleet
from bench.measured.load import load_now
from bench.measured.stream import text_of

PROMPT: Final = "Why is the sky blue?"
NUM_TOKENS: Final = 16
MIB: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class Round:
    """The figures of one fleet. Seconds, bytes."""

    ready_s: float  # from `glowplug up --detach` until it returns
    cold_first_token_s: float
    warm_first_token_s: list[float]
    fleet_memory_bytes: int
    load: float  # load average before the round


def first_token(url: str, model: str) -> float:
    """Seconds from a request to its first text; the answer is read to its end. Raises RuntimeError if none comes."""
    body: dict[str, Any] = {
        "model": model,
        "messages": [{"role": "user", "content": PROMPT}],
        "max_tokens": NUM_TOKENS,
        "stream": True,
    }
    began, took_s = time.monotonic(), 0.0
    with httpx.stream("POST", f"{url}/v1/chat/completions", json=body, timeout=WAIT_S, trust_env=False) as answer:
        for line in answer.iter_lines():
            if not took_s and text_of(line):
                took_s = time.monotonic() - began
    if not took_s:
        raise RuntimeError(f"{model} answered {answer.status_code} without text")
    return took_s


def memory_bytes(live: Live) -> int:
    """Memory of the fleet's processes without engines, as `glowplug status` counts it."""
    done = subprocess.run([*GLOWPLUG, "status", "-o", "json"], env=dict(live.env), capture_output=True, check=True)
    return int(json.loads(done.stdout)["memory_bytes"])


def one_round(model: str, num_warm: int) -> Round:
    """Measure one fleet from its start to its end."""
    load, began = load_now(), time.monotonic()
    with fleet("--port-base", "0", settings={}) as live:
        ready_s, url = time.monotonic() - began, live.urls["data"]
        cold_s = first_token(url, model)
        warm_s = [first_token(url, model) for _ in range(num_warm)]
        return Round(ready_s, cold_s, warm_s, memory_bytes(live), load)


def shown(number: int, one: Round) -> str:
    warm = f"{median(one.warm_first_token_s):.3f} ({max(one.warm_first_token_s):.3f})"
    memory = f"{one.fleet_memory_bytes / MIB:.0f}"
    return markdown_row(number, f"{one.ready_s:.1f}", f"{one.cold_first_token_s:.2f}", warm, memory, f"{one.load:.1f}")


def as_data(rounds: Sequence[Round]) -> dict[str, object]:
    return {"rounds": [asdict(one) for one in rounds]}


def main() -> None:
    """Measure, print a row per round, and write the data to `--json`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--warm", type=int, default=5, help="requests of each round after the first")
    parser.add_argument("--model", default="smol-brief", help="the sample model to ask")
    data_option(parser)
    args = parser.parse_args()
    head = ("round", "ready, s", "cold, first token, s", "warm, median (worst)", "memory without engines, MiB", "load")
    print(markdown(head), flush=True)
    rounds = []
    for number in range(1, args.rounds + 1):
        rounds.append(one_round(args.model, args.warm))
        print(shown(number, rounds[-1]), flush=True)
    write_data(args.json, as_data(rounds))


if __name__ == "__main__":
    main()
