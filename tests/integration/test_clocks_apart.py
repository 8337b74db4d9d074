"""Router processes whose clocks are an hour apart, beside an autoscaler whose clock is right.

Lane: system. In the fast one tests/simulation/test_clocks.py has whole fleets under virtual clocks.
"""

import asyncio
from pathlib import Path

from glowplug.bus.nats_bus import NatsBus
from glowplug.events import Event
from glowplug.events.facts import DecisionMade
from glowplug.events.subjects import filters
from tests.router_fleet import RouterFleet, router_fleet
from tests.servers import Infra, NatsProcess, ValkeyProcess
from tests.waiting import until

APART = (0.0, 3600.0, -3600.0)


async def test_a_cold_start_is_decided_on_for_a_router_with_any_clock(
    own_nats: NatsProcess, own_valkey: ValkeyProcess, tmp_path: Path
) -> None:
    decided: set[str] = set()

    async def decision(event: Event) -> None:
        decided.add(event.data.decision.model_key)

    async with router_fleet(Infra(own_nats, own_valkey), tmp_path, clocks_s=APART) as fleet:
        bus = NatsBus(own_nats.url, "test")
        await bus.connect()
        await bus.subscribe(filters([DecisionMade]), decision)
        asking = []
        for number in range(len(APART)):
            model = {"name": f"cold-{number}", "engine": "emulated", "weights_bytes": "10MiB"}
            await fleet.admin("POST", "/v1/models", model)
            await until(lambda n=number: _knows(fleet, n), f"router {number} knows its model")
            asking.append(asyncio.create_task(fleet.ask(number, "any", model=f"cold-{number}")))
            await until(lambda n=number: f"cold-{n}" in decided, f"a decision for router {number}")
        for task in asking:
            task.cancel()
        await asyncio.gather(*asking, return_exceptions=True)
        await bus.close()


async def _knows(fleet: RouterFleet, number: int) -> bool:
    answer = await fleet.client.get(f"{fleet.routers[number].url}/v1/models/cold-{number}")
    return answer.status_code == 200
