"""Peers that a fetch reads from, and the observed link rate."""

import pytest

from glowplug.controllers.placer.fleet import MAX_PEERS, Fleet
from glowplug.controllers.placer.params import PlacerParams
from glowplug.domain.bounds import Bounds, kinds_of, marks_of
from glowplug.domain.hardware import CachedWeights, Link
from glowplug.domain.instance import InstanceState
from glowplug.events.commands import FetchWeights
from glowplug.fleet.start_times import StartTimes
from glowplug.policies.placement.links import network_rate
from glowplug.services.prefetcher.settings import PrefetcherSettings
from tests.fleet_builder import a_model, a_node, an_instance

M = a_model()
HERE = CachedWeights(digest=M.weights.digest, num_bytes=5)


def busy(node_id: str, num_transfers: int) -> tuple[Link, ...]:
    return (Link(link_id=f"{node_id}/nic", bytes_per_s=0.0, num_transfers=num_transfers),)


def a_fleet() -> Fleet:
    fleet = Fleet({}, 1, PlacerParams())
    for node_id, cached, num_transfers, url in (
        ("node-1", (HERE,), 0, "http://1"),  # the asking node
        ("node-2", (HERE,), 2, "http://2"),
        ("node-3", (HERE,), 0, "http://3"),
        ("node-4", (), 0, "http://4"),  # a stage of the model starts there
        ("node-5", (), 0, "http://5"),
        ("node-6", (HERE,), 0, ""),  # an older agent: no prefetcher address
    ):
        fleet.node(a_node(node_id, cached=cached, links=busy(node_id, num_transfers), prefetcher_url=url), 1.0)
    fleet.row(an_instance("i-1", state=InstanceState.LOADING, gpu_id="node-4/0"), 1.0)
    return fleet


def test_nodes_that_hold_all_come_first_and_the_idle_one_of_them() -> None:
    command = FetchWeights(target="node-1", model_key=M.key, weights=M.weights)
    assert a_fleet().with_peers(command).peers == ("http://3", "http://2", "http://4")


def test_a_command_names_a_few_nodes() -> None:
    fleet = a_fleet()
    for number in range(20):
        fleet.node(a_node(f"more-{number}", cached=(HERE,), prefetcher_url=f"http://m{number}"), 1.0)
    command = FetchWeights(target="node-1", model_key=M.key, weights=M.weights)
    assert len(fleet.with_peers(command).peers) == MAX_PEERS


@pytest.mark.parametrize("is_measured", [True, False])
def test_a_rate_that_was_measured_counts_like_a_declared_one(is_measured: bool) -> None:
    link = Link(link_id="node-1/nic", bytes_per_s=2e7, is_measured=is_measured)
    assert network_rate(a_node(links=(link,)), M, StartTimes()) == 2e7


def test_a_prefetcher_may_ask_as_many_as_a_command_names() -> None:
    bound = marks_of(kinds_of(PrefetcherSettings)["max_peers"])
    assert [one.most for one in bound if isinstance(one, Bounds)] == [MAX_PEERS]
