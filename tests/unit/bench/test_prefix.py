"""bench/prefix on engines with slots (llama.cpp): two minutes of its cases. Fast lane, some six seconds."""

from dataclasses import replace
from statistics import fmean

import pytest

from bench.prefix.run import CASES, run


def figures(case: str, policy: str) -> tuple[float, float]:
    """Mean TTFT (s) and cached share of prompts, over two seeds."""
    totals = [run(replace(CASES[case], seconds=120.0), policy, seed).total() for seed in (1, 2)]
    return fmean(one.ttft.mean for one in totals), fmean(one.cached_tokens / one.prompt_tokens for one in totals)


@pytest.mark.parametrize(("case", "most"), [("slots", 0.85), ("slots_full", 1.0), ("slots_apart", 1.0)])
def test_the_default_gains_where_a_slot_still_holds_a_prompt_and_loses_nothing_elsewhere(
    case: str, most: float
) -> None:
    (other_s, _), (ttft_s, cached) = figures(case, "least_loaded"), figures(case, "union")
    assert ttft_s <= most * other_s
    assert (cached > 0) == (case != "slots_apart")
