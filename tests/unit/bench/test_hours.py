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

    def run_learned(system: str, seed: int, quick: bool, *given: str) -> dict[str, float]:
        found.append((system, given))
        return {}

    monkeypatch.setattr(p_hours.p_preserve, "run_learned", run_learned)
    return found


def test_every_case_says_what_was_declared_and_whether_anything_is_learned(
    told: list[tuple[str, tuple[str, ...]]],
) -> None:
    for case in ("static 7", "PreServe", "PreServe, twice declared", "PreServe, profile", "code: without holding"):
        p_hours.run(case, 1, False)
    p_hours.run("static 7, union's routing", 1, False)
    p_hours.run("code: union", 1, False)
    assert [system for system, _ in told] == ["static 8", *["PreServe"] * 4, "oracle", "union"]
    assert "models.llama-7b.min_instances=7" in told[5][1]
    assert f"{p_hours.CAPACITY}.normalized_s=0.47" in told[6][1], "misses are those of the service's objective"
    by_case = [set(given) for _, given in told]
    assert "models.llama-7b.min_instances=7" in by_case[0]
    capacity = "params.predictor.capacity"
    assert {f"{capacity}.busy_ratio=0.5", f"{capacity}.prompt_per_s=0.0"} <= by_case[1]
    assert {f"{capacity}.busy_ratio=0.5", f"{capacity}.prompt_per_s=3120.0"} <= by_case[2]
    assert {f"{capacity}.busy_ratio=1000", f"{capacity}.prompt_per_s=1560.0"} <= by_case[3]
    assert {"policies.routing=preserve_load_aware", "workload.source=azure_2024_code_10s"} <= by_case[4]


@pytest.mark.parametrize(
    ("instances", "fewest", "peak", "passed"),
    [(4.4, 3.0, 0.15, True), (6.4, 6.0, 0.15, True), (6.4, 5.0, 0.15, False), (4.4, 3.0, 0.5, False)],
)
def test_hours_saved_count_only_where_the_objective_is_held_and_beside_the_fewest_found(
    instances: float, fewest: float, peak: float, passed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = ([10] * 60 + [20] * 60) * 900
    monkeypatch.setattr(p_hours, "bin_counts", lambda name: counts)
    found = {case: outcomes(instances, peak) for case in p_hours.cases(False)}
    runs = Runs(found | {case: outcomes(fewest, 0.1) for case in found if case.endswith(p_hours.ORACLE)})
    verdict = p_hours.judge(runs)
    assert verdict.passed is passed
    each = f"{instances / 8 - 1:+.1%} ({instances / fewest - 1:+.1%} against the fewest found)"
    assert verdict.ours == f"chat: {each}; code: {each}"
    assert verdict.findings[0].ours == "-25.0%", "a mean of 15 under a highest of 20"
