"""The machine of a run: virtual clock, shared links, step costs and pipelines."""

import pytest

from glowplug_lab.simulator.costs import FITTED, FITTED_MS
from glowplug_lab.simulator.kernel import Kernel
from glowplug_lab.simulator.links import Link, Links


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


class Yard:
    """A network card and a PCIe lane, with the end of each transfer."""

    def __init__(self) -> None:
        self.kernel = Kernel()
        self.links = Links(self.kernel)
        self.nic, self.lane = Link("nic", 10.0), Link("lane", 4.0)
        self.there: dict[str, float] = {}

    def send(self, name, num_bytes, *links, priority=0):
        def done():
            self.there[name] = self.kernel.now_s

        return self.links.start(name, num_bytes, links, done, priority=priority)

    def run(self):
        self.kernel.run(1e6)
        return {name: pytest.approx(at) for name, at in self.there.items()}


@pytest.mark.parametrize(
    ("sent", "there"),
    [
        # 5 each until a ends at 10 s; b has 50 left at 10 bytes/s
        pytest.param({"a": (50, "nic", 0), "b": (100, "nic", 0)}, {"a": 10.0, "b": 15.0}, id="two share a link"),
        # 4 bytes/s through the lane, 6 beside it
        pytest.param({"a": (40, "nic lane", 0), "b": (60, "nic", 0)}, {"a": 10.0, "b": 10.0}, id="the tighter link"),
        pytest.param({"a": (50, "nic", 0), "b": (50, "nic", 1)}, {"a": 5.0, "b": 10.0}, id="the background waits"),
    ],
)
def test_transfers_that_begin_at_once(sent, there):
    yard = Yard()
    for name, (num_bytes, links, priority) in sent.items():
        yard.send(name, num_bytes, *(getattr(yard, link) for link in links.split()), priority=priority)
    assert yard.run() == there


def test_a_latecomer_slows_the_first():
    yard = Yard()
    yard.send("a", 100, yard.nic)
    yard.kernel.at(5.0, yard.send, "b", 25, yard.nic)
    # a: 50 by 5 s; 5 each until b ends at 10 s; a has 25 left
    assert yard.run() == {"a": 12.5, "b": 10.0}


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
    # before: 40 by 4 s, then 5 each; behind ends at 14 s, before has 10 left
    assert yard.run() == {"behind": 14.0, "before": 15.0}


@pytest.mark.parametrize("profile", FITTED_MS, ids="/".join)
def test_a_step_takes_what_was_fitted(profile):
    """Eight prompts of 256 tokens, then a step of them with 300 tokens of context each."""
    (base, token, token2), (step, sequence, context) = FITTED_MS[profile]
    costs = FITTED[profile]
    assert costs.prefill_s(2048, 8 * 256**2) * 1e3 == pytest.approx(base + token * 2048 + token2 * 8 * 256**2)
    assert costs.decode_s(8, 2400) * 1e3 == pytest.approx(step + sequence * 8 + context * 2400)


def test_a_7b_on_an_a10_answers_as_hydraserve_measured_it():
    """HydraServe's Table 2, eight warm requests of 1024 tokens: TTFT 1.5 s, TPOT 42 ms."""
    costs = FITTED["llama-2-7b", "a10"]
    assert costs.prefill_s(8 * 1024, 8 * 1024**2) == pytest.approx(1.67, abs=0.01)
    assert costs.decode_s(8, 8 * 1024) == pytest.approx(0.0425, abs=0.0001)


def test_a_token_of_a_pipeline_pays_its_hops():
    """Erratum E13: s hops a token; s - 1 for the first; none for a single worker."""
    whole = FITTED["llama-2-7b", "a10"]
    four = whole.pipelined(4, 0.001)
    assert four.prefill_s(512, 512**2) == pytest.approx(whole.prefill_s(512, 512**2) + 0.003)
    assert four.decode_s(0, 0) == pytest.approx(whole.decode_s(0, 0) + 0.004)
    assert whole.pipelined(1, 0.001) is whole
