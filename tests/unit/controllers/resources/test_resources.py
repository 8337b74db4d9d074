"""The operator's controller, stimulus by stimulus. Costs nothing: pure functions."""

from dataclasses import replace
from typing import Any

import pytest

from glowplug.controllers.resources import messages as msg
from glowplug.controllers.resources.controller import LOST_S, MOST_S, REFUSED_S, ResourcesController
from glowplug.controllers.resources.messages import DeclaredRow, OperatorView, Resource, ResourceKind
from glowplug.domain.decision import DecisionRecord
from glowplug.domain.instance import Instance, InstanceState, Worker

NOW = 1_800_000_000.0


def resource(name: str = "writer", kind: ResourceKind = ResourceKind.MODEL, **more: Any) -> Resource:
    given: dict[str, Any] = {"namespace": "team", "uid": f"u-{name}", "version": 0, "generation": 1}
    given |= {"is_leaving": False, "is_held": True, "spec": {"engine": "emulated"}, "status": {}}
    return Resource(kind=kind, name=name, **(given | more))


def row(key: str = "writer", source: str = "kubernetes:team/writer", **more: Any) -> DeclaredRow:
    return DeclaredRow(key=key, source=source, **({"state": "cold"} | more))


def instance(state: InstanceState = InstanceState.READY, **more: Any) -> Instance:
    worker = Worker(worker_id="w", node_id="node-1", gpu_id="node-1/0", num_bytes=1)
    given: dict[str, Any] = {"instance_id": "i-1", "model_key": "writer", "engine": "emulated", "created_at": NOW - 3}
    return Instance(state=state, workers=(worker,), **(given | {"ready_at": NOW, "changed_at": NOW} | more))


def view(*rows: DeclaredRow, at: float = NOW, kind: ResourceKind = ResourceKind.MODEL, **more: Any) -> OperatorView:
    tables: dict[ResourceKind, dict[str, DeclaredRow]] = {one: {} for one in ResourceKind} | {
        kind: {one.key: one for one in rows}
    }
    return OperatorView(taken_at=at, rows=tables, **more)


class Driven:
    """A controller with a clock and the API server's part: writes are seen again."""

    def __init__(self, *resources: Resource, seen: OperatorView | None = None) -> None:
        self.controller, self.now_s = ResourcesController(), NOW
        self.say(msg.Looked(seen or view()))
        for one in resources:
            self.say(msg.Seen(one))

    def say(self, stimulus: Any) -> list[Any]:
        return self.controller.handle(stimulus, self.now_s)

    def later(self, seconds: float, *rows: DeclaredRow, **more: Any) -> list[Any]:
        self.now_s += seconds
        return self.say(msg.Looked(view(*rows, at=self.now_s, **more)))

    def write(self, effects: list[Any]) -> dict[str, Any]:
        (effect,) = [one for one in effects if isinstance(one, msg.WriteStatus)]
        kept = replace(self.controller.resources[effect.resource.uid], status=dict(effect.status))
        assert not [one for one in self.say(msg.Seen(kept)) if isinstance(one, msg.WriteStatus)], "written again"
        return dict(effect.status)

    def answer(self, status: int = 200, message: str = "", name: str = "writer", generation: int = 1) -> list[Any]:
        return self.say(msg.Answered(uid=f"u-{name}", generation=generation, status=status, message=message))


def reasons(status: dict[str, Any]) -> dict[str, str]:
    return {one["type"]: f"{one['status']} {one['reason']}" for one in status["conditions"]}


def kinds(effects: list[Any]) -> list[str]:
    return [type(one).__name__ for one in effects]


def test_a_resource_is_held_before_the_fleet_hears_of_it_and_declared_once() -> None:
    new = resource(is_held=False)
    driven = Driven()
    assert driven.say(msg.Seen(new)) == [msg.AddFinalizer(new)]
    held = replace(new, is_held=True)
    assert driven.say(msg.Seen(held)) == [msg.Declare(held)]
    assert held.body == {"engine": "emulated", "name": "writer"}
    driven.answer()
    status = driven.write(driven.later(1, row(), etas={"writer": 4.04}))
    assert (status["state"], status["replicas"], status["eta"], status["observedGeneration"]) == ("cold", 0, "4.0s", 1)
    assert reasons(status) == {"Accepted": "True Deployed", "Ready": "True Cold"}
    assert driven.later(1, row(), etas={"writer": 4.4}) == [], "an estimate that has hardly changed was written"
    assert driven.write(driven.later(1, row(), etas={"writer": 40.0}))["eta"] == "40s"


