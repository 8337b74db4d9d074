"""The judgement of row P2m."""

import pytest

from bench.papers import p_hours
from bench.papers.experiment import Runs


def outcomes(instances: float, peak: float) -> dict[int, dict[str, float]]:
    given = {"instances": instances, "norm_peak": peak, "norm_p99": 0.8, "ttft_mean": 0.3, "starts": 50}
    return {1: given | {"ttft_met": 0.9, "tpot_met": float("nan")}}


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
