"""Row P2m: what is judged of it, and what each case is told."""

import pytest

from bench.papers import p_hours
from bench.papers.experiment import Runs


def outcomes(instances: float, peak: float) -> dict[int, dict[str, float]]:
    given = {"instances": instances, "norm_peak": peak, "norm_p99": 0.8, "ttft_mean": 0.3, "starts": 50}
    return {1: given | {"ttft_met": 0.9, "tpot_met": float("nan")}}


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, tuple[str, ...]]]:
    """(system, settings) of each run, none of which is carried out."""
    found: list[tuple[str, tuple[str, ...]]] = []

    def run_scaling(system: str, seed: int, quick: bool, *given: str) -> dict[str, float]:
        found.append((system, given))
        return {}

    monkeypatch.setattr(p_hours.p_preserve, "run_scaling", run_scaling)
    return found


def test_every_case_says_what_was_declared_and_whether_anything_is_learned(
    told: list[tuple[str, tuple[str, ...]]],
) -> None:
    for case in ("static 7", "PreServe", "PreServe, twice declared", "PreServe, profile", "code: without holding"):
        p_hours.run(case, 1, False)
    by_case = [set(given) for _, given in told]
    assert "models.llama-7b.min_instances=7" in by_case[0]
    capacity = "params.predictor.capacity"
    assert {f"{capacity}.busy_ratio=0.5", f"{capacity}.prompt_per_s=0.0"} <= by_case[1]
    assert {f"{capacity}.busy_ratio=0.5", f"{capacity}.prompt_per_s=3120.0"} <= by_case[2]
    assert {f"{capacity}.busy_ratio=1000", f"{capacity}.prompt_per_s=1560.0"} <= by_case[3]
    assert {"policies.routing=preserve_load_aware", "workload.source=azure_2024_code_10s"} <= by_case[4]


@pytest.mark.parametrize(("instances", "peak", "passed"), [(4.4, 0.15, True), (5.4, 0.15, False), (4.4, 0.5, False)])
def test_hours_saved_count_only_where_the_objective_is_held(
    instances: float, peak: float, passed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = ([10] * 60 + [20] * 60) * 900
    monkeypatch.setattr(p_hours, "bin_counts", lambda name: counts)
    runs = Runs({case: outcomes(instances, peak) for case in p_hours.cases(False)})
    verdict = p_hours.judge(runs)
    assert verdict.passed is passed
    saved = f"{instances / 8 - 1:+.1%}"
    assert verdict.ours == f"{saved} (chat: {saved}, code: {saved})"
    assert verdict.findings[0].ours == "-25.0%", "a mean of 15 under a highest of 20"