def test_status_says_where_a_hot_model_is_and_keeps_the_time_of_what_did_not_change() -> None:
    driven = Driven(resource())
    driven.answer()
    first = driven.write(driven.later(1, row()))
    hot = driven.write(driven.later(60, row(state="hot"), instances={"writer": (instance(),)}))
    assert (hot["state"], hot["replicas"], hot["where"]) == ("hot", 1, "node-1")
    assert reasons(hot)["Ready"] == "True Hot"
    times = [[one["lastTransitionTime"] for one in status["conditions"]] for status in (first, hot)]
    assert times[0] == times[1], "Ready was True before"


@pytest.mark.parametrize(
    ("seen", "ready"),
    [
        (row(state="suspended"), "False Suspended"),
        (row(last_failure="out of memory"), "False Failed"),
        (row(refuses_cold=True), "False Cold"),
        (row(keeps_one=True, state="starting"), "False Starting"),
        (row(state="warm"), "True Warm"),
    ],
)
def test_ready_means_that_a_request_is_answered(seen: DeclaredRow, ready: str) -> None:
    driven = Driven(resource())
    driven.answer()
    assert reasons(driven.write(driven.later(1, seen)))["Ready"] == ready


@pytest.mark.parametrize("other", ["/etc/models/writer.yaml", "api", "kubernetes:other/writer"])
def test_what_another_source_declares_is_not_adopted(other: str) -> None:
    driven = Driven(seen=view(row(source=other)))
    status = driven.write(driven.say(msg.Seen(resource())))
    assert reasons(status) == {"Accepted": "False Conflict", "Ready": "False Conflict"}
    assert other in status["conditions"][0]["message"]
    assert driven.say(msg.Seen(resource(is_leaving=True))) == [msg.RemoveFinalizer(resource(is_leaving=True))], (
        "nor removed"
    )
    free = Driven(resource(), seen=view(row(source=other)))
    assert kinds(free.later(1)) == ["Declare"], "the name is free now"


def test_a_refusal_is_said_and_tried_again_later_and_at_once_for_a_new_spec() -> None:
    driven = Driven(resource())
    status = driven.write(driven.answer(400, "kv_bytes: not a size"))
    assert reasons(status) == {"Accepted": "False Invalid", "Ready": "False Invalid"}
    assert driven.later(REFUSED_S - 1) == []
    assert kinds(driven.later(2)) == ["Declare"]
    driven.answer(409, "the name belongs to another")
    changed = replace(driven.controller.resources["u-writer"], generation=2)
    assert driven.say(msg.Seen(changed)) == [msg.Declare(changed)]


def test_a_fleet_that_does_not_answer_loses_nothing() -> None:
    driven = Driven(resource())
    driven.answer(0, "the autoscaler does not answer")
    assert kinds(driven.later(MOST_S)) == ["Declare"]
    driven.answer()
    before = driven.write(driven.later(1, row(state="hot"), instances={"writer": (instance(),)}))
    assert driven.say(msg.Lost("no route")) == []
    driven.now_s += LOST_S
    status = driven.write(driven.say(msg.Lost("no route")))
    assert reasons(status) == {"Accepted": "True Deployed", "Ready": "Unknown FleetUnreachable"}
    assert {**status, "conditions": 0} == {**before, "conditions": 0}, "what was known stays"
    assert reasons(driven.write(driven.later(1, row(state="hot"))))["Ready"] == "True Hot"


def test_a_killed_operator_goes_on_where_the_status_ends() -> None:
    taken = {"observedGeneration": 1, "conditions": [{"type": "Accepted", "status": "True", "reason": "Deployed"}]}
    assert "Declare" not in kinds(Driven(seen=view(row())).say(msg.Seen(resource(status=taken))))
    assert kinds(Driven(seen=view(row())).say(msg.Seen(resource(status=taken, generation=2)))) == ["Declare"]
    assert kinds(Driven().say(msg.Seen(resource(status=taken)))) == ["Declare"], "its row is gone"


