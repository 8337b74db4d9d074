"""The look-ahead balancer against a stateless one, after any history (PreServe 4.3)."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from glowplug.domain.snapshot import Target
from glowplug.policies.routing.port import BalancerParams
from glowplug.policies.routing.preserve_load_aware import InstanceLoad, LoadAware, floor_of, load_of

IDS = ("i-0", "i-1", "i-2", "i-3", "i-4")
KV_TOKENS = 400
EXACT = BalancerParams(tpot_s=0.5, num_refreshed=99, most_visited=0)
Deed = tuple[str, str, int, int]
DEEDS = st.lists(
    st.one_of(
        st.tuples(st.just("send"), st.sampled_from(IDS), st.integers(0, 120), st.integers(1, 60)),
        st.tuples(st.just("route"), st.just(""), st.integers(0, 120), st.integers(1, 60)),
        st.tuples(st.just("begin"), st.just(""), st.integers(0, 30), st.just(0)),
        st.tuples(st.just("end"), st.just(""), st.integers(0, 30), st.integers(0, 40)),
        st.tuples(st.just("pass"), st.just(""), st.integers(0, 40), st.just(0)),
        st.tuples(st.just("fill"), st.sampled_from(IDS), st.integers(0, 5), st.just(0)),
        st.tuples(st.just("gone"), st.sampled_from(IDS), st.just(0), st.just(0)),
        st.tuples(st.just("put"), st.sampled_from(IDS), st.integers(1, 5), st.just(0)),
    ),
    max_size=40,
)


class Story:
    """An instance takes five requests; its load depends on `fill` alone."""

    def __init__(self, params: BalancerParams = EXACT, names: Sequence[str] = IDS) -> None:
        self.balancer = LoadAware(params)
        self.now_s, self.ticket = 100.0, 0
        self.open: list[int] = []
        for name in names:
            self.balancer.put(Target(name, 0, 5, KV_TOKENS), self.now_s)

    def do(self, deeds: list[Deed]) -> "Story":
        balancer = self.balancer
        for kind, name, number, more in deeds:
            match kind:
                case "send":
                    self.send(name, number, more)
                case "route":
                    if chosen := balancer.choose(number, more, self.now_s).instance_id:
                        self.send(chosen, number, more)
                case "begin" if number < len(self.open):
                    balancer.first_token(self.open[number], self.now_s)
                case "end" if number < len(self.open):
                    balancer.ended(self.open.pop(number), more, self.now_s)
                case "pass":
                    self.now_s += number / 10
                case "fill":
                    balancer.filled(name, number)
                case "gone":
                    balancer.gone(name)
                case "put":
                    balancer.put(Target(name, 0, number, KV_TOKENS), self.now_s)
        return self

    def send(self, name: str, prompt: int, expected: int) -> None:
        self.ticket += 1
        self.open.append(self.ticket)
        self.balancer.sent(self.ticket, name, prompt, expected, self.now_s)

    def least(self, prompt: int, expected: int) -> str:
        params = self.balancer.params
        asked = [(load_of(o, prompt, expected, params), floor_of(o, params), o.instance_id) for o in self.plain()]
        return min(asked)[2] if asked else ""

    def plain(self) -> list[InstanceLoad]:
        loads = []
        for name, here in self.balancer.instances.items():
            self.balancer.outlook(name, self.now_s)  # time passes there too
            if here.is_open and here.num_in_flight < here.max_concurrency:
                loads.append(InstanceLoad(name, here.look, here.queued_tokens, here.look.tokens_left))
        return loads


@pytest.mark.parametrize(
    ("params", "left_out"),
    [(EXACT, ""), (BalancerParams(tpot_s=0.5, num_refreshed=0, most_visited=0), "pass")],
    ids=["all refreshed", "only what changed, while no time passes"],
)
@given(deeds=DEEDS, prompt=st.integers(0, 150), expected=st.integers(1, 80))
def test_the_order_that_is_kept_is_the_order_of_everybody(
    params: BalancerParams, left_out: str, deeds: list[Deed], prompt: int, expected: int
) -> None:
    story = Story(params).do([deed for deed in deeds if deed[0] != left_out])
    kept = story.balancer.choose(prompt, expected, story.now_s).instance_id
    assert kept == story.least(prompt, expected)


@given(DEEDS, st.integers(0, 150), st.integers(1, 80), st.integers(1, 3))
def test_looking_at_the_lowest_few_is_off_by_less_than_the_request_and_the_growth_ahead(
    deeds: list[Deed], prompt: int, expected: int, most: int
) -> None:
    few = BalancerParams(tpot_s=0.5, num_refreshed=99, most_visited=most)
    story, params = Story(few).do(deeds), BalancerParams()
    chosen = story.balancer.choose(prompt, expected, story.now_s).instance_id
    loads = {load.instance_id: load_of(load, prompt, expected, params) for load in story.plain()}
    assert (chosen == "") == (not loads)
    if chosen:
        growth = max(len(here.look) for here in story.balancer.instances.values()) * params.num_steps
        newcomer = prompt + min(expected, params.num_steps)
        assert loads[chosen] <= min(loads.values()) + newcomer + growth


@given(DEEDS, st.permutations(IDS))
def test_the_order_in_which_instances_were_named_is_of_no_account(deeds: list[Deed], names: list[str]) -> None:
    one, other = Story(), Story(names=names)
    assert one.do(deeds).balancer.choose(10, 10, one.now_s) == other.do(deeds).balancer.choose(10, 10, other.now_s)


@given(DEEDS)
def test_every_request_is_counted_once_and_nothing_is_left_of_it(deeds: list[Deed]) -> None:
    story = Story().do(deeds)
    balancer = story.balancer
    assert set(balancer.requests) <= set(story.open), "of an instance that was gone already none is kept"
    by_instance = {name: len(here.look) for name, here in balancer.instances.items()}
    assert sum(by_instance.values()) == len(balancer.requests)
    for ticket in story.open:
        balancer.ended(ticket, 0, story.now_s)
        balancer.ended(ticket, 7, story.now_s)
    for name in IDS:
        outlook = balancer.outlook(name, story.now_s)
        if outlook is not None:
            assert (outlook.peak_ratio, outlook.queued_tokens, outlook.current_tokens) == (0, 0, 0)
        balancer.gone(name)
    assert balancer.choose(1, 1, story.now_s).instance_id == ""
    assert not balancer.requests and not balancer.instances and not balancer._busy and not balancer._changed
    assert len(balancer._order) == 0


@given(DEEDS, st.sampled_from(IDS), st.integers(0, 200), st.integers(1, 100))
def test_more_sent_to_an_instance_never_makes_it_the_choice(
    deeds: list[Deed], name: str, prompt: int, expected: int
) -> None:
    story = Story().do(deeds)
    before = story.balancer.choose(20, 20, story.now_s).instance_id
    story.send(name, prompt, expected)
    after = story.balancer.choose(20, 20, story.now_s).instance_id
    assert after == before or before == name
