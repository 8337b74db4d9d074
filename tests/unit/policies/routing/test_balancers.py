"""Balancers: counts, expectations by the clock, choices and holds."""

import dataclasses
import gc
from random import Random
from types import FunctionType, ModuleType
from typing import Any

import pytest

from glowplug.domain.snapshot import Outlook, Target
from glowplug.policies.prediction.preserve_anticipator import LookAhead
from glowplug.policies.registry import choose, installed
from glowplug.policies.routing.counted import least_loaded
from glowplug.policies.routing.port import Balancer, BalancerParams
from glowplug.policies.routing.preserve_load_aware import (
    InstanceLoad,
    LoadAware,
    LoadOrder,
    floor_of,
    load_of,
    union_params,
)
from glowplug.policies.routing.tracked import PromptPace
from glowplug_lab.policies.llumnix_like import Freest, freeness

LARGE = 10_000
COUNTED = ("least_loaded", "round_robin", "minimum_use", "first_room")


def load_aware(*kv_tokens: int, **params: float) -> LoadAware:
    """Instances i-0, i-1, ... with these cache tokens, and slots for 100 requests."""
    balancer = LoadAware(BalancerParams(**({"tpot_s": 1.0} | params)))  # type: ignore[arg-type]
    for n, tokens in enumerate(kv_tokens):
        balancer.put(Target(f"i-{n}", 0, 100, tokens), 0.0)
    return balancer


def counted(name: str, *targets: Target, last: str = "") -> Balancer:
    balancer: Balancer = choose("routing", name)(BalancerParams())
    for target in targets:
        balancer.put(target, 0.0)
    if last:
        balancer.sent(0, last, 0, 0, 0.0)
    return balancer


def ahead(balancer: Balancer, instance_id: str, now_s: float = 0.0) -> Outlook:
    found = balancer.outlook(instance_id, now_s)
    assert found is not None
    return found


def running(balancer: Balancer, ticket: int, instance_id: str, prompt: int, expected: int) -> None:
    """A request there, its prompt read."""
    balancer.sent(ticket, instance_id, prompt, expected, 0.0)
    balancer.first_token(ticket, 0.0)


def chosen(balancer: Balancer, prompt: int = 10, expected: int = 10, now_s: float = 0.0) -> str:
    return balancer.choose(prompt, expected, now_s).instance_id


def test_what_is_sent_counts_before_it_is_prefilled() -> None:
    """Erratum E34."""
    balancer = load_aware(LARGE, LARGE, LARGE)
    went = []
    for ticket in range(6):
        went.append(chosen(balancer, 100, 50))
        balancer.sent(ticket, went[-1], 100, 50, 0.0)
    assert sorted(went) == ["i-0", "i-0", "i-1", "i-1", "i-2", "i-2"]


def test_a_step_takes_what_the_engine_says_until_answers_have_shown() -> None:
    """Four steps of 0.5 s, where the constant is a second."""
    balancer = load_aware()
    balancer.put(Target("i-0", 0, 100, LARGE, 0.5), 0.0)
    running(balancer, 1, "i-0", 10, 50)
    assert ahead(balancer, "i-0", 2.0).current_tokens == 46
    running(balancer, 2, "i-0", 10, 3)
    balancer.ended(2, 3, 4.0)
    assert balancer.tpot_s > 0.5
    learned = balancer.tpot_s
    balancer.put(Target("i-1", 0, 100, LARGE, 0.5), 4.0)
    assert balancer.tpot_s == learned, "an engine that starts later is no news of the others"


def test_load_is_what_is_queued_and_what_is_still_to_come() -> None:
    """Section 4.3.3: L_p + L_d."""
    balancer = load_aware(LARGE, LARGE, num_refreshed=0)
    balancer.sent(1, "i-0", 500, 100, 0.0)
    balancer.sent(2, "i-1", 100, 100, 0.0)
    assert chosen(balancer) == "i-1"
    balancer.first_token(1, 0.0)
    assert chosen(balancer) == "i-0"
    balancer.first_token(2, 0.0)
    running(balancer, 3, "i-1", 1, 1)
    assert ahead(balancer, "i-1").current_tokens == 101
    assert ahead(balancer, "i-1", 60.0).current_tokens == 41, "a step a second"
    balancer.ended(1, 1, 60.0)
    assert chosen(balancer, now_s=60.0) == "i-0"
    balancer.sent(4, "i-0", 500, 100, 60.0)
    assert chosen(balancer, now_s=60.0) == "i-1"
    balancer.ended(4, 0, 60.0)
    assert chosen(balancer, now_s=60.0) == "i-0"


