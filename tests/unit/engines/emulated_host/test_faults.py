"""Faults the emulated engine injects on request."""

import pytest

from glowplug.engines.emulated_host.faults import Faults, as_json, changed


def test_changes_keep_what_they_do_not_name() -> None:
    faults = changed(Faults(hang=True), {"ttft_s": 1, "failure_types": ["rate_limit"]})
    assert faults == Faults(hang=True, ttft_s=1.0, failure_types=("rate_limit",))
    assert as_json(faults)["emulated"] is True


def test_names_of_the_llm_d_simulator_mean_the_same_in_its_units() -> None:
    faults = changed(Faults(), {"time-to-first-token": 250, "inter-token-latency": 20, "failure-injection-rate": 5})
    assert (faults.ttft_s, faults.itl_s, faults.failure_rate) == (0.25, 0.02, 0.05)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"nope": 1}, "nope"),
        ({"hang": 1}, "hang"),
        ({"ttft_s": "fast"}, "ttft_s"),
        ({"ttft_s": True}, "ttft_s"),
        ({"failure_types": ["odd"]}, "failure_types"),
        ({"failure_rate": 2.0}, "failure_rate"),
        ({"mode": "song"}, "mode"),
        ({"crash_at_token": 1.5}, "crash_at_token"),
        ([], "object"),
    ],
)
def test_what_is_wrong_is_named(changes: object, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        changed(Faults(), changes)
