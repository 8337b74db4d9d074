"""Links and stages in the placer (HydraServe sections 4.1 and 4.2)."""

from dataclasses import replace

import pytest

from glowplug.controllers.placer.network import Network
from glowplug.controllers.placer.params import PlacerParams
from glowplug.controllers.placer.placement import Placement, Sent
from glowplug.domain.hardware import CachedWeights, Link
from glowplug.domain.instance import InstanceState, Phase, PhaseName
from glowplug.domain.model import Slo, WeightsRef
from glowplug.events.commands import PlaceInstance
from glowplug.policies.decisions import StageDecision
from glowplug.policies.placement.hydraserve_allocation import StageSeconds
from tests.fleet_builder import a_model, a_node, an_event, an_instance
from tests.unit.controllers.placer.rig import finished

MODEL = a_model("m", weights=WeightsRef(uri="s3://w", num_bytes=8000), slo=Slo(ttft_s=5.0))
NODE = a_node(links=(Link(link_id="node-1/nic", bytes_per_s=1000.0),))
STAGES = StageSeconds(container_s=1.0, cuda_s=1.0, library_s=2.0, prefill_s=0.5)


def placed(instance_id="x", *, fetch_bytes=0, source="", model=MODEL):
    command = PlaceInstance(instance_id=instance_id, model=model, reason="", wanted_at=10.0)
    stage = StageDecision(node_id="node-1", gpu_ids=("node-1/0",), bytes_per_gpu=1, fetch_bytes=fetch_bytes)
    sent = Sent((stage,), source, {}, (), started_at=10.0, sent_at=10.0)
    return Placement(an_event(command), 10.0, 10.0, sent)


def network(**fields):
    """Without priors: times neither learned nor set are 0."""
    return Network(PlacerParams(**fields), priors={})


def started(instance_id, model_key="m", *, at=1.0, **seconds):
    phases, now = [], at
    for name, took in seconds.items():
        phases.append(Phase(name=PhaseName(name), started_at=now, ended_at=now + took))
        now += took
    return an_instance(instance_id, model_key, phases=tuple(phases), created_at=at, ready_at=now, gpu_kind="host")


def left(net):
    return {f.fetch_id: f.left_bytes for f in net.links["node-1"].fetches} if "node-1" in net.links else {}


def test_a_start_is_a_fetch_on_its_nodes_link_due_by_the_objective():
    net = network()
    net.ordered(placed(fetch_bytes=4000), {"node-1": NODE}, 10.0)
    (fetch,) = net.links["node-1"].fetches
    assert (fetch.left_bytes, net.links["node-1"].bytes_per_s) == (4000, 1000.0)
    load_s = MODEL.weights_bytes / 32e9  # not streamed: it follows the fetch
    assert fetch.deadline_at == pytest.approx(15.0 - load_s)


def test_a_card_that_is_given_no_limit_has_the_rate_of_one_that_tells_none():
    """A live node's prefetcher reports 0 bytes a second: no limit."""
    net = network(network_bytes_per_s=500.0)
    net.ordered(placed(), {"node-1": a_node(links=(Link(link_id="node-1/nic", bytes_per_s=0.0),))}, 10.0)
    assert net.links["node-1"].bytes_per_s == 500.0


def test_a_fetch_is_due_before_the_objective_by_what_follows_it():
    """Erratum E17: 0.5 s of prefill after one worker; 2 x 0.5 s and a 0.1 s hop after two low-memory stages."""
    net = network(start_stages=replace(STAGES, hop_s=0.1))
    node = replace(NODE, abilities=("emulated:stream",))
    net.ordered(placed("one"), {"node-1": node}, 10.0)
    placement = placed("two")
    placement.sent.stages = tuple(replace(stage, bytes_per_gpu=0) for stage in placement.stages * 2)
    net.ordered(placement, {"node-1": node}, 10.0)
    due = {fetch.fetch_id: fetch.deadline_at for fetch in net.links["node-1"].fetches}
    assert due.pop("one") == pytest.approx(14.5)
    assert list(due.values()) == pytest.approx([13.9, 13.9])


