"""The generator: seeded, sound, and like its traces (where GLOWPLUG_DATA has them)."""

import math
import os
from collections import Counter
from functools import partial
from itertools import pairwise
from pathlib import Path
from random import Random
from statistics import fmean, median, pstdev

import pytest

from glowplug_lab.simulator.workload import generator, generator_fitted
from glowplug_lab.simulator.workload.formats import counts, length_pairs
from glowplug_lab.simulator.workload.generator import Span, hours, renewal
from glowplug_lab.simulator.workload.tables import rows

DATA = Path(os.environ.get("GLOWPLUG_DATA", "../shared/data"))
HOUR_S, DAY_S = 3600.0, 86400.0


def trace(name):
    path = DATA / name
    if not path.exists():
        pytest.skip(f"no {name} in GLOWPLUG_DATA={DATA}")
    return path


chat = partial(generator.service, generator_fitted.CONVERSATION, model="generated-chat")
code = partial(generator.service, generator_fitted.CODE, model="generated-code")
STREAMS = {
    "conversation": lambda seed: chat(seed, 5.0, 900.0),
    "code": lambda seed: code(seed, 5.0, 900.0),
    "fleet": lambda seed: generator.fleet(seed, 40, 5.0, 900.0),
}


@pytest.mark.parametrize("name", STREAMS)
def test_a_seed_is_a_trace_and_every_model_says_that_it_is_generated(name):
    first = list(STREAMS[name](7))
    assert first == list(STREAMS[name](7)) != list(STREAMS[name](8))
    assert len(first) > 100
    assert all(earlier.at_s <= later.at_s for earlier, later in pairwise(first))
    assert first[0].at_s >= 0 and first[-1].at_s < 900
    assert all(a.model.startswith(generator.LABEL) and a.prompt_tokens > 0 and a.response_tokens > 0 for a in first)


@pytest.mark.parametrize(
    "wrong, field",
    [
        (lambda: chat(1, 0.0, 10.0), "rps"),
        (lambda: code(1, 1.0, -1.0), "seconds"),
        (lambda: generator.fleet(1, 0, 1.0, 10.0), "num_models"),
        (lambda: generator.fleet(1, 3, 1.0, 10.0, names=("a",)), "names"),
    ],
)
def test_what_cannot_be_is_refused_with_its_field(wrong, field):
    with pytest.raises(ValueError, match=f"^{field}"):
        wrong()


@pytest.mark.parametrize("cv", [0.0, 1.0, 4.0])
def test_renewals_follow_the_rate_and_begin_without_a_burst(cv):
    spans = [Span(0.0, 50.0, 8.0), Span(50.0, 50.0, 0.0), Span(100.0, 100.0, 4.0)]
    runs = [list(renewal(spans, cv, Random(seed))) for seed in range(200)]
    assert fmean(sum(t < 50 for t in run) for run in runs) == pytest.approx(400, rel=0.05)
    assert fmean(sum(t >= 100 for t in run) for run in runs) == pytest.approx(400, rel=0.05)
    assert not any(50 < t < 100 for run in runs for t in run)
    assert fmean(sum(t < 1 for t in run) for run in runs) == pytest.approx(8, rel=0.25)


def test_gaps_have_the_coefficient_asked_for():
    times = list(renewal([Span(0.0, 1e5, 1.0)], 3.0, Random(1)))
    gaps = [b - a for a, b in pairwise(times)]
    assert pstdev(gaps) / fmean(gaps) == pytest.approx(3.0, rel=0.05)


def test_a_rate_is_the_mean_over_the_time_asked_for():
    for start_s in (0.0, 5 * DAY_S):
        num = fmean(len(list(chat(seed, 4.0, HOUR_S, start_s=start_s))) / HOUR_S for seed in range(2))
        assert num == pytest.approx(4.0, rel=0.05), start_s


