"""Measure the cost of a choice by prefix: seconds and memory, with many instances and many tracked blocks.

    python bench/prefix/decision.py [--instances 1000] [--blocks 100000] [--choices 5000]

Conversations of 5 to 60 blocks go to instances that answer at once, until `--blocks` are tracked; then each choice is
timed alone, in seconds of CPU. Real code, no engine behind it.
"""

import argparse
import time
import tracemalloc
from random import Random

from bench.measured.data import data_option, write_data
from glowplug.domain.snapshot import Target
from glowplug.policies.routing.port import BalancerParams
from glowplug.policies.routing.prefix import PrefixAware, union


def filled(num_instances: int, num_blocks: int, chance: Random) -> tuple[PrefixAware, list[tuple[int, ...]]]:
    made = union(BalancerParams(most_blocks=num_blocks))
    assert isinstance(made, PrefixAware)
    for number in range(num_instances):
        made.put(Target(f"i{number:04}", 0, 64, 400_000), 0.0)
    prompts: list[tuple[int, ...]] = []
    block, ticket = 1 << 40, 0
    while len(made.index) < 0.95 * num_blocks:
        length, ticket = chance.randint(5, 60), ticket + 1
        prompt = (1, 2, *range(block, block + length))
        block += length
        prompts.append(prompt)
        here = made.choose(64 * len(prompt), 200, 0.0, prompt).instance_id
        made.sent(ticket, here, 64 * len(prompt), 200, 0.0, prompt)
        if ticket % 4:
            made.ended(ticket, 200, 0.0)
    return made, prompts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--instances", type=int, default=1000)
    parser.add_argument("--blocks", type=int, default=100_000)
    parser.add_argument("--choices", type=int, default=5000)
    data_option(parser)
    args = parser.parse_args()
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    made, prompts = filled(args.instances, args.blocks, Random(1))
    held = made.index
    num_bytes = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    chance, took = Random(2), []
    for ticket in range(1 << 20, (1 << 20) + args.choices):
        prompt = (*chance.choice(prompts), ticket)
        began = time.thread_time()
        chosen = made.choose(64 * len(prompt), 200, 1.0, prompt).instance_id
        took.append(time.thread_time() - began)
        made.sent(ticket, chosen, 64 * len(prompt), 200, 1.0, prompt)
        made.ended(ticket, 200, 1.0)
    took.sort()
    p50, p99 = took[len(took) // 2], took[int(0.99 * len(took))]
    print(
        f"{args.instances} instances, {len(held)} blocks: {num_bytes / len(held):.0f} bytes a block with its instance"
    )
    print(f"a choice: p50 {p50 * 1e6:.0f} us, p99 {p99 * 1e6:.0f} us of {len(took)}")
    write_data(args.json, {"p50_s": p50, "p99_s": p99, "bytes_per_block": num_bytes / len(held)})


if __name__ == "__main__":
    main()
