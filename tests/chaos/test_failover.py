"""Two of each deciding service, one leading: requests and placements when the leader dies, sleeps, or loses its store
or its bus. Real processes; the engine is emulated.

Lane: system (one service of each case), long (the others).
"""

import asyncio
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from redis import Redis

from tests.chaos.test_kill_services import under_load
from tests.ha_fleet import ADMIN, START_S, HaFleet, Process, emulated
from tests.servers import Infra, NatsProcess, ValkeyProcess
from tests.waiting import WAIT_S, wait_until

pytestmark = [pytest.mark.fleet, pytest.mark.timeout(600)]
LEASE_S = 4.0


@pytest.fixture(scope="module")
def fleet() -> Iterator[HaFleet]:
    with tempfile.TemporaryDirectory(prefix="gp-failover-", ignore_cleanup_errors=True) as folder:
        root = Path(folder)
        models = {"warm": emulated("warm")} | {f"cold-{k}": emulated(f"cold-{k}", 1) for k in range(3)}
        with NatsProcess(root / "nats") as bus, ValkeyProcess(root / "valkey") as store:
            made = HaFleet(root / "fleet", Infra(bus, store), lease_s=LEASE_S, nodes=2, models=models)
            try:
                yield made.start()
            finally:
                made.stop()


@pytest.fixture(autouse=True)
def whole(fleet: HaFleet) -> None:
    fleet.infra.nats.process or fleet.infra.nats.start()
    fleet.infra.valkey.process or fleet.infra.valkey.start()
    for process in fleet.processes.values():
        if process.process is None or process.process.poll() is not None:
            process.start()
    wait_until("everything is ready", fleet.ready, START_S)
    for service in ("autoscaler", "placer", "predictor"):
        fleet.roles(service)
    assert fleet.chat("warm").status_code == 200


def kill_leader(fleet: HaFleet, service: str) -> None:
    fleet.failover_s(service, Process.kill, WAIT_S)


def placed_twice(fleet: HaFleet) -> list[str]:
    leader = fleet.leader("placer")
    assert leader is not None
    rows = leader.get("/v1/decisions?kind=place&limit=2000")["data"]
    counts = Counter(row["instance_id"] for row in rows if row["chosen"] not in ("", "anew"))
    anew = {row["instance_id"] for row in rows if row["chosen"] == "anew"}
    running = Counter(row["model_key"] for row in fleet.instances() if row["state"] in ("starting", "loading", "ready"))
    twice = [instance_id for instance_id, count in counts.items() if count > 1 and instance_id not in anew]
    return twice + [model_key for model_key, count in running.items() if count > 1]


@pytest.mark.parametrize("service", ["placer", "autoscaler", pytest.param("predictor", marks=pytest.mark.long)])
def test_a_killed_leader_is_followed_and_no_request_is_lost(fleet: HaFleet, service: str) -> None:
    url, models = fleet.processes["router-1"].data_url, ["warm", "cold-0", "cold-1", "cold-2"]
    ledger = asyncio.run(under_load(url, models, 8.0, 8, lambda: kill_leader(fleet, service)))
    assert set(ledger.ends) == {"done"}, (ledger.ends, ledger.broken[:3])
    assert not ledger.open
    assert placed_twice(fleet) == []


@pytest.mark.parametrize("service", ["placer", pytest.param("autoscaler", marks=pytest.mark.long)])
def test_a_leader_that_sleeps_is_followed_and_does_nothing_when_it_wakes_up(fleet: HaFleet, service: str) -> None:
    old, new = fleet.roles(service)
    old.signal(signal.SIGSTOP)
    wait_until("the standby leads", new.leads, every_s=0.02)
    before = old.log()
    assert fleet.chat("cold-0").status_code == 200
    old.signal(signal.SIGCONT)
    wait_until("the old one knows who leads", lambda: old.health().get("leader") == new.name, every_s=0.02)
    assert "no longer leads" in old.log()[len(before) :]
    assert new.health()["role"] == "leader" and old.health()["role"] == "standby"
    assert fleet.chat("cold-1").status_code == 200
    assert placed_twice(fleet) == []


def test_the_store_is_away_for_longer_than_a_lease(fleet: HaFleet) -> None:
    """Warm models are served, cold requests wait until the store is back."""
    fleet.infra.valkey.kill()
    wait_until("nobody leads", lambda: not any(fleet.leader(s) for s in ("placer", "autoscaler")))
    assert fleet.chat("warm").status_code == 200
    refused = httpx.post(fleet.pair("autoscaler")[0].url + "/v1/models/warm/pin", headers=ADMIN, timeout=WAIT_S)
    assert refused.status_code == 503 and refused.json()["error"]["code"] == "not_leader"
    fleet.infra.valkey.start()
    assert fleet.chat("cold-0").status_code == 200
    assert fleet.roles("placer") and fleet.roles("autoscaler")