def test_loading_is_taken_for_the_bytes_on_each_gpu_until_it_is_measured():
    """T_c of WarmServe Eq. 7 (erratum E6): 128 GB over four GPUs at 32 GB/s each."""
    model = replace(MODEL, weights_bytes=128 * 10**9, num_gpus=4)
    assert network().load_seconds(model) == pytest.approx(1.0)


def test_the_rest_of_a_stages_model_moves_on_what_others_leave():
    net, row = network(), an_instance("x", "m", state=InstanceState.READY, num_stages=2, consolidating=True)
    net.rest(row, MODEL, NODE, 10.0)
    net.ordered(placed("y", fetch_bytes=2000), {"node-1": NODE}, 10.0)
    net.rest(row, MODEL, NODE, 11.0)  # asking again changes nothing
    net.fetched("node-1", MODEL.weights.digest, ["other"], 11.0)
    assert net.links["node-1"].share() == 500.0, "one other that requests wait for"
    net.saw(an_instance("y", "m", state=InstanceState.LOADING), MODEL, 12.0)
    assert left(net) == {"x/rest": 4000.0} and not net.is_fetching("node-1")
    net.saw(replace(row, revision=2), MODEL, 13.0)
    assert net.links["node-1"].fetches[0].left_bytes == 4000.0
    net.saw(replace(row, consolidating=False), MODEL, 14.0)
    assert left(net) == {}


def test_a_start_that_an_earlier_placer_ordered_takes_its_share():
    net, decided = network(), (Phase(name=PhaseName.DECIDE, started_at=9.0, ended_at=10.0),)
    row = an_instance("x", "m", state=InstanceState.STARTING, num_stages=2, phases=decided, created_at=10.0)
    moving = replace(
        NODE, links=(Link(link_id="node-1/nic", bytes_per_s=1000.0, bytes_in_flight=700, num_transfers=1),)
    )
    net.found(row, MODEL, moving, 13.0)
    (fetch,) = net.links["node-1"].fetches
    assert fetch.left_bytes == 700 and fetch.deadline_at == pytest.approx(14.0, abs=0.01), "5 s after it was wanted"
    net.found(replace(row, instance_id="y"), MODEL, NODE, 13.0)
    assert left(net) == {"x": 700, "y": 4000}
    net.fetched("node-1", MODEL.weights.digest, ["x", "y"], 14.0)
    net.found(row, MODEL, moving, 14.0)  # ended, but not yet in its row
    for other in ({"source": "r"}, {"state": InstanceState.LOADING}):
        net.found(replace(row, instance_id="z", **other), MODEL, NODE, 14.0)
    there = (CachedWeights(digest=MODEL.weights.digest, num_bytes=1, model_keys=("m",)),)
    net.found(replace(row, instance_id="w"), MODEL, replace(NODE, cached=there), 14.0)
    net.found(replace(row, instance_id="v"), MODEL, replace(NODE, on_disk=there), 14.0)
    assert left(net) == {}


def test_two_fetches_share_and_the_first_that_loads_leaves_its_share():
    """Eq. 4."""
    net = network()
    for instance_id in ("x", "y"):
        net.ordered(placed(instance_id), {"node-1": NODE}, 10.0)
    net.saw(an_instance("x", state=InstanceState.STARTING), MODEL, 11.0)
    assert len(left(net)) == 2, "starting, its weights are on their way"
    net.saw(an_instance("x", state=InstanceState.LOADING), MODEL, 14.0)
    assert left(net) == {"y": 6000.0}
    net.fetched("node-1", MODEL.weights.digest, ["y"], 15.0)
    assert left(net) == {}


