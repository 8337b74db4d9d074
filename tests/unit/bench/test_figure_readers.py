"""Each figure of docs/figures.md as its reader prints it, from a small benchmark output."""

import json
from collections import Counter
from pathlib import Path

import pytest

from bench import engine_start, first_use, recovery, systems
from bench.coldstart import run as coldstart
from bench.console import run as console
from bench.figures import readers
from bench.figures.declared import BENCHMARKS
from bench.measured.data import write_data
from bench.router import run as router
from bench.throughput import run as throughput
from tests.chaos.test_kill_services import Ledger


def printed(name: str, data: dict[str, object], folder: Path) -> str:
    write_data(folder / "figures.json", data)
    (one,) = (one for one in BENCHMARKS if one.name == name)
    assert one.read is not None
    figures = one.read(json.loads((folder / "figures.json").read_text()))
    assert list(figures) == ["measured"]
    return figures["measured"]


def test_a_range_whose_ends_print_alike_is_one_figure() -> None:
    assert readers.span([33.2, 41.0], ".0f", "us") == "33-41 us"
    assert readers.span([33.2, 33.4], ".0f", "us") == "33 us"


def test_a_range_of_ratios_says_how_many_runs_have_one() -> None:
    assert readers.ratios([5.8, 5.5], ".1f") == "5.5x-5.8x"
    assert readers.ratios([5.51, 5.52], ".1f") == "5.5x"
    assert readers.ratios([10.2, 9.5], ".1f") == "9.5x-10.2x"
    assert readers.ratios([None, 5.5], ".1f") == "5.5x (1 of 2 runs: in others loads differed)"
    assert readers.ratios([None, None], ".1f") == readers.NO_RATIO


def test_data_has_no_number_that_json_lacks_and_goes_nowhere_without_a_path(tmp_path: Path) -> None:
    write_data(None, {"a": 1})
    with pytest.raises(ValueError, match="nan"):
        write_data(tmp_path / "figures.json", {"a": float("nan")})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("installed-start", "4.8-6.0 s"),
        ("llamacpp-cold", "0.75-0.78 s"),
        ("llamacpp-warm", "0.015-0.026 s"),
        ("fleet-memory", "0.50-0.75 GiB"),
    ],
)
def test_first_use(name: str, text: str, tmp_path: Path) -> None:
    rounds = [
        first_use.Round(4.81, 0.78, [0.015, 0.02], 512 << 20, 0.3),
        first_use.Round(6.0, 0.75, [0.026], 768 << 20, 0.4),
    ]
    assert printed(name, first_use.as_data(rounds), tmp_path) == text


def test_recovery_names_those_whose_streams_were_harmed(tmp_path: Path) -> None:
    whole, broken = Ledger(Counter({"done": 80})), Ledger(Counter({"done": 70, "connection lost": 10}))
    seen = {"placer-1": (0.52, whole), "router-1": (2.96, broken), "nats": (1.0, whole)}
    text = printed("recovery", recovery.as_data(seen), tmp_path)
    assert text == "0.5-3.0 s; streams unharmed but those of a killed router"
    seen["router-1"] = 2.96, whole
    assert printed("recovery", recovery.as_data(seen), tmp_path) == "0.5-3.0 s; streams unharmed"


def test_bus_latency_and_routing(tmp_path: Path) -> None:
    assert printed("bus-latency", {"handler_ms_p50": {"evt": 0.84, "cmd": 3.0}}, tmp_path) == "0.8 ms"
    data: dict[str, object] = {"look_ahead_us": [29.1, 36.4], "router_us": [41.0, 44.0]}
    assert printed("routing", data, tmp_path) == "29-36 us, 0.04 ms"


