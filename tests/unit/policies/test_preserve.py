"""PreServe's published rules with hand-worked numbers."""

from dataclasses import replace

import pytest

from glowplug.domain.snapshot import Outlook
from glowplug.fleet.throughput import Capacity
from glowplug.policies.prediction.preserve_anticipator import LookAhead
from glowplug.policies.routing.port import BalancerParams
from glowplug.policies.routing.preserve_load_aware import InstanceLoad, LoadOrder, load_of
from glowplug.policies.scaling.preserve import ScalerState, instances_for
from glowplug.policies.scaling.preserve import algorithm_2 as scale
from tests.unit.policies.scaling.rig import a_forecast


def usage(look_ahead, num_steps):
    return [look_ahead.tokens(look_ahead.now_step + i) for i in range(num_steps)]


# section 4.3.1


def test_a_request_is_a_ramp():
    """U_i gains (P + i) / M for i in [0, D)."""
    look = LookAhead(kv_tokens=100)
    look.add("a", 10, 4)
    assert usage(look, 6) == [10, 11, 12, 13, 0, 0]
    look.add("b", 5, 2)
    assert usage(look, 6) == [15, 17, 12, 13, 0, 0]
    assert look.peak_ratio(6) == 0.17
    assert look.peak_ratio(1) == 0.15


def test_who_goes_on_is_expected_for_another_fifth_again_and_again():
    """0.2 D: 10 steps become 12, then 14."""
    look = LookAhead(kv_tokens=1000)
    look.add("a", 100, 10)
    look.advance(10)
    assert usage(look, 3) == [110, 111, 0]
    look.advance(12)
    assert usage(look, 3) == [112, 113, 0]
    look.advance(99)  # still there after many extensions
    assert look.tokens(99) == 199


def test_a_newcomer_is_added_virtually():
    look = LookAhead(kv_tokens=100)
    look.add("a", 10, 4)
    before = usage(look, 10)
    assert look.peak_ratio(10, prompt_tokens=20, expected_tokens=3) == 0.34  # 12 + 22 in the third step
    assert look.peak_ratio(10, prompt_tokens=20, expected_tokens=8) == 0.36  # 13 + 23 in the fourth
    assert usage(look, 10) == before


def test_a_burst_sees_what_was_sent_before_it():
    """Erratum E34: the prefill sets its true start."""
    look = LookAhead(kv_tokens=100)
    look.add("a", 10, 4)
    look.advance(3)
    look.begin("a")
    assert usage(look, 5) == [10, 11, 12, 13, 0]
    look.begin("nobody")
    look.end("nobody")


def test_a_cache_without_tokens_is_refused():
    for wrong in ((0, 0.2), (9, 0.0), (9, float("nan"))):
        with pytest.raises(ValueError, match="tokens, extension by"):
            LookAhead(*wrong)
    assert len(LookAhead(1)) == LookAhead(1).peak_ratio(5) == LookAhead(1).num_steps_above(0.0, 5) == 0
    one = LookAhead(100)
    one.add("a", 10, 0)
    assert usage(one, 2) == [10, 0], "each request has a token to come"
    one.expect("a", 0)
    one.expect("nobody", 9)
    one.advance(0)
    one.advance(-1)
    assert usage(one, 2) == [10, 0] and one.tokens(-3) == 10


def test_a_step_without_requests_is_never_too_full():
    """Not even where others alone fill the cache beyond the limit."""
    look = LookAhead(100)
    look.add("a", 10, 2)
    assert [look.num_steps_above(ratio, 6) for ratio in (-0.5, 0.0, 0.1, 0.11)] == [2, 2, 1, 0]


# section 4.3.3


def an_instance(name, queued=0, current=0, busy=()):
    look = LookAhead(1000)
    for at, (prompt, response) in enumerate(busy):
        look.add(f"{name}-{at}", prompt, response)
    return InstanceLoad(name, look, queued, current)


def chosen(instances, prompt, expected):
    order = LoadOrder()
    for instance in instances:
        order.put(instance)
    return order.route(prompt, expected).instance_id