def test_the_fuller_cache_is_avoided_though_it_has_less_to_do() -> None:
    """Section 4.3.3, erratum E35: the penalty begins at T_mem = 0.8."""
    balancer = load_aware(1000, LARGE)
    running(balancer, 1, "i-0", 700, 50)
    running(balancer, 2, "i-1", 700, 150)
    assert chosen(balancer, 20, 10) == "i-0"
    assert chosen(balancer, 200, 10) == "i-1"


def test_an_early_end_takes_the_rest_away_and_a_late_one_is_expected_on() -> None:
    """Section 4.3.1, with steps counted by the clock (erratum E33)."""
    balancer = load_aware(LARGE)
    running(balancer, 1, "i-0", 100, 50)
    assert ahead(balancer, "i-0", 20.0).current_tokens == 30
    assert ahead(balancer, "i-0", 50.0).current_tokens == 10, "another fifth"
    balancer.ended(1, 51, 50.0)
    assert ahead(balancer, "i-0", 50.0) == Outlook(peak_ratio=0.0, over_share=0.0)
    assert not balancer.requests


def test_the_step_is_learned_from_what_answers_took_a_token() -> None:
    balancer = load_aware(LARGE, tpot_s=1.0)
    balancer.sent(1, "i-0", 10, 10, 0.0)
    balancer.first_token(1, 2.0)
    balancer.ended(1, 11, 3.0)  # ten tokens after the first in a second
    balancer.sent(2, "i-0", 10, 100, 10.0)
    balancer.first_token(2, 10.0)
    assert ahead(balancer, "i-0", 12.0).current_tokens == 80


def test_no_step_passes_while_nothing_runs() -> None:
    balancer = load_aware(LARGE)
    balancer.sent(1, "i-0", 10, 10, 1000.0)
    assert ahead(balancer, "i-0", 1000.0).current_tokens == 10


def test_the_outlook_is_the_scalers_question() -> None:
    """Section 4.3.2: above 95 % in more than a tenth of the coming steps."""
    balancer = load_aware(1000)
    running(balancer, 1, "i-0", 880, 200)
    outlook = ahead(balancer, "i-0")
    assert outlook.peak_ratio == pytest.approx(0.979)
    assert outlook.over_share == pytest.approx(0.29)  # steps 71 to 99
    assert balancer.outlook("nobody", 0.0) is None


def test_the_overloaded_hold_only_where_it_is_asked_for() -> None:
    """Section 4.3.3."""
    for hold, wanted in ((False, "i-0"), (True, "")):
        balancer = load_aware(1000, hold_overloaded=hold)
        assert chosen(balancer, 5000, 10) == "i-0", "an instance without requests takes any"
        balancer.sent(1, "i-0", 880, 200, 0.0)
        assert chosen(balancer) == wanted
        balancer.ended(1, 5, 1.0)
        assert chosen(balancer) == "i-0"


def test_answers_that_go_on_longer_than_expected_are_counted_on_to_do_so() -> None:
    """Answers of 30 tokens expected at 10. Optional; not in the paper."""
    used = {}
    for learns in (True, False):
        balancer = load_aware(LARGE, learn_lengths=learns, num_steps=26)
        for ticket in range(40):
            running(balancer, ticket, "i-0", 10, 10)
        for ticket in range(40):
            balancer.ended(ticket, 30, 30.0)
        for ticket in range(100, 110):
            balancer.sent(ticket, "i-0", 10, 10, 30.0)
            balancer.first_token(ticket, 30.0)
        used[learns] = ahead(balancer, "i-0", 30.0).peak_ratio * LARGE
    assert used[False] == 10 * (10 + 9) and used[True] > 9 * (10 + 20)


def test_answers_of_a_token_are_soon_expected_to_be_so() -> None:
    balancer = load_aware(LARGE, learn_lengths=True)
    for ticket in range(40):
        running(balancer, ticket, "i-0", 10, 10)
        balancer.ended(ticket, 1, 1.0)
    for ticket in range(100, 110):
        running(balancer, ticket, "i-0", 10, 10)
    assert ahead(balancer, "i-0", 1.0).current_tokens < 10 * 5


def test_an_answer_that_its_client_left_was_longer_than_what_came() -> None:
    balancer = load_aware(LARGE, learn_lengths=True)
    for ticket in range(40):
        running(balancer, ticket, "i-0", 10, 10)
    for ticket in range(40):
        balancer.ended(ticket, 0, 30.0)
    for ticket in range(100, 110):
        running(balancer, ticket, "i-0", 10, 10)
    assert ahead(balancer, "i-0", 30.0).current_tokens > 10 * 25


