"""Quantiles over growing buckets, against sorting."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from glowplug.simulator.results import Quantiles, Results

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
        results.of(key).num_arrived += 1
        results.of(key).ttft.add(ttft)
        results.of(key).num_refused["wait_timeout"] = 2
    total = results.total()
    assert (total.num_arrived, total.ttft.highest, total.num_refused) == (2, 3.0, {"wait_timeout": 4})
