"""The anticipator against the paper's own map; the router against every instance."""

import math
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from glowplug.policies.prediction.preserve_anticipator import LookAhead
from glowplug.policies.routing.port import BalancerParams
from glowplug.policies.routing.preserve_load_aware import InstanceLoad, LoadOrder, floor_of, load_of

M, HORIZON = 512, 60
NAMES = st.sampled_from("abcde")
DEEDS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), NAMES, st.integers(1, 50), st.integers(1, 30)),
        st.tuples(st.just("begin"), NAMES),
        st.tuples(st.just("expect"), NAMES, st.integers(1, 30)),
        st.tuples(st.just("end"), NAMES),
        st.tuples(st.just("advance"), st.integers(0, 25)),
    ),
    max_size=30,
)


class PlainMap:
    """As printed: summed step by step."""

    def __init__(self):
        self.now, self.requests = 0, {}

    def do(self, deed):
        if deed[0] == "add":
            self.requests[deed[1]] = [self.now, deed[2], self.now + deed[3], deed[3]]
        elif deed[0] == "begin" and deed[1] in self.requests:
            _, prompt, _, expected = self.requests[deed[1]]
            self.requests[deed[1]] = [self.now, prompt, self.now + expected, expected]
        elif deed[0] == "expect" and deed[1] in self.requests:
            request = self.requests[deed[1]]
            request[2:] = request[0] + deed[2], deed[2]
            self._extend()
        elif deed[0] == "end":
            self.requests.pop(deed[1], None)
        elif deed[0] == "advance":
            self.now += deed[1]
            self._extend()

    def _extend(self):
        for request in self.requests.values():
            while request[2] <= self.now:
                request[2] += max(1, math.ceil(0.2 * request[3]))

    def tokens(self, step):
        return sum(prompt + step - start for start, prompt, end, _ in self.requests.values() if step < end)


def both(deeds):
    plain, look = PlainMap(), LookAhead(M)
    for deed in deeds:
        plain.do(deed)
        if deed[0] == "advance":
            look.advance(plain.now)
        else:
            getattr(look, deed[0])(*deed[1:])
    return plain, look


@given(DEEDS, st.integers(1, HORIZON), st.integers(0, 60), st.integers(0, 70), st.floats(0, 1.2))
def test_two_numbers_a_turn_are_the_map_of_the_paper(deeds, num_steps, prompt, expected, ratio):
    plain, look = both(deeds)
    check(plain, look, num_steps, prompt, expected, ratio)


@pytest.mark.parametrize("seed", range(12))
def test_a_day_of_many_requests_is_the_map_of_the_paper_at_each_step(seed):
    """Ratios are those that are reached, so that each is once the limit itself."""
    chance = Random(seed)
    plain, look = PlainMap(), LookAhead(M)
    for _ in range(60):
        name, num = chance.choice("abcdefg"), chance.randint(1, 30)
        deed = chance.choice([("add", name, 2 * num, num), ("begin", name), ("expect", name, num), ("end", name)])
        plain.do(deed)
        getattr(look, deed[0])(*deed[1:])
        if chance.random() < 0.4:
            plain.do(("advance", chance.randint(0, 8)))
            look.advance(plain.now)
        num_steps, expected = chance.randint(1, 30), chance.choice([0, 1, num, 40])
        check(plain, look, num_steps, num, expected, plain.tokens(plain.now + chance.randint(0, 9)) / M)
        assert len(look) == len(plain.requests)
        assert look._steps == sorted({request[2] for request in plain.requests.values()}), "no turn is kept for nothing"
        assert bool(look._ends) == bool(plain.requests)
        assert [look.age(name) for name in "abcdefg"] == [
            plain.now - plain.requests[name][0] if name in plain.requests else 0 for name in "abcdefg"
        ]


def check(plain, look, num_steps, prompt, expected, ratio):
    steps = range(plain.now, plain.now + num_steps)
    wanted = [plain.tokens(step) for step in steps]
    assert [look.tokens(step) for step in steps] == wanted
    assert look.peak_ratio(num_steps) == max(wanted) / M
    requests = plain.requests.values()
    assert look.at_most(num_steps) == sum(prompt + steps[-1] - start for start, prompt, _, _ in requests)
    ends = [end for _, _, end, _ in requests]
    assert look.tokens_left == sum(end - plain.now for end in ends)
    assert look.tokens_left_within(num_steps) == sum(min(end - plain.now, num_steps) for end in ends)
    assert look.num_steps_above(ratio, num_steps) == sum(tokens > ratio * M for tokens in wanted)
    if expected:
        more = [tokens + (prompt + i if i < expected else 0) for i, tokens in enumerate(wanted)]
        assert look.peak_ratio(num_steps, prompt, expected) == max(more) / M


@given(
    st.lists(st.tuples(DEEDS, st.integers(0, 400), st.integers(0, 400)), max_size=8),
    st.integers(1, 300),
    st.integers(1, 100),
)
def test_stopping_early_finds_what_asking_everybody_finds(made, prompt, expected):
    """Ties: lower floor, then lower id."""
    loads = [InstanceLoad(f"i-{n}", both(deeds)[1], queued, current) for n, (deeds, queued, current) in enumerate(made)]
    params = BalancerParams(most_visited=0)
    order = LoadOrder(params)
    for load in loads:
        order.put(load)
    asked = [(load_of(load, prompt, expected, params), floor_of(load, params), load.instance_id) for load in loads]
    assert order.route(prompt, expected).instance_id == (min(asked)[2] if asked else "")


@given(DEEDS, st.integers(1, 200), st.integers(1, 100), st.integers(0, 200))
def test_more_load_never_lowers_a_score(deeds, prompt, expected, more):
    _, look = both(deeds)
    params = BalancerParams()
    here = load_of(InstanceLoad("i", look, 10, 10), prompt, expected, params)
    assert load_of(InstanceLoad("i", look, 10 + more, 10), prompt, expected, params) >= here
    assert load_of(InstanceLoad("i", look, 10, 10), prompt + more, expected, params) >= here
    look.add("more", 1 + more, 20)
    assert load_of(InstanceLoad("i", look, 10, 10), prompt, expected, params) >= here
