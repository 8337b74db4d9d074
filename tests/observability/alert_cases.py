"""For each alert: a world in which it fires, and worlds close by in which it must not.

A world maps a series to its values, one per minute, in promtool's shorthand: `0+5x60` is 0, 5, 10 ... 300.
"""

from dataclasses import dataclass, field
from typing import Any

World = dict[str, str]


@dataclass(frozen=True)
class Case:
    """`fires` alerts at minute `at` with `labels`; none of `quiet` does."""

    alert: str
    fires: World
    quiet: tuple[World, ...]
    at: int = 70
    labels: dict[str, str] = field(default_factory=dict)


def one(alert: str, series: str, fires: str, *quiet: str, **more: Any) -> Case:
    """A case about one series: the values with which it fires, and those with which it must not."""
    return Case(alert, {series: fires}, tuple({series: values} for values in quiet), **more)


def slo(level: str, total: str, missed: str) -> World:
    labels = f'{{model="m",level="{level}"}}'
    return {f"glowplug_slo_requests_total{labels}": total, f"glowplug_slo_missed_total{labels}": missed}


def answers(**codes: str) -> World:
    return {f'glowplug_requests_total{{model="m",code="{code[1:]}"}}': values for code, values in codes.items()}


def starts(total: str, quick: str) -> World:
    """Cold starts, of which `quick` took at most 60 s."""
    name = 'glowplug_cold_start_seconds_bucket{model="m",phase="total",le="%s"}'
    return {name % "60": quick, name % "120": total, name % "+Inf": total}


def failures(name: str, code: str, values: str, label: str = "model") -> World:
    return {f'{name}{{{label}="m",code="{code}"}}': values}


def lag(quick: str, total: str) -> World:
    name = 'glowplug_loop_lag_seconds_bucket{service="placer",job="placer",instance="p:8080",le="%s"}'
    return {name % "0.25": quick, name % "1": total, name % "+Inf": total}


def cache(evictions: str, hits: str, misses: str) -> World:
    given = {"evictions": evictions, "hits": hits, "misses": misses}
    return {f'glowplug_cache_{kind}_total{{node="n"}}': values for kind, values in given.items()}


START_FAILURES, DEATHS = "glowplug_start_failures_total", "glowplug_engine_deaths_total"
FETCH_FAILURES = "glowplug_fetch_failures_total"
NODE_UP, PENDING = "glowplug_node_up", "glowplug_placements_pending"
SYNC = 'glowplug_table_sync_timestamp_seconds{job="placer",instance="p:8080",service="placer"}'
STORE = 'glowplug_store_connected{job="placer",instance="p:8080"}'
ROUTER, PLACER, AUTOSCALER = 'up{job="router"}', 'up{job="placer"}', 'up{job="autoscaler"}'

LEADERS = {
    'glowplug_leader{service="placer",instance="a"}': "1x80",
    'glowplug_leader{service="placer",instance="b"}': "0x80",
    'glowplug_leader{service="autoscaler",instance="c"}': "1x80",
    'glowplug_leader_changes_total{service="placer",instance="b"}': "3x80",
}

