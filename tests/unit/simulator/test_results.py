"""Results of a run, against hand-worked sums."""

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from glowplug.domain.hardware import Gpu, Grant, GrantOwner, Node
from glowplug.domain.instance import Instance, InstanceState
from glowplug_lab.simulator.report import page_data
from glowplug_lab.simulator.report.page_data import Spans
from glowplug_lab.simulator.results import Accounts, Peak, Quantiles, Results
from glowplug_lab.simulator.scenario.load import load
from tests.unit.simulator.scenarios import write

VALUES = st.lists(st.floats(0, 1e5).filter(lambda v: v == 0 or v > 1e-5), min_size=1, max_size=200)


def filled(values):
    quantiles = Quantiles()
    for value in values:
        quantiles.add(value)
    return quantiles


@given(VALUES, st.floats(0.001, 1.0))
def test_any_quantile_within_one_percent(values, share):
    exact = sorted(values)[max(1, math.ceil(share * len(values))) - 1]
    assert filled(values).at(share) == pytest.approx(exact, rel=0.01, abs=2e-6)


@given(VALUES, VALUES)
def test_merged_is_added(one, other):
    merged = filled(one)
    merged.merge(filled(other))
    whole = filled([*one, *other])
    assert (merged.count, merged.lowest, merged.highest) == (whole.count, whole.lowest, whole.highest)
    assert [merged.at(q) for q in (0.1, 0.5, 0.99)] == [whole.at(q) for q in (0.1, 0.5, 0.99)]


def test_shares_and_nothing():
    quantiles = filled([0.0, 1.0, 2.0, 3.0])
    assert quantiles.share_upto(2.5) == 0.75 and quantiles.mean == 1.5
    assert math.isnan(Quantiles().at(0.5)) and math.isnan(Quantiles().mean) and math.isnan(Quantiles().share_upto(1))


def test_all_models_as_one():
    results = Results()
    for key, ttft in (("a", 1.0), ("b", 3.0)):
        results.by_model[key].num_arrived += 1
        results.by_model[key].ttft.add(ttft)
        results.by_model[key].num_refused["wait_timeout"] = 2
    total = results.total()
    assert (total.num_arrived, total.ttft.highest, total.num_refused) == (2, 3.0, {"wait_timeout": 4})


def a_node(*owners):
    """GPUs, each held for one owner or none."""

    def held(owner):
        return () if owner is None else (Grant(holder="h", owner=owner, num_bytes=1),)

    gpus = tuple(Gpu(gpu_id=f"n/{at}", total_bytes=10, grants=held(owner)) for at, owner in enumerate(owners))
    return Node(node_id="n", gpus=gpus, engines=(), agent_url="")


def an_instance(state, **fields):
    return Instance(instance_id="i", model_key="m", engine="e", state=state, workers=(), **fields)


def test_gpus_count_from_grant_to_release_and_replicas_apart():
    accounts, results = Accounts(0.0), Results()
    accounts.saved("nodes", a_node(GrantOwner.WEIGHTS, GrantOwner.PREWARM, None), 10.0)
    accounts.saved("nodes", a_node(GrantOwner.WEIGHTS, None, None), 20.0)
    accounts.saved("nodes", a_node(None, None, None), 50.0)
    accounts.close(results, 100.0)
    assert results.gpu_seconds == 2 * 10 + 30 and results.gpu_serving_seconds == 40


def test_what_is_held_before_the_count_begins_counts_from_then_on():
    accounts, results = Accounts(10.0), Results()
    accounts.saved("nodes", a_node(GrantOwner.WEIGHTS), 5.0)
    accounts.saved("instances", an_instance(InstanceState.STARTING), 5.0)
    accounts.close(results, 30.0)
    assert results.gpu_seconds == results.gpu_serving_seconds == results.instance_seconds == 20.0


def test_instances_count_while_they_serve_or_come_and_replicas_never():
    accounts, results = Accounts(0.0), Results()
    accounts.saved("instances", an_instance(InstanceState.STARTING), 5.0)
    accounts.saved("instances", an_instance(InstanceState.READY), 8.0)
    accounts.saved("instances", replace(an_instance(InstanceState.LOADING), instance_id="r", replica=True), 9.0)
    accounts.saved("instances", an_instance(InstanceState.SWAPPED_OUT), 15.0)
    accounts.saved("instances", an_instance(InstanceState.STOPPED), 18.0)
    accounts.close(results, 30.0)
    assert results.instance_seconds == 10.0 and results.instances_peak == 1


@pytest.mark.parametrize(
    ("least", "values", "highest"),
    [
        pytest.param(1, {1.0: 1.0, 59.0: 3.0, 60.0: 2.5, 130.0: 0.1}, 2.5, id="of any minute"),
        pytest.param(2, {1.0: 9.0, 61.0: 1.0, 62.0: 2.0}, 1.5, id="not of one with too few"),
    ],
)
def test_the_peak_is_the_highest_mean(least, values, highest):
    peak = Peak(width_s=60.0, least=least)
    assert math.isnan(peak.highest)
    for at_s, value in values.items():
        peak.add(at_s, value)
    peak.close()
    assert (peak.highest, peak.at_s) == (highest, 60.0)


def test_hits_are_replicas_found_of_all_starts():
    results = Results()
    assert math.isnan(results.hit_ratio)
    for origin in ("prewarmed", "prewarming", "host", "remote"):
        results.starts[origin] += 1
    assert results.hit_ratio == 0.5 and results.num_starts == 4


def test_load_seconds_are_shared_by_all_that_came():
    """mCache section 6."""
    results = Results(load_seconds=6.0, fetch_seconds=4.0)
    results.by_model["a"].num_arrived, results.by_model["b"].num_arrived = 15, 5
    assert results.load_s_per_request == pytest.approx(0.5)
    assert math.isnan(results.total().ttft_attainment)  # nobody asked for it in time


@pytest.fixture
def spans(tmp_path: Any) -> Spans:
    """Ten stays on one GPU, of 1 s, 2 s, ..., a second apart."""
    held = Spans(load(write(tmp_path)).setup)
    at_s = 0.0
    for number in range(1, 11):
        held.gpu("node-1/0", at_s, [(f"i-{number}", "weights", 10)])
        held.gpu("node-1/0", at_s + number, [])
        at_s += number + 1
    held.finish(at_s)
    return held


def test_a_page_that_can_carry_all_stays_leaves_none_out(spans: Spans) -> None:
    columns, num_left_out = spans.kept()
    assert (len(columns["from"]), num_left_out) == (10, 0)
    assert spans.use()[:3] == [(0.0, 1), (1.0, 0), (2.0, 1)]


def test_of_too_many_stays_the_longest_are_kept_in_their_order(spans: Spans, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_data, "MAX_SPANS", 3)
    monkeypatch.setattr(page_data, "MAX_STEPS", 5)
    columns, num_left_out = spans.kept()
    assert [upto - since for since, upto in zip(columns["from"], columns["to"], strict=True)] == [8, 9, 10]
    assert num_left_out == 7
    assert len(spans.use()) <= 5
