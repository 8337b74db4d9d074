"""Transfers over shared links, against sums done by hand."""

import pytest

from glowplug.simulator.kernel import Kernel
from glowplug.simulator.links import Link, Links


class Yard:
    """Two network cards and a PCIe lane, and when each transfer was there."""

    def __init__(self) -> None:
        self.kernel = Kernel()
        self.links = Links(self.kernel)
        self.nic, self.other, self.lane = Link("nic", 10.0), Link("other", 10.0), Link("lane", 4.0)
        self.there: dict[str, float] = {}

    def send(self, name, num_bytes, *links, priority=0):
        def done():
            self.there[name] = self.kernel.now_s

        return self.links.start(name, num_bytes, links, done, priority=priority)

    def run(self):
        self.kernel.run(1e6)
        return {name: pytest.approx(at) for name, at in self.there.items()}


def test_two_share_and_the_last_gets_all_of_it():
    yard = Yard()
    yard.send("a", 50, yard.nic)
    yard.send("b", 100, yard.nic)
    # 5 each until a is there at 10 s; b has 50 left and 10 bytes/s
    assert yard.run() == {"a": 10.0, "b": 15.0}


def test_a_latecomer_slows_the_first():
    yard = Yard()
    yard.send("a", 100, yard.nic)
    yard.kernel.at(5.0, yard.send, "b", 25, yard.nic)
    # a: 50 by 5 s; 5 each until b is there at 10 s; a has 25 left
    assert yard.run() == {"a": 12.5, "b": 10.0}


def test_the_tighter_link_leaves_the_rest_to_others():
    yard = Yard()
    yard.send("through", 40, yard.nic, yard.lane)  # 4 bytes/s
    yard.send("beside", 60, yard.nic)  # the other 6
    assert yard.run() == {"through": 10.0, "beside": 10.0}


def test_background_waits_for_what_is_critical():
    yard = Yard()
    yard.send("critical", 50, yard.nic)
    yard.send("background", 50, yard.nic, priority=1)
    assert yard.run() == {"critical": 5.0, "background": 10.0}


def test_a_stopped_transfer_says_what_had_come_and_frees_its_share():
    yard = Yard()
    first = yard.send("a", 100, yard.nic)
    yard.send("b", 100, yard.nic)
    came = []
    yard.kernel.at(4.0, lambda: came.append(yard.links.stop(first)))
    assert yard.run() == {"b": 12.0}
    assert came == [pytest.approx(20.0)]


def test_nothing_to_send_is_there_at_once_but_after_the_sender_goes_on():
    yard = Yard()
    yard.send("empty", 0, yard.nic)
    assert yard.there == {}
    assert yard.run() == {"empty": 0.0}


def test_negative_bytes_and_dead_links_are_refused():
    yard = Yard()
    with pytest.raises(ValueError, match="-1 bytes"):
        yard.send("a", -1, yard.nic)
    with pytest.raises(ValueError, match="link cut"):
        Link("cut", 0.0)


def test_one_that_is_hurried_goes_before_the_others():
    yard = Yard()
    behind = yard.send("behind", 50, yard.nic, priority=1)
    yard.send("before", 100, yard.nic)
    yard.kernel.at(4.0, yard.links.hurry, behind)
    # before: 40 by 4 s, then 5 each; behind is there at 14 s, before has 10 left
    assert yard.run() == {"behind": 14.0, "before": 15.0}