def test_load_is_prefill_plus_decode():
    one = an_instance("i-1", queued=100, current=50)
    assert load_of(one, 10, 20, BalancerParams()) == 100 + 10 + 50 + 20


def test_memory_beyond_four_fifths_is_a_penalty_in_tokens():
    """beta max(0, U - 0.8) M: 700 there and the newcomer's 150 + 99 make 949 of 1000 after 100 steps."""
    full = an_instance("i-1", busy=[(600, 200)])  # 600 .. 699 over the next 100 steps
    assert load_of(full, 150, 300, BalancerParams()) == pytest.approx(150 + 300 + (0.699 + 0.249 - 0.8) * 1000)
    assert load_of(full, 150, 300, BalancerParams(penalty=0.0)) == 450


def test_the_least_load_is_chosen_and_the_full_one_avoided():
    busy, full = an_instance("i-1", queued=300), an_instance("i-2", busy=[(750, 500)])
    assert chosen([busy, full], 50, 100) == "i-2"  # 948 at the peak: a penalty of 148
    assert chosen([busy, full], 200, 100) == "i-1"
    assert chosen([], 1, 1) == "", "the request waits"


# sections 4.1 and 4.3.2

MU = Capacity(prompt_per_s=1000, response_per_s=200, total_per_s=1100)


def tokens(prompt, response):
    return a_forecast(prompt * 600.0, response * 600.0, window_s=600.0)


def outlook(name, peak=0.5, over=0.0):
    return name, Outlook(peak_ratio=peak, over_share=over)


@pytest.mark.parametrize(
    ("prompt", "response", "wanted"), [(2500, 100, 3), (100, 450, 3), (2000, 300, 3), (2000, 200, 2), (0, 0, 1)]
)
def test_instances_for_a_window(prompt, response, wanted):
    """N = max of three ratios, rounded up (Algorithm 2 line 5, erratum E32)."""
    assert instances_for(tokens(prompt, response), MU) == wanted


def test_a_rate_of_zero_is_unknown_and_a_window_has_a_length():
    assert instances_for(a_forecast(20.0, 5.0, window_s=10.0), Capacity(prompt_per_s=0.5)) == 4
    assert instances_for(a_forecast(20.0, window_s=1.0), Capacity(prompt_per_s=10.0)) == 2
    with pytest.raises(ValueError, match="a window of 0"):
        instances_for(a_forecast(20.0, window_s=0), MU)


def test_at_the_start_of_a_window_the_prediction_decides():
    target, state = scale(2, 7, tokens(3500, 100), MU, [], ScalerState())
    assert target.num_wanted == 4 and state.window == 7
    target, _ = scale(4, 8, tokens(900, 100), MU, [], state)
    assert target.num_wanted == 1


def test_one_more_for_each_that_will_be_too_full_once():
    _, state = scale(2, 7, tokens(1500, 100), MU, [], ScalerState())
    hot = [outlook("i-1", 0.99, over=0.2), outlook("i-2", 0.97, over=0.05)]
    target, state = scale(2, 7, tokens(1500, 100), MU, hot, state)
    assert target.num_wanted == 3 and "i-1" in target.reason
    target, state = scale(3, 7, tokens(1500, 100), MU, hot, state)
    assert target.num_wanted == 3, "its instance is on the way"
    _, state = scale(3, 7, tokens(1500, 100), MU, [outlook("i-1"), outlook("i-2")], state)
    target, flickers = scale(3, 7, tokens(1500, 100), MU, hot, state, now_s=20.0)
    assert target.num_wanted == 3, "it flickers: one was added a moment ago"
    target, _ = scale(3, 7, tokens(1500, 100), MU, hot, flickers, num_coming=1, now_s=31.0)
    assert target.num_wanted == 3, "still too full, and something is on its way up for it"
    target, _ = scale(3, 7, tokens(1500, 100), MU, hot, flickers, now_s=30.0)
    assert target.num_wanted == 4, "still too full"


