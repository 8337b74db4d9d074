"""The times of others are laid on the reader's clock where they come in."""

from dataclasses import replace
from typing import Any

import pytest

from glowplug.domain.instance import Phase, PhaseName
from glowplug.domain.moment import moved
from glowplug.domain.snapshot import ModelLoad
from glowplug.events import Event
from glowplug.events.commands import PlaceInstance
from glowplug.events.facts import InstanceReady, NodeBeat, RequestWaiting, RouterLoadReported
from glowplug.fleet.clocks import BEHIND_S, WINDOW_S, Clocks
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
