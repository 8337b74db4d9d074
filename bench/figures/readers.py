"""Readers from the data that a benchmark writes (`--json FILE`) to the figures that a page prints, one per row."""

from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import Any

GIB = 1 << 30
NO_RATIO = "no ratio, since their loads differed"


def span(values: Sequence[float], form: str, unit: str) -> str:
    """Format a range as "33-41 us", or "33 us" where both ends are printed alike."""
    low, high = f"{min(values):{form}}", f"{max(values):{form}}"
    return f"{low} {unit}" if low == high else f"{low}-{high} {unit}"


def ratio(found: Mapping[str, float] | None, form: str) -> str:
    """Format a ratio as "12x (7x to 16x)", or say that there is none."""
    if found is None:
        return NO_RATIO
    middle, low, high = (f"{found[name]:{form}}x" for name in ("middle", "low", "high"))
    return f"{middle} ({low} to {high})"


def ratios(found: Sequence[float | None], form: str) -> str:
    """Format the ratios of several runs as "5.5x-5.8x", with how many runs have one."""
    known = [f"{one:{form}}x" for one in sorted(one for one in found if one is not None)]
    if not known:
        return NO_RATIO
    text = known[0] if known[0] == known[-1] else f"{known[0]}-{known[-1]}"
    return text if len(known) == len(found) else f"{text} ({len(known)} of {len(found)} runs: in others loads differed)"


def seconds(values: Iterable[float], form: str) -> str:
    """Format seconds as "0.14, 1.26, 1.67 s"."""
    return ", ".join(f"{value:{form}}" for value in values) + " s"


def installed_start(data: Any) -> dict[str, str]:
    return {"measured": span([one["ready_s"] for one in data["rounds"]], ".1f", "s")}


def llamacpp_cold(data: Any) -> dict[str, str]:
    return {"measured": span([one["cold_first_token_s"] for one in data["rounds"]], ".2f", "s")}


def llamacpp_warm(data: Any) -> dict[str, str]:
    return {"measured": span([took for one in data["rounds"] for took in one["warm_first_token_s"]], ".3f", "s")}


def fleet_memory(data: Any) -> dict[str, str]:
    return {"measured": span([one["fleet_memory_bytes"] / GIB for one in data["rounds"]], ".2f", "GiB")}


def recovery(data: Any) -> dict[str, str]:
    killed = data["killed"]
    whole = span([row["whole_again_s"] for row in killed.values()], ".1f", "s")
    harmed = [name.rpartition("-")[0] or name for name, row in killed.items() if set(row["ends"]) - {"done"}]
    return {"measured": f"{whole}; streams unharmed" + (f" but those of a killed {' or '.join(harmed)}" * bool(harmed))}


def bus_latency(data: Any) -> dict[str, str]:
    return {"measured": f"{data['handler_ms_p50']['evt']:.1f} ms"}


def router(data: Any) -> dict[str, str]:
    """The router's figures. Raises ValueError if nginx was not measured."""
    if "nginx" not in data["proxies"]:
        raise ValueError("the router was measured without nginx, but its figures are ratios")
    ours, nginx = data["proxies"]["glowplug router"], data["proxies"]["nginx"]
    request, paced, chunk = (ratios(data[f"{name}_ratios"], ".1f") for name in ("request", "paced", "chunk"))
    errors = f"{ours['open_errors'] or 'no'} error{'s' * (ours['open_errors'] > 1)}"
    return {
        "measured": f"{request} ({ours['request_us']:.0f} us beside {nginx['request_us']:.0f}), "
        f"{paced} ({ours['paced_us']:.0f} us beside {nginx['paced_us']:.0f}), "
        f"{chunk} ({ours['chunk_us']:.0f} us beside {nginx['chunk_us']:.0f}); "
        f"{ours['most_open']:,} open streams, {errors}"
    }


def routing(data: Any) -> dict[str, str]:
    whole_ms = [us / 1000 for us in data["router_us"]]
    return {"measured": f"{span(data['look_ahead_us'], '.0f', 'us')}, {span(whole_ms, '.2f', 'ms')}"}


def vllm_start(data: Any) -> dict[str, str]:
    plain, parked = (span(data["starts"][kind]["first_token_s"], ".1f", "s") for kind in ("plain", "parked"))
    return {"measured": f"{plain}, {parked}: {ratio(data['plain_over_parked'], '.0f')}"}


