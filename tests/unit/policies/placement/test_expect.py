"""A placement's expectation of a start."""

from dataclasses import replace
from typing import Any

import pytest

from glowplug.domain.hardware import CachedWeights, Link
from glowplug.domain.instance import Instance, InstanceState, Phase, PhaseName
from glowplug.domain.model import WeightsRef
from glowplug.fleet.start_times import PRIORS, Prior, StartKind, StartTimes
from glowplug.policies.decisions import PlaceDecision, StageDecision
from glowplug.policies.placement.expect import Expected, expect, offer_of, stage_seconds
from glowplug.policies.placement.hydraserve_allocation import StageSeconds
from glowplug.policies.placement.links import Fetch, LinkLedger
from glowplug.policies.placement.port import PlacementView, PlaceRequest
from glowplug.policies.registry import choose, installed
from tests.fleet_builder import a_model, a_node, an_instance

GB = 10**9
URI = "s3://w"
MODEL = a_model(weights=WeightsRef(uri=URI, num_bytes=8 * GB), weights_bytes=8 * GB)
GPU_MIB = (40_000,)
HERE = CachedWeights(digest=MODEL.weights.digest, num_bytes=8 * GB, model_keys=("another",))


def node(**fields: Any) -> Any:
    return a_node("node-1", gpus_mib=GPU_MIB, **fields)


def times(kind: str = "cold", **seconds: float) -> StartTimes:
    """One start, seen on another node."""
    found, phases, now = StartTimes(), [], 100.0
    for name, took in seconds.items():
        phases.append(Phase(name=PhaseName(name), started_at=now, ended_at=now + took))
        now += took if name != "fetch" else max(0.0, took - seconds.get("launch", 0.0))
    row = an_instance(
        "i-0", gpu_id="node-9/0", gpu_kind="host", start_kind=kind, phases=tuple(phases), created_at=100.0, ready_at=now
    )
    found.learn(row, MODEL)
    return found


def expected(at: Any, *, source: str = "", **view: Any) -> Expected:
    stage = StageDecision(node_id="node-1", gpu_ids=("node-1/0",), bytes_per_gpu=8 * GB)
    request = PlaceRequest(instance_id="i-1", model=MODEL)
    found = expect(
        PlaceDecision(stages=(stage,), source=source), request, PlacementView(now_s=200.0, nodes=[at], **view)
    )
    assert found is not None
    return found


def asleep(state: InstanceState, **fields: Any) -> dict[str, list[Instance]]:
    return {"node-1": [an_instance("r-1", state=state, **fields)]}


def test_a_first_start_has_its_engines_prior() -> None:
    found = expected(node(), times=StartTimes())
    assert found.kind == "cold" and found.start_s == pytest.approx(4.0 + 0.8 + 0.5, abs=0.1)
    assert found.ttft_s == pytest.approx(found.start_s + 0.05)


def test_weights_that_another_model_brought_are_not_fetched_again() -> None:
    """Fault: they share a copy, yet the start was predicted with its own fetch."""
    known = times("cold", fetch=6.0, launch=2.0, load=1.0, warmup=0.5)
    assert expected(node(), times=known).start_s == pytest.approx(7.5)
    cached = expected(node(cached=(HERE,)), times=known)
    assert cached.kind == "cached" and cached.start_s == pytest.approx(3.5)


def test_weights_on_the_nodes_disk_come_at_its_rate_and_load_no_link() -> None:
    known, card = times("disk", fetch=2.0, launch=1.0, load=1.0), Link(link_id="node-1/nic", bytes_per_s=1.0 * GB)
    busy = LinkLedger(
        bytes_per_s=1.0 * GB, since_s=200.0, fetches=(Fetch(fetch_id="x", left_bytes=9e9, deadline_at=900.0),)
    )
    at = node(links=(card,), on_disk=(HERE,), disk_bytes_per_s=2.0 * GB)
    measured = expected(at, times=known, links={"node-1": busy})
    assert (measured.kind, measured.start_s, measured.by_phase[0]["fetch"]) == ("disk", pytest.approx(5.0), 4.0)
    seen = expected(replace(at, disk_bytes_per_s=0.0), times=known, links={"node-1": busy})
    assert seen.start_s == pytest.approx(3.0)
    assert expected(replace(at, cached=(HERE,)), times=known).kind == "cached"


def test_a_declared_link_is_shared_with_those_that_fetch_over_it() -> None:
    known, card = times("cold", fetch=6.0, launch=2.0, load=1.0), Link(link_id="node-1/nic", bytes_per_s=1.0 * GB)
    alone = expected(node(links=(card,)), times=known)
    busy = LinkLedger(
        bytes_per_s=1.0 * GB, since_s=200.0, fetches=(Fetch(fetch_id="x", left_bytes=9e9, deadline_at=900.0),)
    )
    beside = expected(node(links=(card,)), times=known, links={"node-1": busy})
    assert (alone.start_s, beside.start_s) == (pytest.approx(9.0), pytest.approx(17.0))


