"""Metrics: label values are capped, names are in one file."""

from prometheus_client import CollectorRegistry

from glowplug.bus.port import BusCounts
from glowplug.controllers.effects import Publish, Tick
from glowplug.domain.instance import InstanceState
from glowplug.events.facts import InstanceFailed
from glowplug.telemetry import document, semconv
from glowplug.telemetry.metrics import FailureCounter, LabelCap, ShellMetrics
from glowplug.telemetry.tracing import SpanCounts
from tests.fleet_builder import an_instance


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


def test_totals_follow_the_books_of_bus_and_traces() -> None:
    registry = CollectorRegistry()
    metrics = ShellMetrics("placer", registry)
    bus, spans = BusCounts(num_reconnects=2, pending={"a": 3, "b": 4}), SpanCounts(num_dropped=5)
    metrics.ticked(0.01, 7, bus, spans)
    bus.num_reconnects, spans.num_dropped = 3, 9
    metrics.ticked(-0.01, 6, bus, spans)
    labels = {"service": "placer"}
    shown = {
        name: registry.get_sample_value(name, labels)
        for name in (
            semconv.BUS_RECONNECTS_TOTAL,
            semconv.SPANS_DROPPED_TOTAL,
            semconv.BUS_PENDING,
            semconv.INBOX_STIMULI,
            f"{semconv.LOOP_LAG_SECONDS}_count",
        )
    }
    assert list(shown.values()) == [3, 9, 7, 6, 2]


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
