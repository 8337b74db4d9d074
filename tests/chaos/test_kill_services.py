"""kill -9 of each service in turn under load (peers.md T1, T2, T7): warm streams unharmed, every accepted request
answered, the fleet whole again. Emulated engine, real processes.

Lane: system (the services that decide and those of a node at once, bus and store); long (each service by itself).
"""

import asyncio
import itertools
import os
import signal
import time
from collections import Counter
from dataclasses import dataclass, field

import httpx
import psutil
import pytest

from tests.fleet_runner import EMULATED, Fleet
from tests.waiting import wait_until

pytestmark = [pytest.mark.fleet, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def fleet(tmp_path_factory):
    root = tmp_path_factory.mktemp("chaos")
    models = {name: EMULATED.format(name=name, keep_alive_s=-1) for name in ("warm-a", "warm-b")}
    models |= {f"cold-{i}": EMULATED.format(name=f"cold-{i}", keep_alive_s=1) for i in range(3)}
    started = Fleet.start(root, models, GLOWPLUG_EMULATED_TIME_SCALE="4")
    for name in ("warm-a", "warm-b"):
        assert started.chat(name).status_code == 200
    yield started
    started.stop()


@dataclass
class Ledger:
    ends: Counter[str] = field(default_factory=Counter)
    broken: list[str] = field(default_factory=list)
    open: set[str] = field(default_factory=set)

    def end(self, request_id: str, how: str) -> None:
        self.open.remove(request_id)
        self.ends[how] += 1


async def stream(client: httpx.AsyncClient, url: str, model: str, request_id: str, ledger: Ledger) -> None:
    """`truncated`, a 200 that ends without [DONE] or error, must never happen."""
    ledger.open.add(request_id)
    body = {"model": model, "stream": True, "max_tokens": 40, "messages": [{"role": "user", "content": "hello"}]}
    headers, text = {"x-request-id": request_id}, ""
    try:
        async with client.stream("POST", url + "/v1/chat/completions", json=body, headers=headers) as answer:
            if answer.status_code != 200:
                await answer.aread()
                ledger.end(request_id, f"{answer.status_code}")
                return
            async for chunk in answer.aiter_text():
                text += chunk
    except httpx.HTTPError as error:
        ledger.end(request_id, "connection lost")
        ledger.broken.append(f"{request_id}: {error!r}")
        return
    if text.rstrip().endswith("data: [DONE]"):
        ledger.end(request_id, "done")
        return
    ledger.end(request_id, "error event" if '"error"' in text else "truncated")
    ledger.broken.append(f"{request_id}: {text[-300:]}")


async def under_load(url: str, models: list[str], seconds: float, per_second: float, harm) -> Ledger:
    """`harm()` runs once a quarter of `seconds` is over."""
    ledger, tasks = Ledger(), []
    limits = httpx.Limits(max_connections=500, max_keepalive_connections=0)
    async with httpx.AsyncClient(timeout=240, limits=limits) as client:
        names = itertools.cycle(models)
        started, harming = time.monotonic(), None
        for n in itertools.count():
            if time.monotonic() - started > seconds:
                break
            if harming is None and time.monotonic() - started > seconds / 4:
                harming = asyncio.create_task(asyncio.to_thread(harm))
            tasks.append(asyncio.create_task(stream(client, url, next(names), f"r{n}", ledger)))
            await asyncio.sleep(1 / per_second)
        await asyncio.wait_for(asyncio.gather(*tasks, harming or asyncio.sleep(0)), 300)
    return ledger


def kill(fleet: Fleet, name: str) -> int:
    pid = int(fleet.process(name)["pid"])
    os.kill(pid, signal.SIGKILL)
    return pid


def whole_again(fleet: Fleet, name: str, old_pid: int) -> None:
    """bench/ measures how fast; here any time is enough."""

    def check() -> bool:
        row = fleet.process(name)
        return row["pid"] not in (old_pid, None, 0) and row["state"] == "ready" and fleet.ready()

    wait_until(f"{name} is back", check)


def killing(fleet: Fleet, names: list[str], models: list[str], seconds: float, per_second: float) -> Ledger:
    pids = {name: int(fleet.process(name)["pid"]) for name in names}

    def harm() -> None:
        for name in names:
            kill(fleet, name)

    ledger = asyncio.run(under_load(fleet.url("data"), models, seconds, per_second, harm))
    for name, pid in pids.items():
        whole_again(fleet, name, pid)
    return ledger


CONTROL = ["predictor-1", "placer-1", "autoscaler-1", "prefetcher-1", "agent-1", "console-1"]
ALONE = [pytest.param([name], marks=pytest.mark.long, id=name) for name in CONTROL]
SERVERS = [pytest.param([name], id=name) for name in ("nats", "valkey")]


@pytest.mark.parametrize("names", [pytest.param(CONTROL, id="the control plane"), *SERVERS, *ALONE])
def test_warm_streams_do_not_notice_a_killed_control_service_bus_or_store(fleet, names):
    ledger = killing(fleet, names, ["warm-a", "warm-b"], 6.0, 15)
    assert set(ledger.ends) == {"done"}, (ledger.ends, ledger.broken[:3])
    assert not ledger.open


@pytest.mark.parametrize(
    "name",
    [
        "placer-1",
        "agent-1",
        "nats",
        *(pytest.param(n, marks=pytest.mark.long) for n in ("autoscaler-1", "prefetcher-1", "valkey")),
    ],
)
def test_cold_requests_are_all_answered_when_a_service_dies(fleet, name):
    ledger = killing(fleet, [name], [f"cold-{i}" for i in range(3)], 6.0, 5)
    assert not ledger.open
    assert ledger.ends["truncated"] == 0, ledger.broken
    assert ledger.ends["done"] >= 0.9 * sum(ledger.ends.values()), (ledger.ends, ledger.broken[:3])


def test_a_killed_router_loses_only_its_own_connections(fleet):
    ledger = killing(fleet, ["router-1"], ["warm-a"], 6.0, 10)
    assert ledger.ends["truncated"] == 0, ledger.broken
    assert set(ledger.ends) <= {"done", "connection lost"}, ledger.ends
    assert fleet.chat("warm-a").status_code == 200


def test_an_agent_takes_its_living_engines_back(fleet):
    before = {i["instance_id"]: i["url"] for i in fleet.instances("warm-a")}
    pid = kill(fleet, "agent-1")
    whole_again(fleet, "agent-1", pid)
    after = {i["instance_id"]: i["url"] for i in fleet.instances("warm-a")}
    assert before == after
    assert fleet.chat("warm-a").status_code == 200


def test_a_killed_engine_is_replaced_and_the_next_request_served(fleet):
    victim = fleet.instances("warm-b")[0]
    port = int(victim["url"].rsplit(":", 1)[1])
    owner = next(c.pid for c in psutil.net_connections("tcp") if c.status == "LISTEN" and c.laddr.port == port)
    os.kill(owner, signal.SIGKILL)
    assert fleet.chat("warm-b").status_code == 200
    assert fleet.instances("warm-b")[0]["instance_id"] != victim["instance_id"]