def test_the_full_are_passed_over_and_come_back() -> None:
    balancer = load_aware(LARGE, LARGE)
    balancer.filled("i-0", 100)
    balancer.sent(1, "i-1", 500, 500, 0.0)
    assert chosen(balancer) == "i-1"
    balancer.filled("i-1", 100)
    assert chosen(balancer) == ""
    balancer.filled("i-0", 99)
    assert chosen(balancer) == "i-0"


def test_consolidation_changes_what_an_instance_takes() -> None:
    """HydraServe section 6."""
    balancer = load_aware(LARGE)
    balancer.put(Target("i-0", 0, 32, 4000), 0.0)
    balancer.sent(1, "i-0", 900, 10, 0.0)
    balancer.filled("i-0", 1)
    balancer.put(Target("i-0", 1, 1, 1000), 0.0)
    assert chosen(balancer) == ""
    assert ahead(balancer, "i-0").peak_ratio > 0.9


def test_an_instance_that_comes_back_has_what_still_runs_there() -> None:
    balancer = load_aware(LARGE, LARGE)
    balancer.sent(1, "i-0", 100, 10, 0.0)
    balancer.gone("i-0")
    balancer.put(Target("i-0", 1, 100, LARGE), 0.0)
    assert chosen(balancer) == "i-1"


def test_a_request_sent_again_is_counted_where_it_went_last() -> None:
    balancer = load_aware(LARGE, LARGE)
    balancer.sent(1, "i-0", 100, 10, 0.0)
    balancer.sent(1, "i-1", 100, 10, 1.0)
    assert [ahead(balancer, name, 1.0).queued_tokens for name in ("i-0", "i-1")] == [0, 100]


def test_freeness_is_steps_the_batch_could_go_on_for() -> None:
    """Llumnix section 4.4: (M - sum of V) / B."""
    assert freeness(1000, 600, 4) == 100
    assert freeness(1000, 0, 0) == 1000
    assert freeness(1000, 1200, 2) == -100


@pytest.mark.parametrize(
    ("targets", "wanted"),
    [
        ([Target("b", 4, 9, 400), Target("a", 1, 9, 200)], "a"),
        ([Target("b", 1, 9, 10), Target("a", 1, 9, 10)], "a"),
        ([Target("a", 2, 9, 20), Target("b", 1, 9, 10)], "b"),
        ([Target("a", 9, 9, 10)], ""),
        ([], ""),
    ],
    ids=["200 steps before 100", "ties go to the lower id", "ties go to fewer requests", "full", "none"],
)
def test_llumnix_takes_the_freest(targets: list[Target], wanted: str) -> None:
    assert chosen(counted("llumnix_like", *targets)) == wanted


def test_llumnix_looks_at_what_is_and_not_at_what_is_to_come() -> None:
    balancer = Freest(BalancerParams(tpot_s=1.0))
    for name in ("i-0", "i-1"):
        balancer.put(Target(name, 0, 100, 1000), 0.0)
    balancer.sent(1, "i-0", 100, 800, 0.0)  # will be full
    balancer.filled("i-0", 1)
    balancer.sent(2, "i-1", 150, 10, 0.0)  # is fuller
    balancer.filled("i-1", 1)
    assert chosen(balancer) == "i-0"
    assert chosen(balancer, now_s=9.0) == "i-0"
    balancer.ended(2, 10, 9.0)
    balancer.filled("i-1", 0)
    assert chosen(balancer, now_s=9.0) == "i-1"


@pytest.mark.parametrize(
    ("name", "targets", "wanted"),
    [
        ("least_loaded", [Target("a", 3, 100), Target("b", 2, 4)], "b"),
        ("minimum_use", [Target("a", 3, 100), Target("b", 2, 4)], "a"),
        ("first_room", [Target("b", 3, 4), Target("a", 0, 4)], "b"),
        ("first_room", [Target("b", 4, 4), Target("a", 0, 4)], "a"),
    ],
    ids=["LR: requests, not shares", "MU: shares, not requests", "filled before the second", "then the second"],
)
def test_what_each_policy_counts(name: str, targets: list[Target], wanted: str) -> None:
    """PreServe section 3.2.2 (LR, MU); HydraServe's published code (the first free slot)."""
    assert chosen(counted(name, *targets)) == wanted


@pytest.mark.parametrize(("last", "wanted"), [("", "a"), ("a", "b"), ("b", "c"), ("c", "a"), ("d", "a")])
def test_round_robin_goes_on_after_the_last_and_wraps(last: str, wanted: str) -> None:
    """PreServe section 3.2.2."""
    balancer = counted("round_robin", Target("b", 0, 4), Target("a", 0, 4), Target("c", 0, 4), last=last)
    assert [chosen(balancer), chosen(balancer)] == [wanted, wanted]


