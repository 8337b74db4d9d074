"""Three servers of NATS, and three of Valkey under Sentinel: any one dies under load, and no accepted request is lost.
Real processes; the engine is emulated.

Lane: system, 100 s (a master and a NATS server die), long (the others).
"""

import asyncio
import tempfile
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import yaml

from tests.chaos.test_kill_services import under_load
from tests.ha_fleet import ADMIN, START_S, HaFleet, emulated
from tests.server_clusters import Clusters
from tests.waiting import WAIT_S, wait_until

pytestmark = [pytest.mark.fleet, pytest.mark.timeout(600)]
COLD = ["cold-0", "cold-1"]


@pytest.fixture(scope="module")
def clusters() -> Iterator[Clusters]:
    folder = tempfile.TemporaryDirectory(prefix="gp-three-", ignore_cleanup_errors=True)
    with folder as path, Clusters(Path(path)) as made:
        yield made


@pytest.fixture(scope="module")
def fleet(clusters: Clusters) -> Iterator[HaFleet]:
    models = {"warm": emulated("warm")} | {name: emulated(name, 1) for name in COLD}
    made = HaFleet(clusters.folder / "fleet", clusters, lease_s=4.0, models=models)
    try:
        yield made.start()
    finally:
        made.stop()


def names(fleet: HaFleet) -> list[str]:
    return [row["id"] for row in fleet.router_models()]


@pytest.mark.parametrize(
    "who", ["master", "bus", *(pytest.param(who, marks=pytest.mark.long) for who in ("replica", "sentinel"))]
)
def test_a_server_of_three_dies_and_nothing_is_lost(fleet: HaFleet, clusters: Clusters, who: str) -> None:
    assert fleet.chat("warm").status_code == 200
    master = clusters.master()
    victim = {
        "master": master,
        "bus": clusters.nats[0],
        "replica": next(one for one in clusters.valkeys if one is not master),
        "sentinel": clusters.sentinels[0],
    }[who]
    autoscaler, last = fleet.roles("autoscaler")[0], f"after-{who}"

    def deploy_and_kill() -> None:
        model = yaml.safe_load(emulated(last, 1))
        answer = httpx.post(f"{autoscaler.url}/v1/models", json=model, headers=ADMIN, timeout=WAIT_S)
        assert answer.status_code == 201, answer.text
        victim.kill()

    url = fleet.processes["router-1"].data_url
    ledger = asyncio.run(under_load(url, ["warm", *COLD], 8.0, 8, deploy_and_kill))
    assert set(ledger.ends) == {"done"}, (ledger.ends, ledger.broken[:3])
    assert not ledger.open

    assert clusters.master() is not victim
    for service in ("autoscaler", "placer", "predictor"):
        fleet.roles(service)
    wait_until("the model is there that was deployed before the death", lambda: last in names(fleet))
    for name in (*COLD, last):
        answer = fleet.chat(name)
        assert answer.status_code == 200, f"{name} starts on the servers that are left: {answer.text}"
    victim.start()
    wait_until("two replicas follow the master again", lambda: clusters.num_replicas() == 2, START_S)
    wait_until("everything is ready", fleet.ready, START_S)