@pytest.mark.parametrize(("num_coming", "num_wanted"), [(0, 6), (1, 6), (2, 5), (3, 4), (4, 4)])
def test_those_on_their_way_answer_for_as_many_that_are_too_full_beside_those_already_answered(num_coming, num_wanted):
    state = ScalerState(window=7, num_planned=4, answered={"i-0": 90.0, "old": 60.0})
    hot = [outlook(f"i-{n}", over=0.2) for n in range(3)]
    target, state = scale(4, 7, None, MU, hot, state, num_coming=num_coming, now_s=100.0)
    assert target.num_wanted == num_wanted
    assert state.answered == {"i-0": 90.0, "i-1": 100.0, "i-2": 100.0}


@pytest.mark.parametrize(("num_running", "num_planned"), [(4, 2), (2, 4)])
def test_one_is_added_to_what_runs_or_was_planned(num_running, num_planned):
    state = ScalerState(window=7, num_planned=num_planned)
    assert scale(num_running, 7, None, MU, [outlook("i-1", over=0.2)], state)[0].num_wanted == 5


def test_calm_instances_shrink_once_a_window():
    """N_c - ceil(sum max U / T_mem) go (erratum E36): 4 x 0.2 / 0.8 = 1 stays."""
    calm = [outlook(f"i-{n}", 0.2) for n in range(4)]
    _, state = scale(4, 7, tokens(900, 100), MU, [], ScalerState())
    state = replace(state, num_planned=4)  # three were added within the window
    target, after = scale(4, 7, tokens(900, 100), MU, calm, state)
    assert target.num_wanted == 1
    target, _ = scale(4, 7, tokens(900, 100), MU, calm[:2], after)
    assert target.num_wanted == 1, "not undone, not done again"
    warm = [*calm[:3], outlook("i-3", 0.30)]
    assert scale(4, 7, tokens(900, 100), MU, warm, state)[0].num_wanted == 4, "all must be below 30 %"
    target, after = scale(6, 7, None, MU, [outlook(f"i-{n}", 0.2) for n in range(6)], replace(state, num_planned=6))
    assert target.num_wanted == 2, "1.2 caches to 80 %"
    assert scale(4, 7, None, MU, calm[:1], after)[0].num_wanted == 2, "once a window"


def test_what_the_next_window_would_start_again_does_not_go():
    calm = [outlook(f"i-{n}", 0.1) for n in range(4)]
    _, state = scale(4, 7, tokens(1500, 100), MU, [], ScalerState())
    state = replace(state, num_planned=4)  # two were added within the window
    assert scale(4, 7, tokens(1500, 100), MU, calm, state)[0].num_wanted == 2
    target, after = scale(2, 7, tokens(1500, 100), MU, calm[:2], replace(state, num_planned=2))
    assert (target.num_wanted, target.reason, after.shrunk) == (2, "the plan of this window stands", False)


def test_a_new_window_takes_nobody_away_while_somebody_is_too_full():
    hot = [outlook("i-1", 0.99, over=0.2), outlook("i-2"), outlook("i-3")]
    _, state = scale(3, 7, tokens(2500, 100), MU, [], ScalerState())
    target, after = scale(3, 8, tokens(1500, 100), MU, hot, state, now_s=10.0)
    assert target.num_wanted == 4 and "too full" in target.reason
    more, _ = scale(3, 8, tokens(4500, 100), MU, hot, state, now_s=10.0)
    assert more.num_wanted == 5 and "too full" not in more.reason, "the plan is for more"
    same, _ = scale(3, 8, tokens(3500, 100), MU, hot, state, now_s=10.0)
    assert same.num_wanted == 4 and "too full" not in same.reason
    target, _ = scale(4, 9, tokens(1500, 100), MU, [outlook("i-1")], after, now_s=30.0)
    assert target.num_wanted == 4, "it was, a moment ago"
    target, _ = scale(4, 9, tokens(1500, 100), MU, [outlook("i-1")], after, now_s=41.0)
    assert target.num_wanted == 2


def test_without_a_prediction_it_says_so():
    target, state = scale(3, 7, None, MU, [], ScalerState())
    assert target.num_wanted == 3 and "nothing is predicted" in target.reason
    target, _ = scale(3, 7, None, MU, [outlook("i-1", 0.99, over=0.5)], state)
    assert target.num_wanted == 4
