"""Small values: addresses, sizes, durations, engine keys, instances, GPUs."""

import pytest

from glowplug.domain.address import PortRange, advertised, http_url, reachable, rendezvous
from glowplug.domain.engine_key import engine_key
from glowplug.domain.hardware import Gpu, Grant, GrantOwner
from glowplug.domain.instance import InstanceState, Phase, PhaseName
from glowplug.domain.units import parse_bytes, parse_seconds, show_bytes
from tests.fleet_builder import an_instance


def test_urls() -> None:
    assert http_url("10.0.0.3", 8080) == "http://10.0.0.3:8080"
    assert http_url("fd00::1", 8080) == "http://[fd00::1]:8080"
    assert (reachable("0.0.0.0"), reachable("::"), reachable("10.0.0.3")) == ("127.0.0.1", "::1", "10.0.0.3")
    assert advertised("http://127.0.0.1:20001", "node-1") == "http://node-1:20001"
    assert advertised("", "node-1") == "", "what has no server is nowhere"
    assert advertised("http://[::1]:20001", "") == "http://[::1]:20001"


def test_port_ranges() -> None:
    assert PortRange.parse("") is None
    assert PortRange.parse("20000-20199") == PortRange(20000, 20199) and len(PortRange(20000, 20199)) == 200
    assert str(PortRange.parse("7-7")) == "7-7"


@pytest.mark.parametrize("text", ["20000", "20199-20000", "0-5", "1-65536", "a-b", "-", "1-2-3", "+1-5", "1--5"])
def test_what_is_no_range(text: str) -> None:
    with pytest.raises(ValueError, match="expected first-last"):
        PortRange.parse(text)


GIB = 1 << 30


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("1GiB", GIB),
        ("700MiB", 700 << 20),
        ("1.5GB", 1_500_000_000),
        ("512", 512),
        (" 2 g ", 2 * GIB),
        ("80 KiB", 81920),
    ],
)
def test_sizes(text: str, num_bytes: int) -> None:
    assert parse_bytes(text) == num_bytes


@pytest.mark.parametrize("text", ["", "GiB", "-1GiB", "1 zib", "1e9", "nan", "1GiBs"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(ValueError, match="not a size"):
        parse_bytes(text)


@pytest.mark.parametrize(
    ("num_bytes", "shown"), [(0, "0 B"), (1023, "1023 B"), (1 << 20, "1.0 MiB"), (700 << 20, "700 MiB")]
)
def test_sizes_shown(num_bytes: int, shown: str) -> None:
    assert show_bytes(num_bytes) == shown


@pytest.mark.parametrize(
    ("text", "seconds"), [("5m", 300.0), ("250ms", 0.25), ("-1", -1.0), ("1.5 H", 5400.0), ("2w", 1209600.0)]
)
def test_durations(text: str, seconds: float) -> None:
    assert parse_seconds(text) == seconds


@pytest.mark.parametrize("text", ["", "soon", "3 parsecs", "1e9", "nan"])
def test_what_is_no_duration(text: str) -> None:
    with pytest.raises(ValueError, match="not a duration"):
        parse_seconds(text)


def test_a_key_needs_both_and_differs_by_both() -> None:
    key = engine_key("secret", "1")
    assert len(key) >= 40 and key == engine_key("secret", "1")
    assert len({key, engine_key("secret", "2"), engine_key("other", "1")}) == 3
    assert engine_key("", "1") == engine_key("secret", "") == ""
    assert "secret" not in key


@pytest.mark.parametrize("state", InstanceState)
def test_an_instance_is_gone_coming_or_neither(state: InstanceState) -> None:
    assert not (state.is_gone and state.is_coming)
    assert state.is_gone == (state.value in ("stopped", "failed"))
    assert state.is_coming == (state.value in ("starting", "loading"))


def test_an_instance_is_where_its_first_worker_is() -> None:
    instance = an_instance(gpu_id="node-1/0")
    assert (instance.node_id, instance.gpu_id) == ("node-1", "node-1/0")


def test_the_free_bytes_of_a_gpu_are_what_no_grant_holds_and_sleepers_lack_what_is_over() -> None:
    of_each = [Grant(holder="i", owner=owner, num_bytes=10) for owner in GrantOwner]
    grants, sleepers = tuple(of_each[:-1]), (Grant(holder="s", owner=GrantOwner.SLEEPER, num_bytes=70),)
    gpu = Gpu(gpu_id="g", total_bytes=100, grants=grants, sleepers=sleepers)
    assert (gpu.free_bytes, gpu.lacking_bytes) == (60, 10)


def test_a_phase_lasts_from_start_to_end() -> None:
    assert Phase(name=PhaseName.LOAD, started_at=2.0, ended_at=3.5).actual_s == 1.5


@pytest.mark.parametrize("host", ["10.0.0.1", "node-1", "[fd00::1]"])
def test_a_pipeline_meets_at_one_port_of_the_range(host: str) -> None:
    found = {rendezvous(f"{host}:29500-29503", f"i-{number}") for number in range(100)}
    assert found == {f"{host}:{port}" for port in range(29500, 29504)}
    assert rendezvous(f"{host}:29500-29503", "i-1") == rendezvous(f"{host}:29500-29503", "i-1")


@pytest.mark.parametrize("stages_at", ["", "node-1", "node-1:", "node-1:5", ":29500-29503", "node-1:9-8"])
def test_a_node_without_a_range_offers_no_place_to_meet(stages_at: str) -> None:
    assert rendezvous(stages_at, "i-1") == ""