def test_a_row_of_a_name_that_the_resource_had_before_is_withdrawn() -> None:
    renamed = resource(spec={"engine": "emulated", "name": "Org/Writer.v2"})
    effects = Driven(seen=view(row())).say(msg.Seen(renamed))
    assert effects == [msg.Withdraw(renamed, "writer"), msg.Declare(renamed)]
    assert renamed.key == "org-writer-v2"


def test_a_deleted_model_drains_before_it_is_let_go() -> None:
    leaving = resource(is_leaving=True)
    driven = Driven(seen=view(row(state="hot")))
    assert driven.say(msg.Seen(leaving)) == [msg.Withdraw(leaving, "writer")]
    assert "RemoveFinalizer" not in kinds(driven.answer()), "the last look is older than the answer"
    draining = {"writer": (instance(InstanceState.DRAINING),)}
    status = driven.write(driven.later(1, instances=draining))
    assert reasons(status)["Ready"] == "False Leaving" and status["where"] == "node-1"
    ended = {"writer": (instance(InstanceState.STOPPED),)}
    assert kinds(driven.later(1, instances=ended)) == ["RemoveFinalizer"]


def test_a_deleted_base_waits_for_its_adapters_and_a_tenant_for_its_keys() -> None:
    driven = Driven(resource(is_leaving=True), seen=view(row()))
    status = driven.write(driven.answer(409, "adapters of it are deployed"))
    assert reasons(status)["Ready"] == "False InUse"
    assert driven.later(1, row()) == []
    assert kinds(driven.later(REFUSED_S, row())) == ["Withdraw"]


def test_a_watch_that_is_behind_changes_nothing() -> None:
    driven = Driven(resource(version=12))
    assert driven.say(msg.Seen(resource(version=11, is_held=False))) == []
    assert driven.say(msg.Listed(ResourceKind.MODEL, ())) == [] and not driven.controller.resources
    assert driven.say(msg.Listed(ResourceKind.MODEL, (resource(version=3),))) != [], "a list is the truth"


def decision(kind: str, chosen: str, model: str = "writer", made_at: float = NOW) -> DecisionRecord:
    return DecisionRecord(
        decision_id=f"d-{kind}", kind=kind, policy="union", service="placer", reason=f"why {kind}", made_at=made_at,
        model_key=model, chosen=chosen,
    )  # fmt: skip


def test_events_tell_of_starts_evictions_and_failures_once_and_with_the_reason() -> None:
    driven = Driven(resource())
    driven.answer()
    made = (
        decision("place", "node-1/0"),
        decision("evict", "i-1, i-9", model="other"),
        decision("place", "x", "alien"),
    )
    old = decision("scale", "drain", made_at=NOW - 3600)
    failed = instance(InstanceState.FAILED, instance_id="i-2", reason="out of memory")
    seen = {"decisions": (*made, old), "instances": {"writer": (instance(), failed)}}
    found = [one.notice for one in driven.later(1, row(), **seen) if isinstance(one, msg.Announce)]
    assert {(one.reason, one.is_warning) for one in found} == {
        ("Starting", False), ("Evicted", False), ("Started", False), ("Failed", True),
    }  # fmt: skip
    assert {"i-1: why evict", "why place"} <= {one.note for one in found}
    assert any("out of memory" in one.note for one in found)
    assert "Announce" not in kinds(driven.later(1, row(), **seen))
    missed = msg.Announce(resource(), found[0])
    driven.say(msg.NotDone(missed))
    assert [one.notice for one in driven.later(1, row(), **seen) if isinstance(one, msg.Announce)] == [found[0]]


def test_a_tenant_is_put_without_its_name() -> None:
    acme = resource("acme", ResourceKind.TENANT, spec={"name": "Acme", "weight": 2.0})
    driven = Driven()
    assert driven.say(msg.Seen(acme)) == [msg.Declare(acme)]
    assert (acme.key, acme.body) == ("Acme", {"weight": 2.0})
    driven.answer(name="acme")
    mine = row("Acme", "kubernetes:team/acme", num_keys=3)
    status = driven.write(driven.later(1, mine, kind=ResourceKind.TENANT))
    assert status["keys"] == 3 and reasons(status) == {"Accepted": "True Deployed", "Ready": "True Deployed"}
