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


def test_what_answers_take_is_what_one_is_expected_to() -> None:
    run = running(1, 2)
    run.handle(msg.RequestEnded(2, took_s=30.0))
    assert drains(run, 40.0) == []
    assert moves(run.handle(Tick(), 11.0)) == [(1, "i-2")]


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


@pytest.mark.parametrize("params", [{"move_within_s": 0.0}, {"max_continuations": 0}])
def test_nothing_leaves_where_that_is_switched_off(params: dict[str, Any]) -> None:
    assert drains(running(1, **params), 0.0) == []


def test_an_instance_whose_drain_has_no_known_end_keeps_its_streams() -> None:
    run = running(1)
    assert moves(run.instance("i-1", S.DRAINING, revision=2)) == []
    assert moves(run.handle(Tick(), 100.0)) == [] and run.now_s > NOW
