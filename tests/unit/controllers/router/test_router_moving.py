"""Streams that leave an instance before its drain ends them."""

from typing import Any

import pytest

from glowplug.controllers.effects import Tick
from glowplug.controllers.router import messages as msg
from glowplug.controllers.router.controller import remaining_s
from glowplug.domain.instance import InstanceState
from tests.router_steps import NOW, Run, dispatched, model

S = InstanceState


def running(*tickets: int, **params: Any) -> Run:
    """Requests of model m have run on i-1 for 2 s, and i-2 has two free slots."""
    run = Run(model(max_concurrency=2), **({"move_within_s": 5.0} | params))
    run.instance("i-1")
    for _ in tickets:
        run.arrive()
    run.instance("i-2")
    run.now_s += 2.0
    return run


def drains(run: Run, left_s: float, revision: int = 2, **fields: Any) -> list[Any]:
    return moves(run.instance("i-1", S.DRAINING, revision=revision, drain_ends_at=run.now_s + left_s, **fields))


def moves(effects: list[Any]) -> list[tuple[int, str]]:
    return [(e.ticket, e.instance.instance_id) for e in effects if isinstance(e, msg.MoveStream)]


@pytest.mark.parametrize(
    ("ran_s", "mean_s", "expected_s"), [(0.0, 0.0, 0.0), (3.0, 0.0, 3.0), (3.0, 8.0, 8.0), (9.0, 8.0, 9.0)]
)
def test_an_answer_takes_as_long_as_others_do_or_again_as_long_as_it_has(
    ran_s: float, mean_s: float, expected_s: float
) -> None:
    assert remaining_s(ran_s, mean_s) == expected_s


def test_who_would_outlast_the_drain_leaves_and_who_ends_in_time_stays() -> None:
    run = running(1)
    run.now_s += 20.0
    run.arrive()  # i-2 has fewer requests
    run.instance("i-2", S.FAILED, revision=2)
    run.arrive()
    run.instance("i-3")
    effects = run.instance("i-1", S.DRAINING, revision=2, drain_ends_at=run.now_s + 10.0)
    assert moves(effects) == [(1, "i-3")], "it has run for 20 s, and the other one has just begun"
    (move,) = [e for e in effects if isinstance(e, msg.MoveStream)]
    assert move.reason == "i-1 drains and ends in 10.0 s"
    assert moves(run.handle(Tick(), 4.0)) == []
    assert moves(run.handle(Tick(), 1.5)) == [(3, "i-3")], "4.5 s are left, and it has run for longer"


def test_what_answers_take_is_what_one_is_expected_to() -> None:
    run = running(1, 2)
    run.handle(msg.RequestEnded(2, took_s=30.0))
    assert drains(run, 40.0) == []
    assert moves(run.handle(Tick(), 11.0)) == [(1, "i-2")]


def test_while_models_wait_for_memory_only_what_ends_soon_stays() -> None:
    run = Run(model(), model("b"), move_within_s=5.0)
    run.instance("i-1")
    run.arrive()
    run.instance("i-2")
    run.now_s += 10.0
    assert drains(run, 300.0) == [] and moves(run.handle(Tick())) == []
    run.arrive("b")
    effects = run.handle(Tick(), 0.5) + run.handle(Tick(), 0.6)
    assert moves(effects) == [(1, "i-2")] and run.controller.overload.is_short


def test_it_counts_where_it_is_asked_for_and_is_the_same_demand() -> None:
    run = running(1)
    assert drains(run, 0.0) == [(1, "i-2")]
    load = run.controller.load("m")
    assert load.in_flight_by_instance == {"i-2": 1}
    assert (load.num_arrived, load.num_dispatched, load.num_in_flight, load.num_waiting) == (1, 1, 1, 0)
    assert moves(run.handle(Tick(), 1.0)) == [], "it is on its way"
    assert run.handle(msg.StreamMoved(1, 7)) == []
    assert run.controller.load("m") == load
    run.handle(msg.RequestEnded(1, 5.0))
    assert not run.controller.in_flight


def test_without_a_free_slot_elsewhere_nothing_leaves() -> None:
    run = running(1)
    run.instance("i-2", revision=2, max_concurrency=1)
    run.arrive()
    assert drains(run, 0.0) == []
    run.instance("i-2", S.FAILED, revision=3)
    assert moves(run.handle(Tick(), 1.0)) == []
    run.instance("i-3")
    assert moves(run.handle(Tick(), 0.2)) == [(1, "i-3")]