def test_round_robin_skips_a_full_instance() -> None:
    targets = [Target("a", 0, 1), Target("b", 1, 1), Target("c", 0, 1)]
    assert chosen(counted("round_robin", *targets, last="a")) == "c"


@pytest.mark.parametrize("name", COUNTED)
@pytest.mark.parametrize("targets", [[Target("a", 4, 4), Target("b", 9, 4)], []], ids=["all full", "none there"])
def test_no_free_slot_means_hold(name: str, targets: list[Target]) -> None:
    decision = counted(name, *targets).choose(0, 0, 0.0)
    assert decision.instance_id == "" and "as many requests as it may" in decision.reason


@pytest.mark.parametrize("name", ["least_loaded", "round_robin", "minimum_use"])
def test_ties_break_by_id(name: str) -> None:
    assert chosen(counted(name, Target("z", 1, 4), Target("b", 1, 4), Target("m", 1, 4))) == "b"


@pytest.mark.parametrize("name", COUNTED)
def test_baselines_need_no_tokens(name: str) -> None:
    balancer = counted(name)
    assert not balancer.tracks_tokens and balancer.outlook("i-0", 0.0) is None


def test_what_other_routers_see_ahead_is_load_too() -> None:
    balancer = load_aware(1000, 1000)
    balancer.others("i-0", Outlook(peak_ratio=0.1, over_share=0.0, queued_tokens=300, current_tokens=200))
    balancer.filled("i-0", 3)
    balancer.sent(1, "i-1", 100, 100, 0.0)
    assert chosen(balancer) == "i-1", "200 tokens against 500"
    balancer.sent(2, "i-1", 500, 50, 0.0)
    assert chosen(balancer) == "i-0"
    balancer.others("i-0", Outlook(peak_ratio=1.5, over_share=0.5, queued_tokens=300, current_tokens=200))
    assert chosen(balancer) == "i-1", "a full cache is a penalty, whoever fills it"
    balancer.others("i-0", None)
    balancer.filled("i-0", 0)
    assert chosen(balancer) == "i-0"


def test_the_steps_ahead_tell_a_large_batch_from_a_long_answer() -> None:
    """As printed (4.3.3) both have 400 tokens to come; over the next 20 steps, 20 and 80."""
    for horizon, wanted in ((0, "i-0"), (20, "i-1")):
        balancer = load_aware(LARGE, LARGE, decode_horizon=horizon)
        for ticket in range(4):
            balancer.sent(ticket, "i-0", 0, 95 if not horizon else 100, 0.0)
        balancer.sent(9, "i-1", 0, 400, 0.0)
        assert chosen(balancer) == wanted


def paced(**params: float) -> LoadAware:
    """One instance that has read 100 tokens in a second and told so; half of the 1 s objective is for reading."""
    balancer = load_aware(LARGE, **({"tpot_slo_s": 1.0, "stall_ratio": 0.5} | params))
    balancer.sent(0, "i-0", 100, 10, 0.0)
    balancer.first_token(0, 1.0)
    balancer.ended(0, 10, 2.0)
    return balancer


def test_prompts_are_sent_in_stretches_that_answers_under_way_bear() -> None:
    """Ours."""
    balancer = paced()
    balancer.sent(1, "i-0", 20, 10, 10.0)
    assert chosen(balancer, 20, now_s=10.0) == "i-0"
    balancer.sent(2, "i-0", 20, 10, 10.0)
    assert chosen(balancer, 20, now_s=10.0) == "", "a third would make it 60 tokens"
    balancer.first_token(1, 10.2)
    assert chosen(balancer, 20, now_s=10.2) == "", "20 read and 20 left: still one stretch"
    balancer.first_token(2, 10.4)
    assert chosen(balancer, 20, now_s=10.4) == "i-0", "a step lies between"


def test_a_prompt_longer_than_a_stretch_goes_alone_and_a_very_long_one_is_nobodys_pace() -> None:
    balancer = paced()
    assert chosen(balancer, 90, now_s=10.0) == "i-0"
    balancer.sent(1, "i-0", 90, 10, 10.0)
    assert chosen(balancer, 1, now_s=10.0) == ""
    balancer = paced()
    balancer.sent(1, "i-0", 210, 10, 10.0)
    assert chosen(balancer, 1, now_s=10.0) == "i-0", "it alone takes more than twice the objective"


