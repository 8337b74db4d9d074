"""The times of others are laid on the reader's clock where they come in."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from glowplug.domain.hardware import Node
from glowplug.domain.instance import Instance, Phase, PhaseName
from glowplug.domain.model import Model
from glowplug.domain.moment import moved
from glowplug.domain.snapshot import ModelLoad
from glowplug.events import Event
from glowplug.events.commands import PlaceInstance
from glowplug.events.facts import InstanceReady, ModelDeployed, NodeBeat, RequestWaiting, RouterLoadReported
from glowplug.fleet.clocks import AHEAD_S, BEHIND_S, MAX_KNOWN, WINDOW_S, Clocks, laying
from tests.fleet_builder import a_model, a_node, an_event, an_instance

HOUR_S = 3600.0


def sent(payload: Any, at: float, issuer: str = "router-1") -> Event:
    return replace(an_event(payload, issuer=issuer), occurred_at=at)


def report(at: float) -> Event:
    """A router's load, active as it reports."""
    return sent(RouterLoadReported(router_id="router-1", loads={"m": ModelLoad(last_active_at=at)}), at)


def waiting(at: float) -> Event:
    fact = RequestWaiting(
        model_key="m", request_id="r", router_id="router-1", num_waiting=1, waiting_since=at - 1, deadline_at=at + 30
    )
    return sent(fact, at)


def last_active(event: Event) -> float:
    found: float = event.data.loads["m"].last_active_at
    return found


@pytest.mark.parametrize("off_s", [0.0, 0.15, -0.15, -BEHIND_S + 0.1])
def test_ordinary_differences_and_delays_change_nothing(off_s: float) -> None:
    clocks = Clocks()
    events = [report(100.0 + n + off_s) for n in range(20)]
    assert all(clocks.laid(event, 100.0 + n) is event for n, event in enumerate(events))


@pytest.mark.parametrize("off_s", [20.0, HOUR_S, -HOUR_S])
def test_the_clock_of_a_router_is_known_from_its_reports(off_s: float) -> None:
    clocks = Clocks()
    assert last_active(clocks.laid(report(100.0 + off_s), 100.01)) == pytest.approx(100.01)
    fact = clocks.laid(waiting(101.0 + off_s), 101.01).data
    assert (fact.waiting_since, fact.deadline_at) == pytest.approx((100.01, 131.01))


@pytest.mark.parametrize("off_s", [20.0, -HOUR_S])
def test_people_see_an_event_by_the_clock_of_the_console(off_s: float) -> None:
    clocks = Clocks()
    shown = clocks.laid(report(100.0 + off_s), 100.0, dated=True)
    assert (shown.occurred_at, last_active(shown)) == (100.0, 100.0)
    assert clocks.laid(waiting(101.0 + off_s), 101.0, dated=True).occurred_at == 101.0


def test_a_time_to_come_is_proof_at_once_and_a_time_long_ago_is_an_old_message() -> None:
    clocks = Clocks()
    ahead, old = waiting(100.0 + HOUR_S), waiting(100.0 - HOUR_S)
    assert clocks.laid(ahead, 100.0).data.waiting_since == 99.0
    assert Clocks().laid(old, 100.0) is old, "it is kept on the bus for late readers"
    assert Clocks().laid(waiting(100.5), 100.0).data.waiting_since == 99.0


def test_a_delay_is_forgotten_with_the_first_message_that_has_none() -> None:
    clocks = Clocks()
    clocks.laid(report(90.0), 100.0)
    event = report(100.4)
    assert clocks.laid(event, 100.5) is event


def test_a_clock_that_is_set_back_is_believed_after_a_while() -> None:
    clocks = Clocks()
    clocks.laid(report(100.0 + HOUR_S), 100.0)
    times = [100.0 + n for n in range(1, int(2 * WINDOW_S) + 3)]
    laid = [last_active(clocks.laid(report(now_s), now_s)) for now_s in times]
    assert laid[-1] == times[-1]


def test_commands_tell_of_a_clock_that_is_behind_too() -> None:
    command = PlaceInstance(instance_id="i-1", model=a_model(), reason="asked", wanted_at=100.0 - HOUR_S)
    laid = Clocks().laid(sent(command, 100.0 - HOUR_S, "autoscaler-1"), 100.0)
    assert laid.data.wanted_at == 100.0 and laid.occurred_at == 100.0 - HOUR_S


def test_rows_go_by_the_beats_of_their_node() -> None:
    clocks = Clocks()
    for n in range(3):
        at = 100.0 + n - HOUR_S
        beat = clocks.laid(sent(NodeBeat(node=a_node(heartbeat_at=at)), at, "agent-node-1"), 100.0 + n)
    assert beat.data.node.heartbeat_at == 102.0
    phase = Phase(name=PhaseName.LOAD, started_at=90.0 - HOUR_S, ended_at=95.0 - HOUR_S)
    row = an_instance(created_at=80.0 - HOUR_S, ready_at=95.0 - HOUR_S, changed_at=95.0 - HOUR_S, phases=(phase,))
    laid = clocks.laid_row(row, 102.0)
    assert (laid.created_at, laid.ready_at, laid.drain_ends_at) == (80.0, 95.0, 0.0)
    assert laid.phases == (replace(phase, started_at=90.0, ended_at=95.0),)
    fact = clocks.laid(sent(InstanceReady(instance=row), 102.0 - HOUR_S, "agent-node-1"), 102.1)
    assert fact.data.instance == laid, "the fact and the row are the same"