def test_those_who_wait_come_first() -> None:
    run = running(1)
    run.instance("i-2", S.FAILED, revision=2)
    run.arrive()
    assert drains(run, 0.0) == []
    run.arrive()
    assert len(run.controller.queues["m"].waiting) == 1
    assert dispatched(run.instance("i-3", max_concurrency=1)) == [(3, "i-3")]
    assert moves(run.handle(Tick(), 0.2)) == []


def test_one_that_the_other_one_did_not_take_is_asked_again_after_a_while_and_not_for_ever() -> None:
    run = running(1, max_continuations=2)
    assert drains(run, 0.0) == [(1, "i-2")]
    run.handle(msg.MoveFailed(1, is_asked=True))
    assert run.controller.in_flight == {"i-1": 1}
    assert moves(run.handle(Tick(), 0.5)) == []
    for _ in range(2):
        assert moves(run.handle(Tick(), 1.0)) == [(1, "i-2")]
        run.handle(msg.MoveFailed(1, is_asked=True))
    assert moves(run.handle(Tick(), 5.0)) == [], "three times"


def test_one_that_could_not_be_reached_is_left_alone_for_a_while() -> None:
    run = running(1)
    drains(run, 0.0)
    run.handle(msg.MoveFailed(1, is_asked=True, is_unreachable=True))
    assert run.controller.balances.quarantined.keys() == {"i-2"}


@pytest.mark.parametrize("refused", [True, False])
def test_what_none_can_go_on_with_is_not_asked_for_again_and_what_has_not_begun_is(refused: bool) -> None:
    run = running(1)
    drains(run, 0.0)
    run.handle(msg.MoveFailed(1, is_refused=refused))
    assert moves(run.handle(Tick(), 1.5)) == ([] if refused else [(1, "i-2")])


def test_a_drain_that_is_taken_back_keeps_its_streams() -> None:
    run = running(1)
    assert drains(run, 3.0) == []
    run.instance("i-1", revision=3)
    assert moves(run.handle(Tick(), 10.0)) == []


@pytest.mark.parametrize("state", [S.SWAPPED_OUT, S.FAILED, S.DRAINING])
def test_one_that_stays_learns_what_became_of_its_instance_meanwhile(state: InstanceState) -> None:
    run = running(1)
    drains(run, 0.0)
    told = run.instance("i-1", state, revision=3)
    assert not [e for e in told if isinstance(e, msg.Recall)], "it counts elsewhere"
    ended = msg.Recall(1, "i-1 has ended meanwhile", ended=True)
    assert run.handle(msg.MoveFailed(1, is_asked=True)) == ([] if state is S.DRAINING else [ended])


def test_who_is_recalled_from_an_address_that_is_no_more_is_asked_to_leave_once() -> None:
    run = running(1)
    recalled = run.instance("i-1", S.DRAINING, revision=2, url="http://other:1", drain_ends_at=run.now_s)
    assert recalled == [msg.Recall(1, "the instance has another address", moved=True)]
    assert moves(run.handle(Tick(), 0.2)) == [(1, "i-2")], "it has not begun, or no other can go on with it"


def test_a_stream_that_breaks_leaves_nothing_any_more() -> None:
    run = running(1)
    drains(run, 0.0)
    assert dispatched(run.handle(msg.StreamBroken(1, "died", is_lost=False))) == [(1, "i-2")]
    run.handle(msg.MoveFailed(1, is_asked=True))
    assert run.controller.in_flight == {"i-2": 1}


def test_where_the_other_one_fails_too_after_the_first_was_lost_the_stream_waits_for_a_third() -> None:
    run = running(1)
    drains(run, 0.0)
    run.handle(msg.StreamMoved(1, 3))
    run.instance("i-2", S.FAILED, revision=2)
    [hold, *_] = run.handle(msg.DispatchFailed(1, True, "died"))
    assert isinstance(hold, msg.Hold)
    assert dispatched(run.instance("i-3")) == [(1, "i-3")]


@pytest.mark.parametrize("params", [{"move_within_s": 0.0}, {"max_continuations": 0}])
def test_nothing_leaves_where_that_is_switched_off(params: dict[str, Any]) -> None:
    assert drains(running(1, **params), 0.0) == []


def test_an_instance_whose_drain_has_no_known_end_keeps_its_streams() -> None:
    run = running(1)
    assert moves(run.instance("i-1", S.DRAINING, revision=2)) == []
    assert moves(run.handle(Tick(), 100.0)) == [] and run.now_s > NOW