@pytest.mark.parametrize("params", [{"stall_ratio": 0.0}, {"tpot_slo_s": 0.0}], ids=["not asked for", "no objective"])
def test_prompts_go_as_they_come_where_nobody_asks_for_a_pace(params: dict[str, float]) -> None:
    balancer = paced(**params)
    for ticket in range(1, 9):
        balancer.sent(ticket, "i-0", 100, 10, 10.0)
    assert chosen(balancer, now_s=10.0) == "i-0"


def test_nothing_is_held_where_first_tokens_are_not_told() -> None:
    """Unstreamed answers: a prompt counts as unread until its end."""
    balancer = paced()
    balancer.sent(1, "i-0", 100, 10, 10.0)
    balancer.ended(1, 10, 12.0)
    balancer.sent(2, "i-0", 100, 10, 20.0)
    assert chosen(balancer, now_s=20.0) == "i-0"


def test_nobody_is_held_for_long_by_one_that_does_not_tell() -> None:
    balancer = paced()
    balancer.sent(1, "i-0", 100, 10, 10.0)
    assert chosen(balancer, 100, now_s=11.0) == ""
    assert chosen(balancer, 100, now_s=19.0) == "i-0", "four times what reading takes"


def test_the_pace_of_reading_and_the_share_that_reports_move_with_the_newest() -> None:
    pace, seen = PromptPace(), []
    for took_s, num_tokens in ((2.0, 100), (8.0, 100), (3.0, 0)):
        pace.read(num_tokens, took_s / max(1, num_tokens))
        seen.append(pace.token_s)
    assert seen == pytest.approx([0.02, 0.032, 0.6256])
    seen = []
    for has_reported in (False, True, False, True):
        pace.answered(has_reported)
        seen.append(pace.reporting)
    assert seen == pytest.approx([0.0, 1.0, 0.8, 0.84])


@pytest.mark.parametrize(
    ("changed", "read_s", "longest_s", "would_stall"),
    [
        ({}, 0.0, 6.0, False),
        ({}, 0.0, 5.9, True),
        ({}, 1.0, 6.0, True),
        ({}, 23.9, 6.0, True),
        ({}, 24.0, 6.0, False),
        ({}, 31.9, 8.0, True),
        ({}, 32.0, 8.0, False),
        ({}, 0.0, 0.5, True),
        ({}, 0.0, 0.49, False),
        ({"reporting": 0.9}, 0.0, 5.9, True),
        ({"reporting": 0.89}, 0.0, 5.9, False),
        ({"token_s": 0.0}, 0.0, -1.0, False),
        ({"num_prompts": 0, "num_tokens": 0}, 9.0, 1.0, False),
    ],
)
def test_one_more_prompt_would_stall_an_engine_that_reads_for_long(
    changed: dict[str, Any], read_s: float, longest_s: float, *, would_stall: bool
) -> None:
    """Two prompts of 16 tokens, 2 s each."""
    pace = PromptPace(num_prompts=2, num_tokens=32, since_s=10.0, token_s=0.125, reporting=1.0)
    pace = dataclasses.replace(pace, **changed)
    assert pace.would_stall(10.0 + read_s, longest_s) == would_stall


def test_an_answer_is_expected_whole_from_its_first_token_on() -> None:
    balancer = load_aware(LARGE)
    balancer.sent(1, "i-0", 100, 50, 0.0)
    balancer.first_token(1, 10.0)
    assert [ahead(balancer, "i-0", now_s).current_tokens for now_s in (10.0, 15.0)] == [50, 45]


def test_a_prompt_is_read_once() -> None:
    balancer = load_aware(LARGE)
    for ticket in (1, 2):
        balancer.sent(ticket, "i-0", 100, 50, 0.0)
    for now_s in (0.0, 5.0):
        balancer.first_token(1, now_s)
    assert ahead(balancer, "i-0").queued_tokens == 100 and balancer.requests[1].first_at == 0.0
    for ticket in (1, 2):
        balancer.ended(ticket, 5, 6.0)
    balancer.sent(3, "i-0", 100, 50, 6.0)
    balancer.ended(3, 0, 7.0)
    here = balancer.instances["i-0"]
    assert here.reading.num_prompts == here.queued_tokens == 0
    assert (here.reading.reporting, here.tpot_s) == pytest.approx((0.8, 1.5 + 0.2 * (1.2 - 1.5)))


def test_reading_begins_with_the_first_of_the_prompts() -> None:
    pace = PromptPace()
    assert (pace.sent(5, 1.0), pace.sent(7, 2.0), pace.since_s) == (5, 12, 1.0)
    pace.read(5)
    assert (pace.num_prompts, pace.num_tokens) == (1, 7)
    pace.read(7)
    assert (pace.sent(1, 3.0), pace.since_s) == (1, 3.0)