def test_an_emptied_store_takes_the_lead_from_nobody_and_every_row_comes_back(fleet: HaFleet) -> None:
    before = {s: fleet.roles(s)[0].name for s in ("placer", "autoscaler", "predictor")}
    deploy(fleet.roles("autoscaler")[0], "by-hand")
    epochs = {s: fleet.roles(s)[0].health()["epoch"] for s in before}
    flush(fleet)

    def restored() -> bool:
        keys = {row["name"] for row in fleet.roles("autoscaler")[1].get("/v1/models")["data"]}
        return {"by-hand", "warm"} <= keys and {i["model_key"] for i in fleet.instances("warm")} == {"warm"}

    wait_until("rows are written again", restored)
    assert {s: fleet.roles(s)[0].name for s in before} == before
    assert {s: fleet.roles(s)[0].health()["epoch"] for s in before} == epochs
    assert fleet.chat("cold-2").status_code == 200


def test_the_leader_dies_while_the_store_is_emptied_and_no_model_is_forgotten(fleet: HaFleet) -> None:
    leader, standby = fleet.roles("autoscaler")
    deploy(leader, "kept-by-hand")
    wait_until("the standby knows it", lambda: knows(standby, "kept-by-hand"))
    leader.kill()
    flush(fleet)
    wait_until("the standby leads", standby.leads, every_s=0.02)
    wait_until("its row is written again", lambda: "kept-by-hand" in names(standby))
    assert fleet.chat("warm").status_code == 200


def test_both_live_through_an_outage_of_the_bus(fleet: HaFleet) -> None:
    before = {s: (fleet.roles(s)[0].name, fleet.roles(s)[0].health()["epoch"]) for s in ("placer", "autoscaler")}
    fleet.infra.nats.kill()
    time.sleep(2 * LEASE_S)
    assert fleet.chat("warm").status_code == 200
    assert {s: (fleet.roles(s)[0].name, fleet.roles(s)[0].health()["epoch"]) for s in before} == before
    fleet.infra.nats.start()
    wait_until("everything is ready", fleet.ready, START_S)
    assert fleet.chat("cold-1").status_code == 200
    assert placed_twice(fleet) == []


def test_a_leader_that_is_asked_to_stop_hands_over_at_once(fleet: HaFleet) -> None:
    for service in ("placer", "autoscaler"):
        leader, standby = fleet.roles(service)
        leader.signal(signal.SIGTERM)
        wait_until("the standby leads", standby.leads, every_s=0.02)
        assert leader.process is not None and leader.process.wait(60) == 0
        assert fleet.chat("cold-0").status_code == 200


def test_a_call_to_the_standby_is_answered_by_the_leader(fleet: HaFleet) -> None:
    leader, standby = fleet.roles("autoscaler")
    assert httpx.post(standby.url + "/v1/models/warm/pin").status_code == 401
    pinned = httpx.post(standby.url + "/v1/models/warm/pin", headers=ADMIN)
    assert pinned.status_code == 202 and pinned.json()["pinned"]
    assert leader.get("/v1/models/warm")["pinned"] and standby.get("/v1/models/warm")["pinned"]
    assert httpx.get(standby.url + "/v1/models/none-such").json()["error"]["code"] == "model_not_found"
    placer, other = fleet.roles("placer")
    drained = httpx.post(other.url + "/v1/nodes/node-2/drain", headers=ADMIN)
    assert drained.status_code == 202
    kill_leader(fleet, "placer")
    assert {n["node_id"]: n["draining"] for n in other.get("/v1/nodes")["data"]}["node-2"] is True
    assert httpx.post(other.url + "/v1/nodes/node-2/undrain", headers=ADMIN).status_code == 202
    placer.start()
    wait_until("both are there", placer.ready, START_S)
    kill_leader(fleet, "placer")
    assert {n["node_id"]: n["draining"] for n in placer.get("/v1/nodes")["data"]}["node-2"] is False


def deploy(autoscaler: Process, name: str) -> None:
    made = {"name": name, "engine": "emulated", "weights_bytes": "1MiB"}
    assert httpx.put(f"{autoscaler.url}/v1/models/{name}", json=made, headers=ADMIN).status_code == 200


def names(process: Process) -> set[str]:
    return {row["name"] for row in process.get("/v1/models")["data"]}


def knows(standby: Process, name: str) -> bool:
    headers = {"x-glowplug-passed-on": "test"}
    rows: list[dict[str, Any]] = httpx.get(standby.url + "/v1/models", headers=headers).json()["data"]
    return name in {row["name"] for row in rows}


def flush(fleet: HaFleet) -> None:
    with Redis.from_url(fleet.infra.valkey.url) as client:
        client.flushall()


def test_metrics_tell_who_leads(fleet: HaFleet) -> None:
    leader, standby = fleet.roles("placer")
    assert 'glowplug_leader{service="placer"} 1.0' in httpx.get(leader.url + "/metrics").text
    assert 'glowplug_leader{service="placer"} 0.0' in httpx.get(standby.url + "/metrics").text
    assert "glowplug_leader_changes_total" in httpx.get(standby.url + "/metrics").text
    leaders = {s: fleet.roles(s)[0].name for s in ("autoscaler", "placer", "predictor")}

    def given() -> dict[str, str]:
        return {row["service"]: row["service_id"] for row in standby.get("/v1/leaders")["data"]}

    wait_until("the table of leaders has been read", lambda: given() == leaders)
    assert leader.get("/ready")["role"] == "leader" and standby.get("/ready")["role"] == "standby"