def _proxy(name: str, request_us: float, chunk_us: float, errors: int) -> router.Proxy:
    def sample(case: str, streams: int, events: int, cpu_us: float) -> router.Sample:
        return router.Sample(name, case, streams, events, errors if case == "open" else 0, 2000, cpu_us, 1.0,
                             21_000, 22_000, 0, 0, load=0.5)  # fmt: skip

    return router.Proxy(name, 0, 0, samples=[
        sample("requests", 100, 200, 100 * request_us),
        sample("paced", 100, 200, 100 * (request_us + 60)),
        sample("chunks", 10, 120, 10 * request_us + 100 * chunk_us),
        sample("open", 2000, 4000, 1e6),
    ])  # fmt: skip


def test_router(tmp_path: Path) -> None:
    nginx = _proxy(router.NGINX, 40.0, 43.0, 0)
    runs = [[nginx, _proxy(router.OURS, us, chunk, 0)] for us, chunk in ((200.0, 86.0), (240.0, 90.3))]
    text = printed("router", router.as_data(runs), tmp_path)
    assert text == (
        "5.0x-6.0x (220 us beside 40), 2.6x-3.0x (280 us beside 100), 2.0x-2.1x (88 us beside 43); "
        "2,000 open streams, no error"
    )
    failing = [[nginx, _proxy(router.OURS, 200.0, 86.0, 3)]]
    assert printed("router", router.as_data(failing), tmp_path).endswith("2,000 open streams, 3 errors")
    with pytest.raises(ValueError, match="without nginx"):
        printed("router", router.as_data([[_proxy(router.OURS, 200.0, 86.0, 0)]]), tmp_path)


def _starts(seconds: list[float], load: float) -> list[dict[str, float]]:
    return [{"launch_s": took / 10, "first_token_s": took, "tokens_per_s": 80.0, "load": load} for took in seconds]


def test_vllm_start(tmp_path: Path) -> None:
    plain = _starts([18.0, 20.0, 24.0], 1.0)
    text = printed("vllm-start", engine_start.as_data({"plain": plain, "parked": _starts([2, 2, 1.5], 1.2)}), tmp_path)
    assert text == "18.0-24.0 s, 1.5-2.0 s: 10x (9x to 16x)"
    text = printed("vllm-start", engine_start.as_data({"plain": plain, "parked": _starts([2.0], 40.0)}), tmp_path)
    assert text == f"18.0-24.0 s, 2.0 s: {readers.NO_RATIO}"


def test_coldstart(tmp_path: Path) -> None:
    def seen(ttft_s: float, num_stages: int) -> list[coldstart.Seen]:
        return [coldstart.Seen(ttft_s, 0.05, 0.1, "", {}, num_stages, 2.0) for _ in range(2)]

    starts = {"streamed": seen(15.6, 1), "stages-2": seen(10.3, 2), "stages-4": seen(6.5, 4)}
    data = coldstart.as_data(starts, 273_000_000, 20e6)
    assert data["streamed_over"]["stages-4"] == {"middle": 2.4, "low": 2.4, "high": 2.4}  # type: ignore[index]
    assert printed("coldstart", data, tmp_path) == "15.6 s; 10.3 s; 6.5 s: 2.4x (2.4x to 2.4x)"
    assert coldstart.as_data({"parked": seen(9.0, 1)}, 1, 1.0)["streamed_over"] == {}


def test_engine_start(tmp_path: Path) -> None:
    starts = {"plain": _starts([0.46, 0.44, 0.9], 1.0), "parked": _starts([0.39], 1.0)}
    text = printed("engine-start", engine_start.as_data(starts), tmp_path)
    assert text == "0.46 s, 0.39 s, of which launch 0.046 s, 0.039 s"
    assert "plain_over_parked" not in engine_start.as_data({"emulated": _starts([2.0], 1.0)})