def test_the_time_of_a_step_is_learned_by_instance_and_by_model() -> None:
    balancer, seen = load_aware(LARGE, LARGE, tpot_s=1.0), []
    for ticket, (instance_id, first_s, took_s, tokens) in enumerate(
        [
            ("i-0", 2.0, 7.0, 11),  # 0.5 s, ten tokens after the first
            ("i-0", 0.0, 10.0, 11),  # 1 s
            ("i-1", -1.0, 20.0, 10),  # 2 s; unstreamed
            ("i-1", 2.0, 9.0, 1),
            ("i-1", 0.0, 1000.0, 2),  # bounded by 10 s
            ("i-1", 0.0, 0.0, 2),
        ]
    ):
        at_s = 2000.0 * ticket
        balancer.sent(ticket, instance_id, 10, 10, at_s)
        if first_s >= 0:
            balancer.first_token(ticket, at_s + first_s)
            balancer.first_token(ticket, at_s + first_s + 5)
        balancer.ended(ticket, tokens, at_s + took_s)
        seen.append((*(balancer.instances[name].tpot_s for name in ("i-0", "i-1")), balancer.tpot_s))
    assert seen == [
        pytest.approx(one)
        for one in (
            (0.5, 0.0, 0.9),
            (0.6, 0.0, 0.92),
            (0.6, 2.0, 1.136),
            (0.6, 2.0, 1.136),
            (0.6, 3.6, 2.9088),
            (0.6, 2.88002, 2.32706),
        )
    ]


def test_a_changed_expectation_counts_from_then_on() -> None:
    balancer = load_aware(LARGE, LARGE, num_refreshed=0)
    running(balancer, 1, "i-0", 10, 50)
    running(balancer, 2, "i-1", 10, 60)
    balancer.expect(1, 100, 10.0)
    assert [ahead(balancer, name, 10.0).current_tokens for name in ("i-0", "i-1")] == [90, 50]
    assert chosen(balancer, now_s=10.0) == "i-1"
    balancer.expect(1, 20, 15.0)
    assert ahead(balancer, "i-0", 15.0).current_tokens == 5
    assert chosen(balancer, now_s=15.0) == "i-0"
    balancer.expect(9, 20, 15.0)


def test_parts_of_steps_add_up_and_a_clock_that_is_set_back_adds_none() -> None:
    balancer = load_aware(LARGE)
    running(balancer, 1, "i-0", 10, 50)
    left = [ahead(balancer, "i-0", now_s).current_tokens for now_s in (0.6, 1.2, 1.8, 1.0, 1.9, 2.0)]
    assert left == [50, 49, 49, 49, 49, 48]


@pytest.mark.parametrize(
    ("expected", "others", "hold_ratio", "wanted"),
    [(1, 0.0, 0.9, ""), (1, 0.0, 0.901, "i-0"), (1, 0.1, 0.951, ""), (1, 0.1, 1.002, "i-0"), (10, 0.0, 0.905, "")],
)
def test_one_step_too_full_is_an_overload_with_what_others_expect(
    expected: int, others: float, hold_ratio: float, wanted: str
) -> None:
    """901 tokens of 1,000 at the first step of a request of 900; ten steps up to 909."""
    balancer = load_aware(1000, hold_overloaded=True, overload_share=0.0, hold_ratio=hold_ratio)
    balancer.others("i-0", Outlook(peak_ratio=others, over_share=0.0))
    balancer.sent(1, "i-0", 901, expected, 0.0)
    assert chosen(balancer) == wanted


def test_a_tenth_of_the_steps_too_full_is_none_yet() -> None:
    for expected, wanted in ((10, "i-0"), (11, "")):
        balancer = load_aware(1000, hold_overloaded=True)
        balancer.sent(1, "i-0", 960, expected, 0.0)
        assert chosen(balancer) == wanted


def test_an_instance_that_is_gone_is_forgotten_after_its_last_request() -> None:
    balancer = load_aware(LARGE, LARGE)
    balancer.sent(1, "i-0", 10, 10, 0.0)
    for name in ("i-0", "i-1", "nobody"):
        balancer.gone(name)
    assert list(balancer.instances) == ["i-0"] and chosen(balancer) == ""
    balancer.put(Target("i-2", 0, 100, LARGE), 0.0)
    balancer.sent(3, "i-2", 10, 500, 0.0)
    assert chosen(balancer) == "i-2"
    balancer.put(Target("i-0", 0, 100, LARGE), 0.0)
    assert chosen(balancer) == "i-0"
    balancer.gone("i-0")
    assert chosen(balancer) == "i-2"
    balancer.ended(3, 1, 0.0)
    balancer.gone("i-2")
    balancer.sent(2, "i-1", 10, 10, 0.0)
    assert list(balancer.requests) == [1], "i-1 is unknown by now"
    balancer.ended(1, 10, 1.0)
    assert not balancer.instances
    balancer.filled("i-0", 1)
    balancer.others("i-0", None)
    assert chosen(balancer) == ""