def test_only_an_engine_that_declares_it_streams() -> None:
    """Eq. 5."""
    known = times("cached", launch=2.0, load=3.0, warmup=0.5)
    card = (Link(link_id="node-1/nic", bytes_per_s=1.0 * GB),)
    plain = expected(node(links=card), times=known)
    streamed = expected(node(links=card, abilities=("emulated:stream",)), times=known)
    assert plain.start_s == pytest.approx(8.0 + 3.0 + 0.5)
    assert streamed.start_s == pytest.approx(8.0 + 0.5, abs=0.02), "and the last chunk"
    assert streamed.by_phase[0]["load"] == plain.by_phase[0]["load"] == pytest.approx(3.0)


@pytest.mark.parametrize(
    ("state", "kind", "seconds"), [(InstanceState.SWAPPED_OUT, "wake", 0.85), (InstanceState.PREWARMED, "growth", 0.01)]
)
def test_wakes_and_growths_have_a_figure_too(state: InstanceState, kind: str, seconds: float) -> None:
    found = expected(node(), source="r-1", dormant=asleep(state), times=StartTimes())
    assert (found.kind, found.start_s) == (kind, pytest.approx(seconds))
    assert found.ttft_s == pytest.approx(seconds + 0.05)
    learned = times(kind, load=1.757)
    assert expected(node(), source="r-1", dormant=asleep(state), times=learned).by_phase == (
        {"load": pytest.approx(1.757)},
    )


def test_who_joins_a_replica_on_its_way_waits_for_what_is_left_of_it() -> None:
    known = times("cached", launch=2.0, load=3.0, warmup=0.5)
    coming = asleep(InstanceState.STARTING, replica=True, created_at=198.0)
    found = expected(node(cached=(HERE,)), source="r-1", dormant=coming, times=known)
    assert found.kind == "join" and found.start_s == pytest.approx(3.5 + 0.01)
    late = asleep(InstanceState.LOADING, replica=True, created_at=100.0)
    assert expected(node(cached=(HERE,)), source="r-1", dormant=late, times=known).start_s == pytest.approx(0.01)


def test_the_first_token_is_what_it_was_for_those_who_waited() -> None:
    found = expected(node(), times=StartTimes(), first_token_s={"m": 0.3})
    assert found.ttft_s == pytest.approx(found.start_s + 0.3)
    measured = expected(node(), times=StartTimes(), seconds={"m": StageSeconds(prefill_s=0.7)})
    assert measured.ttft_s == pytest.approx(found.start_s + 0.7)


def test_a_pipeline_is_ready_with_its_last_stage_and_slower_by_those_that_share_a_gpu() -> None:
    links = [Link(link_id=f"node-{n}/nic", bytes_per_s=n * GB) for n in (1, 2)]
    nodes = [a_node(f"node-{n}", gpus_mib=GPU_MIB * 2, links=links[n - 1 : n]) for n in (1, 2)]
    model = replace(MODEL, weights_bytes=10 * GB, num_gpus=2)
    stages = tuple(
        StageDecision(node_id=f"node-{n}", gpu_ids=(f"node-{n}/0", f"node-{n}/1"), bytes_per_gpu=num_bytes,
                      fetch_bytes=4 * GB, part_bytes=part_bytes)
        for n, num_bytes, part_bytes in ((1, 5 * GB, 6 * GB), (2, 2 * GB, 0))
    )  # fmt: skip
    view = PlacementView(
        now_s=200.0, nodes=nodes, times=StartTimes(), seconds={"m": StageSeconds(prefill_s=0.8, hop_s=0.1)}
    )
    request = PlaceRequest(instance_id="i", model=model)
    found = expect(PlaceDecision(stages=stages), request, view)
    assert found is not None
    by_rank_s = [10 * 6 / 8 / 2 / 10, 10 / 2 / 2 / 10]  # its part of the weights, over each GPU's PCIe
    assert [phases["load"] for phases in found.by_phase] == pytest.approx(by_rank_s)
    assert [phases["fetch"] for phases in found.by_phase] == pytest.approx([6.0, 2.0])
    assert found.start_s == pytest.approx(6.0 + by_rank_s[0] + 0.5 + 0.05)
    assert found.ttft_s - found.start_s == pytest.approx(0.8 * 1.5 + 0.1), "one full-memory worker of two"
    assert expect(PlaceDecision(stages=stages), request, replace(view, nodes=nodes[:1])) is None


def test_libraries_load_beside_the_weights_as_far_as_the_engine_says() -> None:
    known = StartTimes(priors={"emulated": Prior(launch_s=2.0, library_s=0.5, warmup_s=0.3, rest_s=0.1, look_s=0.5)})
    view = PlacementView(now_s=200.0, nodes=[], times=known)
    found = stage_seconds(MODEL, "host", view, StartKind.COLD)
    assert (found.container_s, found.library_s, found.warmup_s) == (1.5, 0.5, pytest.approx(0.4))
    assert offer_of(node(), MODEL, view, StartKind.CACHED).link.bytes_per_s == 16 * GB, "8 GB are found in 0.5 s"
    at_once = replace(view, times=StartTimes(priors={"emulated": Prior(launch_s=2.0)}))
    assert offer_of(node(), MODEL, at_once, StartKind.CACHED).link.bytes_per_s == float("inf")
    empty = replace(MODEL, weights=WeightsRef(uri=URI), weights_bytes=0)
    assert offer_of(node(), empty, view, StartKind.CACHED).link.bytes_per_s == float("inf")


