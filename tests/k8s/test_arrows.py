"""The rendered NetworkPolicies allow the arrows of docs/network.md, all of them and no other."""

import copy
import re

import pytest

from tests.k8s.arrows import expand, outside_ends, picture, table
from tests.k8s.policies import End, Ports, connections, fleet_ends
from tests.k8s.rendering import OVERLAYS, Manifest, all_containers, environment, named, of_kind, render

overlays = pytest.mark.parametrize("overlay", OVERLAYS)


def every_connection(manifests: list[Manifest]) -> dict[tuple[str, str], set[Ports]]:
    """(from, to) -> ports, for every pair with one end in the fleet."""
    ours, theirs = fleet_ends(manifests), outside_ends()
    ends: dict[str, End] = ours | theirs
    return {
        (source, target): ports
        for source in ends
        for target in ends
        if (source in ours or target in ours) and (ports := connections(manifests, ends[source], ends[target]))
    }


@overlays
def test_policies_allow_the_arrows_and_nothing_else(overlay: str) -> None:
    assert every_connection(render(overlay)) == expand(table(overlay))


def test_the_picture_shows_the_table() -> None:
    assert picture() == set().union(*(table(overlay) for overlay in OVERLAYS))


@overlays
def test_every_pod_is_denied_by_default(overlay: str) -> None:
    deny = named(render(overlay), "NetworkPolicy", "default-deny")["spec"]
    assert deny == {"podSelector": {}, "policyTypes": ["Ingress", "Egress"]}


@overlays
def test_no_policy_can_be_left_out(overlay: str) -> None:
    """Each of them carries an arrow, or denies; one that changes nothing would only be read in vain."""
    manifests = render(overlay)
    before = every_connection(manifests)
    for policy in of_kind(manifests, "NetworkPolicy"):
        if policy["metadata"]["name"] == "default-deny":
            continue
        without = [m for m in manifests if m is not policy]
        assert every_connection(without) != before, policy["metadata"]["name"]


def test_a_rule_too_many_is_found() -> None:
    manifests = render("sim")
    wide = copy.deepcopy(named(manifests, "NetworkPolicy", "engines"))
    del wide["spec"]["ingress"][0]["from"]
    wide["metadata"]["name"] = "too-wide"
    nodes = named(manifests, "NetworkPolicy", "control-plane")
    nodes["spec"]["egress"].append({"ports": [{"protocol": "TCP", "port": 20000}]})
    found, drawn = every_connection([*manifests, wide]), expand(table("sim"))
    assert found[("predictor", "node")] == {Ports("TCP", 20000, 20000)}
    assert ("predictor", "node") not in drawn


@overlays
def test_the_engines_are_where_routers_may_reach_them(overlay: str) -> None:
    manifests = render(overlay)
    drawn = expand(table(overlay))[("router", "node")]
    told = {environment(manifests, c).get("GLOWPLUG_ENGINE_PORTS", "") for _, c in all_containers(manifests)} - {""}
    assert told == {str(ports) for ports in drawn}


@overlays
def test_every_address_a_service_is_given_is_an_arrow(overlay: str) -> None:
    """What a container is told to connect to, its pod may connect to."""
    manifests = render(overlay)
    drawn = expand(table(overlay))
    tried = 0
    for where, container in all_containers(manifests):
        pod = where.split("/")[1]
        for value in environment(manifests, container).values():
            for host, port in re.findall(r"://(?:[^@/\s]*@)?([a-z][a-z-]*):(\d+)", str(value)):
                tried += 1
                assert any(("TCP", int(port)) in ports for ports in drawn[(pod, host)]), (where, value)
    assert tried > 20