def test_a_row_is_never_in_the_future() -> None:
    row = an_instance(created_at=90.0 + HOUR_S, changed_at=100.0 + HOUR_S)
    assert Clocks().laid_row(row, 100.0).created_at == 90.0


def test_the_last_beat_of_a_lost_node_tells_nothing() -> None:
    node = a_node(heartbeat_at=100.0 - HOUR_S)
    assert Clocks().laid_row(node, 100.0) is node


def test_a_payload_without_times_is_left_as_it_is() -> None:
    model = a_model()
    assert moved(model, 5.0) is model
    clocks, event = Clocks(), sent(ModelDeployed(model=model), 108.0)
    clocks.laid(report(108.0), 100.0)
    assert clocks.laid(event, 100.0) is event
    assert clocks.laid(event, 100.0, dated=True).occurred_at == 100.0


@pytest.mark.parametrize(
    ("off_s", "ahead_s"), [(AHEAD_S, 0.0), (0.25, 0.25), (-BEHIND_S, 0.0), (-BEHIND_S - 0.25, -BEHIND_S - 0.25)]
)
def test_a_difference_counts_beyond_what_is_ordinary(off_s: float, ahead_s: float) -> None:
    assert last_active(Clocks().laid(report(off_s), 0.0)) == off_s - ahead_s


def test_a_clock_counts_as_before_until_it_differs_by_more_than_is_ordinary() -> None:
    clocks = Clocks()
    laid = [last_active(clocks.laid(report(off_s), 0.0)) for off_s in (8, 8.125, 8.5)]
    assert laid == [0.0, 0.125, 0.0]
    clocks = Clocks()
    assert [last_active(clocks.laid(report(off_s), 0.0)) for off_s in (0.25, 0.25 + AHEAD_S)] == [0.0, AHEAD_S]
    clocks = Clocks()
    clocks.laid(report(-3.0), -11.0)
    event = report(AHEAD_S)
    assert clocks.laid(event, 0.0) is event, "it is ordinary again"


@pytest.mark.parametrize(
    ("later_s", "ahead_s"), [(WINDOW_S, 8), (WINDOW_S + 1, 8), (2 * WINDOW_S, 8), (2 * WINDOW_S + 1, 4)]
)
def test_the_largest_bound_counts_for_two_windows(later_s: float, ahead_s: float) -> None:
    clocks = Clocks()
    clocks.laid(report(8.0), 0.0)
    assert last_active(clocks.laid(report(later_s + 4.0), later_s)) == later_s + 4.0 - ahead_s


def test_of_two_windows_the_larger_bound_counts() -> None:
    clocks = Clocks()
    for now_s, off_s, ahead_s in ((0.0, 8.0, 8.0), (6.0, 9.0, 9.0), (12.0, 4.0, 9.0), (18.0, 2.0, 4.0)):
        assert last_active(clocks.laid(report(now_s + off_s), now_s)) == now_s + off_s - ahead_s


def test_the_beats_of_a_node_that_is_known_tell_that_it_is_behind() -> None:
    clocks = Clocks()
    for now_s, expected_s in ((0.0, -HOUR_S), (1.0, 1.0)):
        row = a_node(heartbeat_at=now_s - HOUR_S)
        assert clocks.laid_row(row, now_s).heartbeat_at == expected_s


def test_a_row_of_an_instance_tells_only_of_a_clock_that_is_ahead() -> None:
    clocks, row = Clocks(), an_instance(changed_at=-HOUR_S)
    clocks.laid_row(row, 0.0)
    assert clocks.laid_row(row, 1.0) is row
    assert clocks.laid_row(replace(row, changed_at=HOUR_S), 1.0).changed_at == 1.0


def test_silent_clocks_are_forgotten_for_those_too_many_and_others_stay() -> None:
    clocks = Clocks()
    for issuer in ("r-0", "r-1"):
        clocks.laid(replace(report(8.0), issuer=issuer), 0.0)
    for number in range(MAX_KNOWN - 2):
        clocks.laid_row(SimpleNamespace(node_id=f"n-{number}", changed_at=0.0), 0.0)
    later_s = 2 * WINDOW_S + 1.0
    for now_s in (6.0, later_s):  # r-1 alone is heard of again
        clocks.laid(replace(report(now_s + 8.0), issuer="r-1"), now_s)
    for number in range(2 * MAX_KNOWN):
        laid = clocks.laid(replace(report(later_s + 8.0), issuer=f"invented-{number}"), later_s)
        assert last_active(laid) == later_s, "a time to come is proof, whoever says it"
    old = waiting(later_s - HOUR_S)
    assert clocks.laid(replace(old, issuer="r-1"), later_s).data.deadline_at == later_s + 30.0 - HOUR_S - 8.0
    assert clocks.laid(unknown := replace(old, issuer="r-0"), later_s) is unknown


def test_only_tables_of_nodes_and_instances_are_laid() -> None:
    lay, clocks = laying(Node, Clocks(), lambda: 0.0), Clocks()
    assert lay is not None and lay(a_node(heartbeat_at=HOUR_S)).heartbeat_at == 0.0
    assert laying(Instance, clocks, lambda: 0.0) is not None and laying(Model, clocks, lambda: 0.0) is None
