"""Three router processes on one bus.

Lane: long. In the fast one tests/unit/policies/limits has several routers under a virtual clock.
"""

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.contract.data_port_rig import Served
from tests.router_fleet import RouterFleet, router_fleet, say_little, seconds_until
from tests.servers import Infra, NatsProcess, ValkeyProcess

PER_MINUTE = 600
PER_S = PER_MINUTE / 60
pytestmark = [pytest.mark.long, pytest.mark.timeout(180)]
APART = (0.0, 2.0, -2.0)  # seconds between the routers' clocks


@pytest.fixture
async def fleet(own_nats: NatsProcess, own_valkey: ValkeyProcess, tmp_path: Path) -> AsyncIterator[RouterFleet]:
    async with router_fleet(Infra(own_nats, own_valkey), tmp_path, clocks_s=APART) as made:
        yield made


async def used_up(fleet: RouterFleet, key: str) -> None:
    for _ in range(12):
        if (await fleet.flood(key, (100, 100, 100))).statuses[429] > 150:
            return
    raise AssertionError("the limit is never reached")


async def test_three_routers_hit_at_once_from_idle_admit_little_more_than_one_minute(fleet: RouterFleet) -> None:
    await fleet.tenant("acme", requests_per_minute=120)
    _, key = await fleet.key("acme")
    await fleet.everywhere(key, 200)
    await asyncio.sleep(2)  # every router has reported
    began = time.monotonic()
    admitted = (await fleet.flood(key, (120, 120, 120))).statuses[200]
    print("from idle, of 120 a minute:", admitted)
    assert admitted <= 1.25 * 120 + 2 * (time.monotonic() - began)


async def test_above_the_limit_and_with_the_bus_away_the_limit_is_kept(fleet: RouterFleet) -> None:
    await fleet.tenant("acme", requests_per_minute=PER_MINUTE)
    _, key = await fleet.key("acme")
    await fleet.everywhere(key, 200)
    above = PER_S, PER_S / 2, PER_S / 2
    await used_up(fleet, key)
    await fleet.offer(key, above, 5)
    kept = await fleet.offer(key, above, 15)
    fleet.infra.nats.kill()
    await fleet.offer(key, above, 6)
    alone = await fleet.offer(key, above, 12)
    parts = [answers.statuses[200] / (answers.took_s * PER_S) for answers in (kept, alone)]
    print("parts of the limit that were admitted, with the bus and without:", parts)
    assert parts[0] == pytest.approx(1.0, abs=0.05)
    assert 0.9 <= parts[1] <= 1.06


async def test_nothing_is_refused_at_nine_tenths_of_the_limit(fleet: RouterFleet) -> None:
    await fleet.tenant("acme", tokens_per_minute=PER_MINUTE * 8)
    _, key = await fleet.key("acme")
    await fleet.everywhere(key, 200)
    await used_up(fleet, key)
    calm = 0.6 * PER_S, 0.2 * PER_S, 0.1 * PER_S
    await fleet.offer(key, calm, 8)
    refused = (await fleet.offer(key, calm, 10)).statuses[429]
    print("refused at nine tenths:", refused)
    assert not refused


async def test_requests_at_once(fleet: RouterFleet) -> None:
    """Only requests that arrive while a report is in transit may exceed the limit."""
    running, most, gate = 0, 0, asyncio.Event()

    async def reply(served: Served) -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await gate.wait()
        running -= 1
        await say_little(served)

    await fleet.tenant("acme", concurrent=12)
    _, key = await fleet.key("acme")
    await fleet.everywhere(key, 200)
    await asyncio.sleep(2)
    fleet.engine.reply = reply
    asking = asyncio.create_task(fleet.offer(key, (5.0, 5.0, 5.0), 3))
    await asyncio.sleep(4)
    gate.set()
    statuses = (await asking).statuses
    print("most at once, of 12:", most, dict(statuses))
    assert 12 <= most <= 14  # 15 requests a second arrive, so fewer than 2 in a tenth of a second


async def test_keys_reach_three_routers_within_a_second(fleet: RouterFleet) -> None:
    await fleet.tenant("acme")
    await fleet.everywhere((await fleet.key("acme"))[1], 200)
    took = []
    for _ in range(8):
        key_id, key = await fleet.key("acme")

        async def all_are(status: int, key: str = key) -> bool:
            return all(a.status_code == status for a in await asyncio.gather(*(fleet.ask(n, key) for n in range(3))))

        usable_s = await seconds_until(lambda: all_are(200), 5)
        await fleet.admin("DELETE", f"/v1/keys/{key_id}")
        took.append((round(usable_s, 3), round(await seconds_until(lambda: all_are(401), 5), 3)))
    print("seconds until (usable, revoked):", took)
    assert max(max(pair) for pair in took) < 1.0


async def test_a_key_expires_at_its_time_by_each_routers_clock(fleet: RouterFleet) -> None:
    await fleet.tenant("acme")
    made_at = time.time()
    _, key = await fleet.key("acme", expires="8s")
    await fleet.everywhere(key, 200)
    ends: dict[int, float] = {}

    async def all_ended() -> bool:
        for n in range(3):
            if n not in ends and (await fleet.ask(n, key)).status_code == 401:
                ends[n] = time.time() - made_at
        return len(ends) == 3

    await seconds_until(all_ended, 15)
    print("expired after", ends)
    assert all(abs(ends[n] + APART[n] - 8) < 0.5 for n in range(3))