def test_code_sleeps_at_night_and_at_weekends():
    week = Counter(int(a.at_s // HOUR_S) for a in code(1, 0.1, 7 * DAY_S, start_s=0.0, cv=1.0))
    day = sum(week[24 + h] for h in range(14, 22)) / 8
    night = sum(week[24 + h] for h in range(5, 11)) / 6
    saturday = sum(week[5 * 24 + h] for h in range(14, 22)) / 8
    assert day > 5 * night and day > 3 * saturday


def test_popularity_of_a_fleet_spans_five_orders_and_the_tail_is_idle():
    """ServeGen."""
    tenants = generator.tenants(1, 320, 100.0)
    rates = [t.rate for t in tenants]
    assert math.fsum(rates) == pytest.approx(100.0)
    assert math.log10(rates[0] / rates[-1]) > 5
    assert [t.name for t in tenants] == [t.name for t in generator.tenants(2, 320, 50.0)]
    tail = [t.active for t in tenants[160:]]
    assert sorted(tail)[len(tail) // 2] < 0.3 < fmean(t.active for t in tenants[:32])
    assert max(t.cv for t in tenants) > 4 > 2 > sorted(t.cv for t in tenants)[160]


def test_a_fleet_brings_its_rate_in_the_long_run():
    rates = [len(list(generator.fleet(seed, 60, 0.3, DAY_S))) / DAY_S for seed in range(3)]
    assert fmean(rates) == pytest.approx(0.3, rel=0.35)


@pytest.mark.parametrize("kind, name", [(generator_fitted.CONVERSATION, "conv"), (generator_fitted.CODE, "code")])
def test_lengths_are_those_of_the_trace(kind, name):
    real = length_pairs(trace(f"azure_2023_{name}.csv.gz"))
    draw, chance = generator.lengths(kind), Random(1)
    ours = [draw(chance) for _ in range(len(real))]
    for side in (0, 1):
        theirs, mine = sorted(p[side] for p in real), sorted(p[side] for p in ours)
        assert fmean(mine) == pytest.approx(fmean(theirs), rel=0.1)
        assert pstdev(mine) / fmean(mine) == pytest.approx(pstdev(theirs) / fmean(theirs), rel=0.25)
        for share in (0.25, 0.5, 0.75, 0.9):
            at = int(share * len(real))
            assert mine[at] == pytest.approx(theirs[at], rel=0.25), (side, share)


@pytest.mark.parametrize(
    "kind, name, first_day", [(generator_fitted.CONVERSATION, "conv", 6), (generator_fitted.CODE, "code", 4)]
)
def test_the_cycle_is_that_of_the_trace(kind, name, first_day):
    real = [0.0] * 120
    for group in counts(trace(f"azure_2024_{name}_10s.csv.gz")):
        real[min(119, int(group[0].from_s // HOUR_S))] += group[0].num_requests
    scale = fmean(real)
    ours = [hours(kind, first_day * DAY_S + (h + 0.5) * HOUR_S) for h in range(120)]
    off = [abs(a / scale - b / fmean(ours)) for a, b in zip(real, ours, strict=True)]
    assert fmean(off) < 0.15
    assert max(ours) / min(ours) == pytest.approx(max(real) / min(real), rel=0.4)


def test_a_fleet_is_like_the_clients_of_the_trace():
    """ServeGen."""
    counted = {}
    for row in rows(trace("servegen_clients_10min.csv.gz")):
        if row.text("model").startswith("m-"):  # those of ten days
            of = counted.setdefault(f"{row.text('model')}/{row.text('client')}", [0, 0, []])
            of[0] += 1
            of[1] += row.count("requests")
            if row.count("requests") >= 20:
                of[2].append(float(row.text("cv")))
    theirs = sorted(windows / 1440 for windows, _, _ in counted.values())
    cvs = sorted(median(cv) for _, _, cv in counted.values() if len(cv) > 10)
    rates = [requests for _, requests, _ in counted.values()]
    ours = [t for seed in range(4) for t in generator.tenants(seed, len(counted), 100.0)]
    active = sorted(t.active for t in ours)
    for limit in (0.05, 0.25, 0.75):
        share = fmean(a < limit for a in theirs)
        assert fmean(a < limit for a in active) == pytest.approx(share, abs=0.12), limit
    mine = sorted(t.cv for t in ours)
    for share in (0.25, 0.5, 0.75, 0.9):
        assert mine[int(share * len(mine))] == pytest.approx(cvs[int(share * len(cvs))], rel=0.3), share
    sigma = pstdev(math.log10(r) for r in rates)
    assert pstdev(math.log10(t.rate) for t in ours) == pytest.approx(sigma, rel=0.25)