def test_the_load_is_the_formula_and_its_shortcuts_are_lower_bounds() -> None:
    """Section 4.3.3, step by step, over random instances of 1,000 tokens."""
    chance = Random(3)
    for _ in range(300):
        look = LookAhead(1000)
        for number in range(chance.randint(0, 4)):
            look.add(number, chance.randint(0, 400), chance.randint(1, 150))
            look.advance(look.now_step + chance.randint(0, 5))
        queued, current, others = chance.randint(0, 300), chance.randint(0, 300), chance.choice((0, 200))
        prompt, expected = chance.randint(0, 400), chance.choice((0, 1, 20, 150))
        params = BalancerParams(num_steps=chance.choice((1, 60)), penalty=chance.choice((0.0, 1.0, 2.0)))
        load = InstanceLoad("i-0", look, queued, current, others)
        used = [look.tokens(look.now_step + step) for step in range(params.num_steps)]
        peak = max(tokens + (prompt + step if step < expected else 0) for step, tokens in enumerate(used))
        wanted = queued + current + prompt + expected + params.penalty * max(0.0, peak + others - 800)
        assert load_of(load, prompt, expected, params) == pytest.approx(wanted)
        enough = chance.randint(0, 1500)
        found = load_of(load, prompt, expected, params, enough)
        assert found == pytest.approx(wanted) if wanted < enough else enough <= found <= wanted + 1e-6
        floor = queued + current + params.penalty * max(0.0, used[0] + others - 800)
        assert floor_of(load, params) == pytest.approx(floor)


def loads(balancer: LoadAware, *, num: int = 3) -> list[tuple[int, int, int] | None]:
    found = [balancer._order.of(f"i-{number}") for number in range(num)]
    return [None if one is None else (one.queued_tokens, one.current_tokens, one.other_kv_tokens) for one in found]


@pytest.mark.parametrize(
    ("num_refreshed", "wanted"),
    [
        (0, [(100, 100, 100), (100, 80, 100), (100, 80, 100), (100, 80, 100)]),
        (1, [(90, 100, 100), (90, 80, 100), (90, 70, 100), (90, 70, 60)]),
        (2, [(90, 90, 100), (90, 80, 80), (70, 70, 80), (60, 70, 60)]),
        (9, [(90, 90, 90), (80, 80, 80), (70, 70, 70), (60, 60, 60)]),
    ],
)
def test_a_choice_updates_what_changed_and_a_few_of_the_others_in_turn(
    num_refreshed: int, wanted: list[tuple[int, int, int]]
) -> None:
    balancer = load_aware(*4 * [LARGE], num_refreshed=num_refreshed)
    for number in range(3):
        running(balancer, number, f"i-{number}", 10, 100)
    chosen(balancer)
    seen = []
    for now_s in (10.0, 20.0, 30.0, 40.0):
        if now_s == 20.0:
            balancer.filled("i-1", 1)
        chosen(balancer, now_s=now_s)
        seen.append(tuple(load[1] for load in loads(balancer) if load))
    assert seen == wanted


def test_an_instance_is_updated_in_turn_while_it_runs_something() -> None:
    balancer = load_aware(LARGE, LARGE, num_refreshed=1)
    running(balancer, 1, "i-0", 10, 100)
    running(balancer, 2, "i-1", 10, 100)
    chosen(balancer)
    balancer.ended(1, 1, 1.0)
    chosen(balancer, now_s=1.0)
    for now_s in (10.0, 20.0):
        chosen(balancer, now_s=now_s)
        assert loads(balancer, num=2) == [(0, 0, 0), (0, 100 - now_s, 0)]


@pytest.mark.parametrize(
    ("horizon", "num_in_flight", "current"),
    [(0, 3, 170), (20, 3, 60), (20, 2, 40), (20, 1, 20), (20, 0, 20), (20, 9, 90)],
)
def test_others_tokens_to_come_are_at_most_those_of_their_requests_within_the_horizon(
    horizon: int, num_in_flight: int, current: int
) -> None:
    balancer = load_aware(1000, 1000, decode_horizon=horizon)
    balancer.sent(1, "i-0", 30, 100, 0.0)
    balancer.others("i-0", Outlook(peak_ratio=0.25, over_share=0.0, queued_tokens=7, current_tokens=70))
    balancer.filled("i-0", num_in_flight)
    chosen(balancer)
    assert loads(balancer, num=1) == [(37, current, 250)]
    balancer.others("i-0", None)
    chosen(balancer)
    assert loads(balancer, num=1) == [(30, 20 if horizon else 100, 0)]


