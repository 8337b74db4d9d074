"""Fencing: one line of epochs per commanding service, whatever its processes' names."""

import pytest

from glowplug.controllers.fencing import Fence, service_of
from glowplug.domain.errors import StaleEpoch
from glowplug.domain.lease import Leader
from glowplug.events.commands import StopInstance
from tests.fleet_builder import an_event

STOP = StopInstance(target="node-1", instance_id="i-1", reason="")


@pytest.mark.parametrize(
    ("issuer", "service"),
    [
        ("placer", "placer"),
        ("placer-1", "placer"),
        ("placer-7d9f8b6c5-x2x9z", "placer"),
        ("glowplug-placer-0", "placer"),
        ("eu-west-autoscaler-2", "autoscaler"),
        ("somebody-3", "somebody"),
    ],
)
def test_a_service_id_tells_its_service(issuer, service):
    assert service_of(issuer) == service


def test_two_services_that_share_a_prefix_do_not_fence_each_other():
    fence = Fence()
    fence.admit(an_event(STOP, issuer="glowplug-placer-0", epoch=9))
    fence.admit(an_event(STOP, issuer="glowplug-autoscaler-0", epoch=4))
    assert sorted(fence.seen.values()) == [4, 9]


def test_a_process_of_another_name_follows_in_the_same_line():
    fence = Fence()
    fence.admit(an_event(STOP, issuer="placer-aaa", epoch=9))
    with pytest.raises(StaleEpoch):
        fence.admit(an_event(STOP, issuer="placer-bbb", epoch=8))


def leader(service: str, epoch: int) -> Leader:
    return Leader(service=service, service_id=f"{service}-2", url="", epoch=epoch, since=0.0)


def test_who_led_before_is_refused_by_the_table_before_the_new_leader_has_said_anything():
    fence = Fence()
    fence.admit(an_event(STOP, issuer="placer-1", epoch=8))
    fence.raise_to({"placer": leader("placer", 9)})
    with pytest.raises(StaleEpoch, match="at epoch 8, newest is 9"):
        fence.admit(an_event(STOP, issuer="placer-1", epoch=8))
    fence.admit(an_event(STOP, issuer="placer-2", epoch=9))
    fence.admit(an_event(STOP, issuer="autoscaler-1", epoch=3))


def test_an_older_table_lets_nobody_back_in():
    fence = Fence()
    fence.raise_to({"placer": leader("placer", 9)})
    fence.raise_to({"placer": leader("placer", 4)})
    with pytest.raises(StaleEpoch):
        fence.admit(an_event(STOP, issuer="placer-1", epoch=8))