def test_each_stage_of_a_pipeline_fetches_and_loads_its_part() -> None:
    nodes = [
        a_node(f"node-{n}", gpus_mib=GPU_MIB, links=(Link(link_id=f"node-{n}/nic", bytes_per_s=1.0 * GB),))
        for n in (1, 2)
    ]
    stages = tuple(
        StageDecision(node_id=f"node-{n}", gpu_ids=(f"node-{n}/0",), bytes_per_gpu=4 * GB, fetch_bytes=4 * GB)
        for n in (1, 2)
    )
    view = PlacementView(now_s=200.0, nodes=nodes, times=times("cold", fetch=9.0, launch=2.0, load=1.0))
    found = expect(PlaceDecision(stages=stages), PlaceRequest(instance_id="i", model=MODEL), view)
    assert found is not None and found.start_s == pytest.approx(4.0 + 0.5)
    assert [phases["fetch"] for phases in found.by_phase] == pytest.approx([4.0, 4.0])


@pytest.mark.parametrize("policy", installed("placement"))
def test_every_policys_placement_has_a_prediction(policy: str) -> None:
    view = PlacementView(now_s=200.0, nodes=[node()], times=StartTimes())
    request = PlaceRequest(instance_id="i", model=MODEL)
    found = expect(choose("placement", policy)(request, view), request, view)
    assert found is not None and found.start_s == pytest.approx(5.3, abs=0.1)


def test_nothing_is_expected_where_nothing_starts() -> None:
    assert (
        expect(PlaceDecision(), PlaceRequest(instance_id="i", model=MODEL), PlacementView(now_s=0.0, nodes=[])) is None
    )


def test_the_ability_decides_whether_the_load_follows_the_fetch_or_runs_beside_it() -> None:
    """8 GB at 1 GB/s, then the load; streamed, only its tail follows."""
    model = replace(MODEL, engine="vllm")
    stage = StageDecision(node_id="node-1", gpu_ids=("node-1/0",), bytes_per_gpu=8 * GB)
    prior, links = PRIORS["vllm"], (Link(link_id="node-1/nic", bytes_per_s=GB),)
    after_s = prior.warmup_s + prior.rest_s
    found = {}
    for abilities in ((), ("vllm:stream",)):
        view = PlacementView(now_s=200.0, nodes=[node(links=links, abilities=abilities)], times=StartTimes())
        request = PlaceRequest(instance_id="i-1", model=model)
        found[abilities] = expect(PlaceDecision(stages=(stage,)), request, view)
    whole, streamed = found.values()
    assert whole is not None and streamed is not None
    assert whole.by_phase[0]["load"] > prior.load_s
    assert whole.start_s == pytest.approx(8.0 + whole.by_phase[0]["load"] + after_s)
    assert streamed.start_s == pytest.approx(8.0 + prior.tail_s + after_s)
    assert streamed.by_phase[0]["load"] == pytest.approx(8.0 + prior.tail_s - prior.launch_s), "beside the fetch"
    at = node(links=links, abilities=("vllm:stream",), cached=(HERE,))
    cached = expect(PlaceDecision(stages=(stage,)), request, replace(view, nodes=[at]))
    assert cached is not None and cached.by_phase[0]["load"] == whole.by_phase[0]["load"], "nothing arrives"


@pytest.mark.parametrize("streams", [False, True])
def test_a_start_beside_busy_cores_takes_longer_but_for_its_fetch(streams: bool) -> None:
    """Seven threads run on two cores, and it is the eighth."""
    model = replace(MODEL, engine="llamacpp")
    known = StartTimes(priors={"llamacpp": Prior(launch_s=1.0, load_s=2.0, load_bytes_per_s=1e15, warmup_s=1.0)})
    abilities = ("llamacpp:stream",) if streams else ()
    at = a_node("node-1", gpus_mib=GPU_MIB, engines=("llamacpp",), cached=(HERE,), abilities=abilities)
    stage = StageDecision(node_id="node-1", gpu_ids=("node-1/0",), bytes_per_gpu=8 * GB)

    def start_s(num_runnable: float) -> Expected:
        here = replace(at, num_cores=2.0, num_runnable=num_runnable)
        request, view = (
            PlaceRequest(instance_id="i-1", model=model),
            PlacementView(now_s=1.0, nodes=[here], times=known),
        )
        found = expect(PlaceDecision(stages=(stage,)), request, view)
        assert found is not None
        return found

    idle, busy = start_s(1.0), start_s(7.0)
    assert (idle.slowdown, busy.slowdown) == (1.0, 2.0)
    assert busy.start_s == pytest.approx(2 * idle.start_s)
    emulated = expected(replace(node(), num_cores=2.0, num_runnable=6.0), times=StartTimes())
    assert emulated.slowdown == 1.0 and emulated.start_s == expected(node(), times=StartTimes()).start_s