def test_the_lowest_floors_are_visited_up_to_the_most() -> None:
    """i-2 has the highest floor and the least load: its cache has room for the request."""
    floors = {"i-0": (700, 100), "i-1": (700, 101), "i-2": (10, 700)}
    for most_visited, wanted in ((0, "i-2"), (1, "i-0"), (2, "i-0"), (3, "i-2")):
        order = LoadOrder(BalancerParams(most_visited=most_visited))
        for instance_id, (cached, queued) in floors.items():
            look = LookAhead(1000)
            look.add("a", cached, 1000)
            order.put(InstanceLoad(instance_id, look, queued))
        assert order.route(900, 10).instance_id == wanted
        assert [list(order.lowest(num)) for num in (0, 1, 2)] == [["i-0", "i-1", "i-2"], ["i-0"], ["i-0", "i-1"]]
        order.put(InstanceLoad("i-0", LookAhead(1000), 900))
        assert (list(order.lowest(0)), len(order)) == (["i-1", "i-2", "i-0"], 3)
        order.drop("i-1")
        order.drop("i-1")
        assert (list(order.lowest(0)), order.of("i-1"), len(order)) == (["i-2", "i-0"], None, 2)


def test_an_instance_that_was_gone_between_two_choices_is_looked_at_anew() -> None:
    balancer = load_aware(1000, 1000)
    chosen(balancer)
    balancer.gone("i-0")
    balancer.put(Target("i-0", 0, 100, 1000), 0.0)
    running(balancer, 1, "i-0", 900, 10)
    running(balancer, 2, "i-1", 10, 100)
    assert chosen(balancer, 100, 10) == "i-1", "its cache would be too full"
    balancer.ended(1, 1, 0.0)
    assert chosen(balancer, 100, 10) == "i-0"
    assert list(balancer._busy) == ["i-1"]


def test_the_union_keeps_all_parameters_but_its_changes() -> None:
    params = BalancerParams(num_steps=7, penalty=2.0, overload_share=0.3)
    assert union_params(params) == BalancerParams(
        num_steps=7,
        penalty=2.0,
        learn_lengths=True,
        decode_horizon=7,
        hold_overloaded=True,
        overload_share=0.0,
        stall_ratio=0.5,
    )


def test_what_is_counted_is_what_was_told_of_instances_that_are_here() -> None:
    balancer = least_loaded(BalancerParams())
    balancer.filled("i-0", 0)
    balancer.others("i-0", None)
    assert chosen(balancer) == ""
    for name, num in (("i-0", 3), ("i-1", 2)):
        balancer.put(Target(name, num, 4, 10), 0.0)
    assert chosen(balancer) == "i-1"
    balancer.filled("i-1", 4)
    assert chosen(balancer) == "i-0"
    balancer.gone("i-0")
    balancer.gone("nobody")
    assert chosen(balancer) == ""
    for name in ("i-0", "i-1"):
        balancer.put(Target(name, 4, 5, 10), 0.0)
    assert chosen(balancer) == "i-0"
    assert not balancer.reads_prefixes and balancer.num_blocks == 0


def num_kept(root: object) -> int:
    """Containers reachable from an object, without classes and functions."""
    kept, left = {}, [root]
    while left:
        one = left.pop()
        if id(one) not in kept and gc.is_tracked(one) and not isinstance(one, type | FunctionType | ModuleType):
            kept[id(one)] = one
            left += gc.get_referents(one)
    return len(kept)


@pytest.mark.parametrize("name", installed("routing"))
def test_instances_that_come_and_go_one_at_a_time_leave_nothing(name: str) -> None:
    balancer: Balancer = choose("routing", name)(BalancerParams(most_blocks=1000))
    prompt, sizes = tuple(range(1000, 1010)), []

    def lives(number: int) -> None:
        instance_id, now_s = f"i-{number}", 10.0 * number
        balancer.put(Target(instance_id, 0, 4, LARGE, ready_at=now_s), now_s)
        balancer.choose(100, 10, now_s, prompt)
        balancer.sent(number, instance_id, 100, 10, now_s, prompt)
        balancer.first_token(number, now_s + 1.0)
        balancer.gone(instance_id)
        balancer.ended(number, 10, now_s + 2.0)

    for number in range(300):
        lives(number)
        sizes += [num_kept(balancer)] if number in (99, 299) else []
    assert sizes[1] <= sizes[0]
