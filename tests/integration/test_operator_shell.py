"""The operator's shell between a stand-in for the API server and an in-memory fleet. Costs some 3 s."""

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client import CollectorRegistry

from glowplug.controllers.resources.messages import Answered, DeclaredRow, OperatorView, Resource, ResourceKind
from glowplug.runtime.tasks import end
from glowplug.services.operator.api_server import ApiServer
from glowplug.services.operator.main import KubernetesLease, Operator
from glowplug.telemetry.metrics import ShellMetrics
from tests import kube_api
from tests.kube_api import KubeApi, Refused
from tests.waiting import until


class FakeFleet:
    def __init__(self) -> None:
        self.rows: dict[ResourceKind, dict[str, DeclaredRow]] = {kind: {} for kind in ResourceKind}
        self.bodies: list[dict[str, Any]] = []
        self.down, self.num_looks = False, 0

    async def look(self) -> OperatorView:
        if self.down:
            raise httpx.ConnectError("no route")
        self.num_looks += 1
        return OperatorView(taken_at=time.time(), rows={kind: dict(rows) for kind, rows in self.rows.items()})

    async def declare(self, resource: Resource) -> Answered:
        if self.down:
            return Answered(uid=resource.uid, generation=resource.generation, status=0, message="no route")
        self.bodies.append(resource.body)
        self.rows[resource.kind][resource.key] = DeclaredRow(key=resource.key, source=resource.source, state="cold")
        return Answered(uid=resource.uid, generation=resource.generation)

    async def withdraw(self, resource: Resource, key: str) -> Answered:
        self.rows[resource.kind].pop(key, None)
        return Answered(uid=resource.uid, generation=resource.generation)


@pytest.fixture
def api() -> Iterator[KubeApi]:
    with kube_api.serving() as standing:
        yield standing


@pytest.fixture
def fleet() -> FakeFleet:
    return FakeFleet()


@pytest.fixture
async def client(api: KubeApi, tmp_path: Path) -> AsyncIterator[ApiServer]:
    found = ApiServer(api.url, tmp_path)
    yield found
    await found.close()


@pytest.fixture
async def working(client: ApiServer, fleet: FakeFleet) -> AsyncIterator[Operator]:
    metrics = ShellMetrics("operator", CollectorRegistry())
    operator = Operator(client, fleet, metrics, "operator-1", look_s=0.05)  # type: ignore[arg-type]
    task = asyncio.create_task(operator.run())
    yield operator
    await end([task])


async def deployed(api: KubeApi, name: str, generation: int = 1) -> None:
    def is_so() -> bool:
        status = api.get("models", name).get("status", {})
        taken = api.conditions("models", name) == {"Accepted": "Deployed", "Ready": "Cold"}
        return taken and status["observedGeneration"] == generation

    await until(is_so, f"{name} is deployed")


async def test_what_happened_while_changes_were_forgotten_is_listed(
    api: KubeApi, fleet: FakeFleet, working: Operator
) -> None:
    api.declare("Model", "first", engine="emulated")
    await deployed(api, "first")
    api.forget(
        lambda: api.declare("Model", "second", engine="emulated"),
        lambda: api.declare("Model", "first", engine="emulated", priority=3),
    )
    await deployed(api, "second")
    await deployed(api, "first", 2)
    assert api.num_expired and fleet.bodies[-1].keys() >= {"engine", "name"}


async def test_nothing_is_written_while_nothing_changes(api: KubeApi, fleet: FakeFleet, working: Operator) -> None:
    api.declare("Model", "still", engine="emulated")
    api.declare("Tenant", "acme")
    await deployed(api, "still")
    await until(lambda: api.conditions("tenants", "acme").get("Ready") == "Deployed")
    before, looks = list(api.writes), fleet.num_looks
    await until(lambda: fleet.num_looks >= looks + 5)
    assert api.writes == before and len(fleet.bodies) == 2


async def test_a_conflict_is_read_again_and_a_refused_write_done_later(
    api: KubeApi, fleet: FakeFleet, working: Operator
) -> None:
    conflict = Refused(409, "Conflict", "the object has been modified")
    api.refuse_next = [conflict, Refused(500, "InternalError", "etcd is slow"), conflict, conflict]
    api.declare("Model", "writer", engine="emulated")
    await deployed(api, "writer")
    assert not api.refuse_next


@pytest.mark.parametrize("which", ["the API server", "the fleet"])
async def test_who_is_away_for_a_while_loses_nothing(
    api: KubeApi, fleet: FakeFleet, working: Operator, which: str
) -> None:
    api.declare("Model", "early", engine="emulated")
    await deployed(api, "early")
    away: Any = api if which == "the API server" else fleet
    away.down = True
    if away is api:
        await until(lambda: working.trouble, "the operator notices")
    api.declare("Model", "late", engine="emulated")
    api.remove("Model", "early")
    away.down = False
    await deployed(api, "late")
    await until(lambda: ("models", "default", "early") not in api.objects, "the deleted one is gone")
    assert set(fleet.rows[ResourceKind.MODEL]) == {"late"}


async def test_a_lease_has_one_holder_and_passes_on_when_it_is_not_renewed(client: ApiServer, api: KubeApi) -> None:
    first, second = (KubernetesLease(client, "default", name, 10.0) for name in ("a", "b"))
    assert await first.hold(0.0) and not await second.hold(0.0)
    assert await first.hold(9.0) and not await second.hold(9.0)
    assert not await second.hold(18.0), "it was renewed at 9"
    assert await second.hold(19.0) and not await first.hold(19.0)
    await second.release()
    assert await first.hold(19.0)
    assert api.get("leases", "glowplug-operator")["spec"]["leaseTransitions"] == 2
    stale = await client.call("GET", "/apis/coordination.k8s.io/v1/namespaces/default/leases/glowplug-operator")
    assert await first.hold(20.0)
    assert not await first._write("PUT", f"{first._path}/glowplug-operator", stale, 9), "somebody was faster"
