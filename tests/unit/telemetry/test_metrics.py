"""Metrics: label values are capped, names are in one file."""

from prometheus_client import CollectorRegistry

from glowplug.telemetry import semconv
from glowplug.telemetry.metrics import LabelCap, ShellMetrics


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
