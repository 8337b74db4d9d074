"""Streams that leave an instance before its drain ends them."""

from typing import Any

import pytest

from glowplug.controllers.router import messages as msg
from glowplug.controllers.router.controller import remaining_s
from glowplug.domain.instance import InstanceState
from tests.router_steps import Run, model

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


@pytest.mark.parametrize("params", [{"move_within_s": 0.0}, {"max_continuations": 0}])
def test_nothing_leaves_where_that_is_switched_off(params: dict[str, Any]) -> None:
    assert drains(running(1, **params), 0.0) == []