@pytest.mark.parametrize(
    ("node", "source", "uri"),
    [
        (replace(NODE, cached=(CachedWeights(digest=MODEL.weights.digest, num_bytes=1),)), "", "s3://w"),
        (replace(NODE, on_disk=(CachedWeights(digest=MODEL.weights.digest, num_bytes=1),)), "", "s3://w"),
        (NODE, "r-1", "s3://w"),
        (NODE, "", ""),
    ],
    ids=["in host memory", "on disk", "grows from a copy", "no weights"],
)
def test_what_is_not_fetched_takes_no_share(node, source, uri):
    net = network()
    model = replace(MODEL, weights=WeightsRef(uri=uri, num_bytes=8000))
    net.ordered(placed(source=source, model=model), {"node-1": node}, 10.0)
    assert net.links == {}


def test_warm_up_follows_the_fetch_and_hides_behind_nothing():
    """Fault: counted as context, beside the fetch, it made predictions too short."""
    net = network()
    net.saw(started("x", launch=8.0, load=1.0, warmup=3.0), MODEL, 12.0)
    net.ordered(placed(), {"node-1": NODE}, 10.0)
    (fetch,) = net.links["node-1"].fetches
    assert fetch.deadline_at == pytest.approx(15.0 - 1.0 - 3.0)


def test_a_start_that_grew_from_a_copy_teaches_nothing_of_cold_ones():
    net = network()
    net.saw(replace(started("x", load=0.01), source="r-1"), MODEL, 1.0)
    assert net.load_seconds(MODEL) == MODEL.weights_bytes / 32e9, "erratum E6: bytes over PCIe"


def test_a_start_that_is_not_to_be_frees_its_share():
    net = network()
    for instance_id in ("x", "y"):
        net.ordered(placed(instance_id), {"node-1": NODE}, 10.0)
    net.forget("x")
    net.forget("never ordered")
    assert left(net) == {"y": 8000.0}


def test_a_warm_request_teaches_prefill_and_decode_and_starts_the_rest():
    """Section 4.1."""
    net = network(start_stages=STAGES)
    net.served(finished(cold=True, ttft_s=99.0), an_instance("x"))
    net.served(finished(status=499, error_code="client_left"), an_instance("x"))
    assert net.seconds == {}
    net.served(finished(), an_instance("x"))
    assert net.seconds["m"] == replace(STAGES, prefill_s=1.0, decode_s=0.1)
    net.served(finished(ttft_s=3.0), an_instance("x"))
    assert net.seconds["m"].prefill_s == pytest.approx(1.05)


def test_the_first_token_of_who_waited_is_counted_from_ready():
    net = network(start_stages=STAGES)
    for n, (ready_at, ttft_s) in enumerate(((4.0, 4.3), (4.0, 4.9), (6.0, 6.1), (-1.0, 9.0))):
        row = an_instance(f"i-{n % 3}", ready_at=ready_at)
        net.served(finished(cold=True, ttft_s=ttft_s, arrived_at=0.0), row)
    assert net.first_token_s == {"m": pytest.approx(0.3)}, "medians of 0.3, 0.9 and 0.1: one each"
    for name in ("i-4", "i-5"):
        net.served(finished(cold=True, ttft_s=5.0, arrived_at=0.0), an_instance(name, ready_at=4.0))
    assert net.first_token_s == {"m": pytest.approx(1.0)}, "of the last three instances"


def test_a_fetch_ends_with_what_its_own_node_says():
    """An instance given to two nodes may serve on the other."""
    net = network()
    net.ordered(placed(), {"node-1": NODE}, 10.0)
    net.fetched("node-2", MODEL.weights.digest, ["x"], 11.0)
    assert left(net).keys() == {"x"}
    net.fetched("node-1", MODEL.weights.digest, ["x"], 12.0)
    assert not left(net)


def test_what_is_known_of_a_node_or_a_model_goes_with_it():
    net = network(start_stages=STAGES)
    net.ordered(placed(), {"node-1": NODE}, 10.0)
    net.drop_node("node-1")
    assert net.links == {}
    net.fetched("node-1", MODEL.weights.digest, ["x"], 11.0)
    assert net.links == {}, "its word comes late"
    for key in ("m", "gone"):
        net.served(finished(model_key=key), an_instance("x"))
    net.keep({"m"}, ())
    assert net.seconds.keys() == net.quickest_s.keys() == {"m"}
