"""The virtual clock."""

import pytest

from glowplug.simulator.kernel import Kernel


def test_in_order_of_time_then_of_setting():
    kernel, seen = Kernel(), []
    for at_s, name in ((2.0, "c"), (1.0, "a"), (1.0, "b")):
        kernel.at(at_s, lambda name=name: seen.append((kernel.now_s, name)))
    kernel.run(5.0)
    assert seen == [(1.0, "a"), (1.0, "b"), (2.0, "c")]
    assert kernel.now_s == 5.0


def test_run_stops_at_its_end_and_goes_on_from_there():
    kernel, seen = Kernel(), []
    kernel.at(1.0, seen.append, 1)
    kernel.at(3.0, seen.append, 3)
    kernel.run(2.0)
    assert seen == [1]
    kernel.run(3.0)
    assert seen == [1, 3]


def test_a_cancelled_timer_does_nothing():
    kernel, seen = Kernel(), []
    timer = kernel.after(1.0, seen.append, 1)
    timer.cancel()
    kernel.run(2.0)
    assert seen == [] and not kernel.step()


def test_the_past_is_now():
    kernel, seen = Kernel(10.0), []
    kernel.at(3.0, lambda: seen.append(kernel.now_s))
    kernel.run(10.0)
    assert seen == [10.0]


@pytest.mark.parametrize("delay_s", [-1.0, float("nan")])
def test_no_delay_before_now(delay_s):
    with pytest.raises(ValueError, match="a delay of"):
        Kernel().after(delay_s, print)