CASES = (
    Case(
        "NoLeader",
        LEADERS | {'glowplug_leader{service="placer",instance="a"}': "1x60 0x20"},
        (LEADERS, dict.fromkeys(LEADERS, "0x80")),  # one leads; no election is held
        labels={"service": "placer"},
    ),
    Case("TwoLeaders", LEADERS | {'glowplug_leader{service="placer",instance="b"}': "0x60 1x20"}, (LEADERS,)),
    Case(
        "RouterDown",
        {ROUTER: "1x10 0x70"},
        ({ROUTER: "1x80"}, {ROUTER + " ": "0x80", 'up{job="router",i="2"}': "1x80"}),
    ),
    Case("RouterDown", {}, ({ROUTER: "1x80"},)),  # no router was ever there
    Case(
        "HighTTFT",
        slo("ttft", "0+60x90", "0+15x90"),
        (
            slo("ttft", "0+60x90", "0+6x90"),  # 10 %: slower than that
            slo("ttft", "0+60x90", "0x65 0+60x25"),  # bad for some minutes only: the hour is fine
            slo("ttft", "0+1x5 5x85", "0+1x5 5x85"),  # five requests are no trend
            slo("tpot", "0+60x90", "0+15x90"),
        ),
        labels={"severity": "critical", "model": "m"},
    ),
    Case(
        "HighTTFT",
        slo("ttft", "0+60x500", "0+6x500"),
        (slo("ttft", "0+60x500", "0+2x500"),),
        at=400,
        labels={"severity": "warning", "model": "m"},
    ),
    Case(
        "HighTPOT",
        slo("tpot", "0+60x90", "0+15x90"),
        (slo("tpot", "0+60x90", "0+6x90"), slo("ttft", "0+60x90", "0+15x90")),
    ),
    Case(
        "RequestsFailing",
        answers(c200="0+90x80", c502="0+10x80"),
        (answers(c200="0+90x80", c502="0+1x80"), answers(c200="0+90x80"), answers(c200="0+90x80", c429="0+50x80")),
    ),
    Case(
        "ModelUnavailable",
        answers(c503="0+2x80"),
        (answers(c503="0+2x80", c200="0+1x80"), answers(c503="9x80"), answers(c200="0+5x80")),
        labels={"model": "m"},
    ),
    one("QueueGrowing", 'glowplug_requests_held{model="m"}', "0+2x80", "50x80", "0+0.1x80"),
    Case("RequestsRefused", answers(c429="0+60x80"), (answers(c429="0+1x80"), answers(c503="0+60x80"))),
    Case("ColdStartSlow", starts("0+2x80", "0+1x80"), (starts("0+2x80", "0+2x80"), starts("9x80", "0x80"))),
    Case(
        "ColdStartFailing",
        failures(START_FAILURES, "engine_failed", "0x60 1 2 3 4 5 6 7 8 9 9 9"),
        (failures(START_FAILURES, "engine_failed", "0x60 1x20"), failures(START_FAILURES, "engine_failed", "50x80")),
        labels={"model": "m", "code": "engine_failed"},
    ),
    Case(  # a counter that nobody had seen before
        "ColdStartFailing",
        failures(START_FAILURES, "no_capacity", "_x60 4x20"),
        (failures(START_FAILURES, "no_capacity", "_x60 1x20"),),
    ),
    Case(
        "EngineCrashLooping",
        failures(DEATHS, "engine_failed", "0x60 1 2 3 4 4 4 4 4 4 4 4"),
        (
            failures(DEATHS, "engine_failed", "0x60 1x20"),
            failures(DEATHS, "node_left", "0x60 1 2 3 4 4 4 4 4 4 4 4"),
            failures(DEATHS, "engine_failed", "40x80"),
        ),
    ),
    Case(
        "EngineCrashLooping",
        failures(DEATHS, "engine_failed", "_x60 3x20"),
        (failures(DEATHS, "engine_failed", "_x60 2x20"),),
    ),
    Case(
        "WeightsCorrupt",
        failures(FETCH_FAILURES, "weights_corrupt", "_x60 1x20", "node"),
        (
            failures(FETCH_FAILURES, "weights_unavailable", "_x60 1x20", "node"),
            failures(FETCH_FAILURES, "weights_corrupt", "7x80", "node"),
        ),
        labels={"node": "m"},
    ),
    Case(
        "FetchesFailing",
        failures(FETCH_FAILURES, "weights_unavailable", "0x60 0+1x20", "node"),
        (
            failures(FETCH_FAILURES, "weights_unavailable", "0x65 1x20", "node"),
            failures(FETCH_FAILURES, "weights_corrupt", "0x60 0+1x20", "node"),
        ),
    ),
    Case(
        "NodeSilent",
        {NODE_UP + '{node="n",instance="a"}': "1x65 0x20"},
        (
            {NODE_UP + '{node="n",instance="a"}': "1x80"},
            {
                NODE_UP + '{node="n",instance="a"}': "0x80",
                NODE_UP + '{node="n",instance="b"}': "1x80",
            },  # another placer hears it
            {NODE_UP + '{node="n",instance="a"}': "1x65 _x20"},  # it said goodbye
        ),
        labels={"node": "n"},
    ),
    Case(
        "NoNodes",
        {'glowplug_nodes{state="alive"}': "2x65 0x20"},
        ({'glowplug_nodes{state="alive"}': "1x80", 'glowplug_nodes{state="draining"}': "0x80"},),
    ),
    Case(
        "GpuLedgerFull",
        {PENDING + '{stage="room"}': "3x80"},
        ({PENDING + '{stage="start"}': "3x80"}, {PENDING + '{stage="room"}': "0 1 0 1 0 1x2 0x80"}),
    ),
    Case(
        "HostCacheThrashing",
        cache("0+3x80", "0+1x80", "0+4x80"),
        (cache("0+3x80", "0+9x80", "0+4x80"), cache("0+0.1x80", "0x80", "0+4x80")),
    ),
    Case(
        "ServiceDown", {PLACER: "0x80"}, ({PLACER: "1x80"}, {'up{job="prometheus"}': "0x80"}), labels={"job": "placer"}
    ),
    Case(
        "ControlPlaneDown",
        {AUTOSCALER: "1x80", PLACER: "1x60 0x20"},
        ({AUTOSCALER: "1x80", PLACER: "1x80"},),
        labels={"service": "placer"},
    ),
    Case(
        "ControlPlaneDown",
        {AUTOSCALER: "1x60 _x20", PLACER: "1x80"},
        ({AUTOSCALER: "1x80", PLACER: "1x80"},),
        labels={"service": "autoscaler"},
    ),
    one("BusDown", 'glowplug_bus_connected{job="router"}', "1x60 0x20", "1x80"),
    Case("StoreDown", {STORE: "1x60 0x20"}, ({STORE: "1x80"},)),
    one("BusStoresNothing", 'glowplug_bus_stores{job="router"}', "1x60 0x20", "1x80"),
    one("StoreTakesNoWrites", 'glowplug_store_writable{job="placer"}', "1x60 0x20", "1x80"),
    one("CommandsRefused", 'glowplug_stale_commands_total{service="agent"}', "0+2x80", "0x60 3x20"),
    Case(
        "TablesStale",
        {SYNC: "60x80", STORE: "1x80"},
        ({SYNC: "0+60x80", STORE: "1x80"}, {SYNC: "60x80", STORE: "0x80"}),
    ),
    one("RowsUnreadable", 'glowplug_rows_unreadable{service="placer",table="nodes"}', "2x80", "0x60 1x2 0x20"),
    Case("ServiceOverloaded", lag("0+10x80", "0+20x80"), (lag("0+20x80", "0+20x80"),)),
    one("ServiceOverloaded", 'glowplug_inbox_stimuli{service="placer"}', "4000x80", "12x80"),
    one("BusBacklog", 'glowplug_bus_pending{service="placer"}', "900x80", "20x80"),
    one("EventsRedelivered", 'glowplug_bus_redeliveries_total{service="agent"}', "0+5x80", "0x60 4x20"),
    one("TracesDropped", 'glowplug_spans_dropped_total{service="router"}', "0+5x80", "5x80"),
    Case(
        "FilesRunningOut",
        {'process_open_fds{job="router"}': "900x80", 'process_max_fds{job="router"}': "1024x80"},
        ({'process_open_fds{job="router"}': "100x80", 'process_max_fds{job="router"}': "1024x80"},),
    ),
    Case(
        "VersionsDiffer",
        {'glowplug_build_info{version="1"}': "1x80", 'glowplug_build_info{version="2"}': "1x80"},
        ({'glowplug_build_info{version="1",s="a"}': "1x80", 'glowplug_build_info{version="1",s="b"}': "1x80"},),
    ),
)