def coldstart(data: Any) -> dict[str, str]:
    kinds = ("streamed", "stages-2", "stages-4")
    middle = "; ".join(f"{median(data['kinds'][kind]['ttft_s']):.1f} s" for kind in kinds)
    return {"measured": f"{middle}: {ratio(data['streamed_over']['stages-4'], '.1f')}"}


def engine_start(data: Any) -> dict[str, str]:
    def medians(name: str, form: str) -> str:
        return ", ".join(f"{median(data['starts'][kind][name]):{form}} s" for kind in ("plain", "parked"))

    return {"measured": f"{medians('first_token_s', '.2f')}, of which launch {medians('launch_s', '.3f')}"}


def throughput(data: Any) -> dict[str, str]:
    """The throughput figures. Raises StatisticsError, a ValueError, if a contender lacks a run with one stream or with
    four."""

    def rates(contender: str) -> list[float]:
        streams = [one for one in data["samples"] if one["contender"] == contender and one["kind"] == "stream"]
        return [median(one["tokens_per_s"] for one in streams if one["num_requests"] == at) for at in (1, 4)]

    raw, fleet = rates("raw"), rates("fleet")
    each = ", ".join(f"{ours / theirs:.2f}" for ours, theirs in zip(fleet, raw, strict=True))
    return {"measured": f"{raw[0]:.1f} and {raw[1]:.1f}; {fleet[0]:.1f} and {fleet[1]:.1f} ({each})"}


def swap(data: Any) -> dict[str, str]:
    figures = data["figures"]
    how = "parked" if "parked_start_to_first_token_s" in figures else "plain"
    start = figures["parked_start_to_first_token_s" if how == "parked" else "start_to_first_token_s"]
    asleep, exchanged = figures["swapped_out_to_first_token_s"], figures["exchange_to_first_token_s"]
    return {"measured": f"{median(start):.2f} s {how}, {median(asleep):.2f} s, {median(exchanged):.2f} s"}


def systems(data: Any) -> dict[str, str]:
    names = ("serverless_vllm", "union", "union+asleep")
    rows = [data["systems"][name] for name in names]
    cells = [f"{_ttft(row['ttft_s'])} ({_ttft(row['simulated_ttft_s']).removesuffix(' s')})" for row in rows]
    cells[1] += f": {rows[1]['ttft_s']['p95'] / rows[0]['ttft_s']['p95']:.2f} of it"
    firsts = [
        f"{what} {span(medians, '.2f', 's')}"
        for what, kind in (("from sleep", "wake"), ("of a fresh start", "fresh"))
        if (medians := [took for row in rows if (took := row["first_token_s_p50"].get(kind)) is not None])
    ]
    failed = sum(row["num_failed"] for row in rows)
    parts = [*cells, f"first token {', '.join(firsts)} (medians)", *([f"{failed} requests failed"] if failed else [])]
    return {"measured": "; ".join(parts)}


def _ttft(ttft_s: Mapping[str, float]) -> str:
    return seconds((ttft_s[name] for name in ("p50", "p95", "p99")), ".2f")


def console(data: Any) -> dict[str, str]:
    paints = (f"{data[name] / 1000:.2f} s" for name in ("first_paint_ms_p50", "fleet_drawn_ms_p50"))
    events = (f"{data[name] / 1000:.3f} s" for name in ("event_to_page_ms_p50", "event_to_page_ms_p95"))
    return {"measured": ", ".join((*paints, *events))}


def adapters(data: Any) -> dict[str, str]:
    found = {}
    for way, one in data.items():
        found[f"{way}_answered"] = f"{one['num_answered']:,} of {one['num_requests']:,}"
        found[f"{way}_ttft"] = ", ".join(f"{one[f'ttft_s_{name}']:.2f}" for name in ("p50", "p95", "p99")) + " s"
        found[f"{way}_gpu"] = f"{one['gpu_seconds']:,}"
    return {**found, "measured": "; ".join(found[f"{way}_ttft"] for way in data)}


def simulator(data: Any) -> dict[str, str]:
    cases = data["cases"]
    warm, longer = cases["warmserve"], cases["warmserve, four times as long"]
    decided = cases["scale, 15 minutes, union"]["decisions"]
    longest_ms = max(one["max_ms"] for one in decided.values())
    return {
        "measured": f"{round(warm['requests_per_cpu_s'], -2):,.0f}, {cases['hydraserve, an hour']['cpu_s']:.1f} s, "
        f"{decided['placements']['p50_ms']:.1f} ms; {longest_ms:.0f} ms; {warm['peak_mib']:.0f} MiB, "
        f"{longer['peak_mib']:.0f} MiB of a trace four times as long"
    }