def test_throughput_is_of_medians_of_streams(tmp_path: Path) -> None:
    def sample(name: str, at: int, rate: float, kind: str = "stream") -> dict[str, object]:
        one = throughput.Sample(name, kind, at, rate, 2 * rate, 3.0, 0.5)
        return {field: getattr(one, field) for field in throughput.Sample.__dataclass_fields__}

    samples = [sample("raw", 1, rate) for rate in (80.0, 300.0, 10.0)] + [sample("raw", 4, 100.0)]
    samples += [sample("fleet", 1, 76.0), sample("fleet", 4, 90.0), sample("fleet", 1, 1.0, "whole")]
    assert printed("throughput", {"samples": samples}, tmp_path) == "80.0 and 100.0; 76.0 and 90.0 (0.95, 0.90)"


@pytest.mark.parametrize(
    ("name", "start", "text"),
    [
        ("swap", "start_to_first_token_s", "0.46 s plain, 0.10 s, 0.12 s"),
        ("swap-vllm", "parked_start_to_first_token_s", "0.46 s parked, 0.10 s, 0.12 s"),
    ],
)
def test_swap_says_how_its_engine_starts(name: str, start: str, text: str, tmp_path: Path) -> None:
    rungs = {"swapped_out_to_first_token_s": [0.1, 0.1, 0.4], "exchange_to_first_token_s": [0.12]}
    assert printed(name, {"figures": {start: [0.46], **rungs}}, tmp_path) == text


def test_systems(tmp_path: Path) -> None:
    def seen(ttft: list[float], first: dict[str, list[float]], num_failed: int = 0) -> systems.Seen:
        return systems.Seen(ttft=ttft, simulated=[0.1, 0.2], first=first, num_failed=num_failed, loads=[0.5])

    by_name = {
        "serverless_vllm": seen([0.14, 1.0, 2.0], {"cold": [1.25]}),
        "union": seen([0.13, 0.5, 1.0], {"wake": [0.2, 0.23, 0.4], "cached": [0.9]}),
        "union+asleep": seen([0.14, 0.5, 1.0], {"wake": [0.25]}),
    }
    text = printed("systems", systems.as_data(by_name), tmp_path)
    assert text == (
        "1.00, 2.00, 2.00 s (0.20, 0.20, 0.20); 0.50, 1.00, 1.00 s (0.20, 0.20, 0.20): 0.50 of it; "
        "0.50, 1.00, 1.00 s (0.20, 0.20, 0.20); "
        "first token from sleep 0.23-0.25 s, of a fresh start 0.90-1.25 s (medians)"
    )
    by_name["union"] = seen([0.13], {}, num_failed=2)
    assert printed("systems", systems.as_data(by_name), tmp_path).endswith("; 2 requests failed")
    assert systems.as_data({"union": systems.Seen()})["systems"]["union"]["ttft_s"] is None  # type: ignore[index]


def test_console(tmp_path: Path) -> None:
    rows = [
        console.Row("first paint", 250.0, "ms", 1500, "first_paint_ms_p50"),
        console.Row("the slowest", 900.0, "ms"),
        console.Row("drawn", 660.0, "ms", 1500, "fleet_drawn_ms_p50"),
        console.Row("event", 47.0, "ms", 100, "event_to_page_ms_p50"),
        console.Row("95 of 100", 116.0, "ms", 100, "event_to_page_ms_p95"),
    ]
    assert printed("console", console.as_data(rows), tmp_path) == "0.25 s, 0.66 s, 0.047 s, 0.116 s"


def test_simulator(tmp_path: Path) -> None:
    decisions = {"placements": {"p50_ms": 1.02, "max_ms": 3.0}, "autoscaler": {"p50_ms": 0.1, "max_ms": 20.1}}
    data: dict[str, object] = {
        "cases": {
            "warmserve": {"requests_per_cpu_s": 11_692.3, "peak_mib": 63.2},
            "warmserve, four times as long": {"requests_per_cpu_s": 10_746.0, "peak_mib": 61.8},
            "hydraserve, an hour": {"cpu_s": 4.61},
            "scale, 15 minutes, union": {"decisions": decisions},
        }
    }
    wanted = "11,700, 4.6 s, 1.0 ms; 20 ms; 63 MiB, 62 MiB of a trace four times as long"
    assert printed("simulator", data, tmp_path) == wanted
