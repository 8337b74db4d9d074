"""WarmServe's rows: how seeds are joined, and what MuxServe's groups are taken to be."""

import pytest

from bench.papers import w_mux, w_warm
from bench.papers.experiment import Runs
from glowplug.policies.systems import SYSTEMS


def test_a_ratio_of_p99s_is_that_of_the_means_and_its_range_goes_by_seed() -> None:
    """Section 7.3: a seed whose own P99 happens to be small must not decide."""
    waited = {"WarmServe @25": (1.0, 9.0), "no proactive @25": (6.0, 4.0)}
    runs = Runs({case: {seed: {"ttft_p99": v} for seed, v in enumerate(p99s)} for case, p99s in waited.items()})

    assert w_warm.over(runs, "no proactive", "25") == pytest.approx(1.0)
    assert w_warm._ranges(runs, "no proactive") == "0.44x to 6.00x at 25"


def test_muxserve_fills_two_servers_of_eight_as_section_7_3_tells(monkeypatch: pytest.MonkeyPatch) -> None:
    """Section 7.3: "MuxServe collocates the 7B-0 and 70B models on 8 GPUs"; the others share with nobody."""
    monkeypatch.setattr(w_mux, "lengths", lambda name: ((500, 10), (1500, 10)))
    assert w_mux.GROUPS["7b-0"] == w_mux.GROUPS["70b"] == w_mux.GROUPS["7b-1"] + w_mux.GROUPS["13b"] == 8
    given = w_mux.settings(w_warm.STEPS_MS)
    assert given[0].partition("=")[2] in SYSTEMS
    assert {f"models.{model}.num_gpus={num}" for model, num in w_mux.GROUPS.items()} < set(given)


def test_a_wider_group_shortens_what_it_divides_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Appendix A: "enlarges the parallelism degree". 7B on 8 GPUs instead of one: 12.55 GB at 3.35 TB/s are read in
    3.7 ms by one, in 0.5 ms by eight."""
    monkeypatch.setattr(w_mux, "lengths", lambda name: ((500, 10), (5000, 10)))
    prefill, decode = w_mux.widened("7b-0", 35, 15)
    assert decode == pytest.approx(15 - 12.55 / 3.35 * 7 / 8)
    assert prefill == pytest.approx(35 - 2 * 6.7e9 * 762 / 0.5e12 * 7 / 8), "prompts are cut to 1024"
