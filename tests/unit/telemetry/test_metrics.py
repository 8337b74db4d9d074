"""Capped labels, names in one file, and tallies equal to the library's instruments."""

import asyncio

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.parser import text_string_to_metric_families

from glowplug.bus.port import BusCounts
from glowplug.controllers.effects import Publish, Tick
from glowplug.domain.instance import InstanceState
from glowplug.events.facts import InstanceFailed
from glowplug.telemetry import document, semconv
from glowplug.telemetry.metrics import FailureCounter, LabelCap, ShellMetrics
from glowplug.telemetry.tally import BYTES_AT_ONCE, TallyCounter, TallyHistogram, TallyRows, exposition
from tests.fleet_builder import an_instance

BOUNDS = (0.1, 0.5, 1, 10)
NAMES = st.text(alphabet=st.sampled_from('ab"\\\n é,{}='), max_size=4)
Seen = set[tuple[str, tuple[tuple[str, str], ...], float]]


def test_label_values_past_the_cap_become_other() -> None:
    cap = LabelCap(2)
    assert [cap(v) for v in ("a", "b", "c", "a", "b", "d")] == ["a", "b", "other", "a", "b", "other"]


def test_what_a_shell_counts_is_named_in_semconv() -> None:
    registry = CollectorRegistry()
    ShellMetrics("placer", registry)
    named = {value.removesuffix("_total") for value in vars(semconv).values() if isinstance(value, str)}
    counted = {metric.name for metric in registry.collect()}
    assert counted
    assert counted <= named


def test_totals_follow_the_counts_of_the_bus() -> None:
    registry = CollectorRegistry()
    metrics = ShellMetrics("placer", registry)
    bus = BusCounts(num_reconnects=2, pending={"a": 3, "b": 4})
    metrics.ticked(0.01, 7, bus)
    bus.num_reconnects = 3
    metrics.ticked(-0.01, 6, bus)
    totals = (semconv.BUS_RECONNECTS_TOTAL, semconv.BUS_PENDING, semconv.INBOX_STIMULI)
    names = (*totals, f"{semconv.LOOP_LAG_SECONDS}_count")
    assert [registry.get_sample_value(name, {"service": "placer"}) for name in names] == [3, 7, 6, 2]


def test_failed_starts_and_dead_engines_are_told_apart() -> None:
    registry = CollectorRegistry()
    failures = FailureCounter(registry)
    failures.saw(Publish(InstanceFailed(instance=an_instance(state=InstanceState.FAILED), code="weights_corrupt")))
    died = an_instance(state=InstanceState.FAILED, ready_at=5.0)
    failures.saw(Publish(InstanceFailed(instance=died)))
    failures.saw(Tick())
    assert registry.get_sample_value(semconv.START_FAILURES_TOTAL, {"model": "m", "code": "weights_corrupt"}) == 1
    assert registry.get_sample_value(semconv.ENGINE_DEATHS_TOTAL, {"model": "m", "code": "engine_failed"}) == 1


def test_the_ending_of_a_name_tells_its_kind() -> None:
    kinds = [document.kind(name) for name in ("a_total", "a_seconds", "a_timestamp_seconds", "a_bytes")]
    assert kinds == ["counter", "histogram", "gauge", "gauge"]
    assert document.labels(document.Name("", "", "", "model, level; ttft or tpot, of models")) == ("model", "level")
    assert document.labels(document.Name("", "", "", "")) == ()


def shown(registry: CollectorRegistry) -> Seen:
    text = asyncio.run(exposition(registry)).decode()
    return {
        (sample.name, tuple(sorted(sample.labels.items())), sample.value)
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if not sample.name.endswith("_created")
    }


def test_a_histogram_without_labels_is_written_as_scrapers_read_it() -> None:
    registry = CollectorRegistry()
    TallyHistogram("h", "doc", [], BOUNDS, registry).labels().observe(0.7)
    text = asyncio.run(exposition(registry)).decode()
    assert 'h_bucket{le="0.5"} 0.0\n' in text and 'h_bucket{le="+Inf"} 1.0\n' in text
    assert {("h_count", (), 1.0), ("h_sum", (), 0.7)} <= shown(registry)


@given(st.lists(st.tuples(NAMES, st.sampled_from([0.0, 0.1, 0.10001, 0.7, 1.0, 10.0, 99.5])), max_size=20))
def test_histograms_and_counters_are_those_of_the_library(observed: list[tuple[str, float]]) -> None:
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    fast, plain = (
        TallyHistogram("h", "doc", ["a", "b"], BOUNDS, ours),
        Histogram("h", "doc", ["a", "b"], buckets=BOUNDS, registry=theirs),
    )
    fast_count, plain_count = TallyCounter("c_total", "doc", ["a"], ours), Counter("c", "doc", ["a"], registry=theirs)
    for name, value in observed:
        fast.labels(name, "x").observe(value)
        plain.labels(name, "x").observe(value)
        fast_count.labels(name).value += 2
        plain_count.labels(name).inc(2)
    assert shown(ours) == shown(theirs)


def test_a_registry_reads_tallies_like_any_instrument() -> None:
    registry = CollectorRegistry()
    TallyHistogram("h", "doc", ["a"], BOUNDS, registry).labels("x").observe(0.7)
    TallyRows("held", "doc", ["a"], lambda: [(("x",), 3)], kind="gauge", registry=registry)
    Gauge("g", "doc", registry=registry).set(4)
    assert registry.get_sample_value("h_bucket", {"a": "x", "le": "1.0"}) == 1
    assert registry.get_sample_value("h_bucket", {"a": "x", "le": "0.5"}) == 0
    assert registry.get_sample_value("held", {"a": "x"}) == 3
    assert {("held", (("a", "x"),), 3.0), ("g", (), 4.0)} <= shown(registry)
    kinds = {m.name: m.type for m in text_string_to_metric_families(asyncio.run(exposition(registry)).decode())}
    assert kinds == {"h": "histogram", "held": "gauge", "g": "gauge"}


async def test_others_run_while_a_long_page_is_written() -> None:
    registry = CollectorRegistry()
    counts = TallyCounter("c_total", "doc", ["a"], registry)
    for i in range(5000):
        counts.labels(f"model-{i}").value += 1
    turns = 0

    async def other() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0)
            turns += 1
            counts.labels(f"new-{turns}").value += 1  # children may appear while the page is written

    beside = asyncio.create_task(other())
    page = await exposition(registry)
    beside.cancel()
    assert turns >= len(page) // (2 * BYTES_AT_ONCE) > 3
    assert page.count(b"model-") == 5000
