"""Facts doubled, reordered, delayed or lost: once the table has been read, all readers agree.

Commands of replaced controllers are refused in any order.
"""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from glowplug.controllers.fencing import Fence
from glowplug.domain.errors import StaleEpoch
from glowplug.domain.instance import Instance, InstanceState
from glowplug.events.commands import StopInstance
from glowplug.events.envelope import Event
from glowplug.fleet.tables import InstanceTable, NodeTable
from tests.fleet_builder import a_node, an_event, an_instance

LIFE = [
    InstanceState.STARTING,
    InstanceState.LOADING,
    InstanceState.READY,
    InstanceState.DRAINING,
    InstanceState.READY,
    InstanceState.DRAINING,
]
IDS = ("i-1", "i-2", "i-3")


def life_of(instance_id: str) -> list[Instance]:
    return [
        replace(
            an_instance(instance_id, state=state, revision=n), url="http://e" if state is InstanceState.READY else ""
        )
        for n, state in enumerate(LIFE, 1)
    ]


rows = [row for instance_id in IDS for row in life_of(instance_id)]
deliveries = st.lists(st.sampled_from(rows), max_size=60)


@given(deliveries, st.booleans())
def test_a_table_of_instances_ends_where_the_store_is(delivered: list[Instance], keeps_gone: bool) -> None:
    table = InstanceTable(keeps_gone=keeps_gone)
    for at, row in enumerate(delivered):
        table.apply(row, float(at))
        assert table.by_id[row.instance_id].revision >= row.revision
    final = {i: life_of(i)[-1] for i in IDS}
    table.restore(final, 100.0)
    assert table.by_id == table.of("m") == table.living("m") == final


@given(deliveries, st.sampled_from([InstanceState.STOPPED, InstanceState.FAILED]), st.booleans())
def test_an_instance_that_is_gone_does_not_come_back(
    delivered: list[Instance], end: InstanceState, keeps_gone: bool
) -> None:
    table = InstanceTable(keeps_gone=keeps_gone)
    table.apply(an_instance("i-1", state=end, revision=99), 0.0)
    for row in delivered:
        table.apply(row, 0.0)
    assert "i-1" not in table.living("m") and ("i-1" in table.by_id) == keeps_gone


@given(st.permutations(range(1, 8)), st.data())
def test_a_node_view_keeps_the_newest(order: list[int], data: st.DataObject) -> None:
    view, seen = NodeTable(lease_s=8.0), 0
    for at, revision in enumerate([r for r in order for _ in range(data.draw(st.integers(0, 2)))]):
        view.apply(a_node(revision=revision), float(at))
        seen = max(seen, revision)
        assert view.by_id["node-1"].revision == seen


def command(issuer: str, epoch: int) -> Event:
    return an_event(StopInstance(target="node-1", instance_id="i", reason=""), issuer=issuer, epoch=epoch)


@given(st.lists(st.tuples(st.sampled_from(["placer-1", "placer-2", "autoscaler-1"]), st.integers(1, 6)), max_size=40))
def test_once_a_newer_holder_of_a_role_has_spoken_an_older_one_is_refused(sent: list[tuple[str, int]]) -> None:
    fence = Fence()
    highest: dict[str, int] = {}
    for issuer, epoch in sent:
        role = issuer.partition("-")[0]
        if epoch < highest.get(role, 0):
            with pytest.raises(StaleEpoch):
                fence.admit(command(issuer, epoch))
        else:
            fence.admit(command(issuer, epoch))
            highest[role] = epoch


@given(st.lists(st.integers(1, 9), min_size=1))
def test_a_fence_remembered_over_a_restart_refuses_the_same(epochs: list[int]) -> None:
    fence = Fence()
    for epoch in sorted(epochs):
        fence.admit(command("placer-1", epoch))
    again = Fence(fence.seen)
    with pytest.raises(StaleEpoch):
        again.admit(command("placer-2", max(epochs) - 1))
