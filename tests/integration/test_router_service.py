"""The router as a process: on the bus, from the store, and without either."""

import asyncio
from pathlib import Path

import httpx

from glowplug.bus.nats_bus import NatsBus
from glowplug.events import Event
from glowplug.events.facts import InstanceReady, ModelDeployed, ModelUndeployed
from glowplug.events.subjects import facts_of
from tests.contract.data_port_rig import DONE, TOKEN, FakeEngine, a_model, an_instance, streaming
from tests.integration.router_process import a_router, chat_body, write_rows
from tests.servers import Infra, NatsProcess, ValkeyProcess
from tests.waiting import WAIT_S, until


def fact(data: object, number: int = 0) -> Event:
    return Event(event_id=f"e-{id(data)}-{number}", type=data.TYPE, occurred_at=0.0, issuer="t", data=data)  # type: ignore[attr-defined]


def a_client() -> httpx.AsyncClient:
    return httpx.AsyncClient(timeout=WAIT_S)


def _loads(event: Event) -> dict[str, object]:
    return getattr(event.data, "loads", {})


async def test_tables_serve_and_outlive_the_store_the_bus_and_a_restart(
    own_nats: NatsProcess, own_valkey: ValkeyProcess, tmp_path: Path
) -> None:
    """Even a router started meanwhile serves warm models."""
    engine = await FakeEngine().start()
    await write_rows(own_valkey.url, a_model(), an_instance("i-1", engine.url))
    async with a_router(own_nats.url, own_valkey.url, tmp_path) as router, a_client() as client:
        url = f"{router.url}/v1/chat/completions"

        async def served() -> bool:
            return (await client.post(url, json=chat_body(stream=True))).content == TOKEN * 3 + DONE

        assert await served()
        own_nats.kill()
        own_valkey.kill()
        assert await served()
        await asyncio.sleep(3)  # more than one resync
        assert await served()
        await router.kill()
        await router.start()
        assert await served()
        assert (await client.get(f"{router.admin_url}/ready")).status_code == 200
    await engine.stop()


async def test_facts_wake_a_held_request_and_telemetry_tells_of_it(infra: Infra, tmp_path: Path) -> None:
    heard: list[Event] = []

    async def hear(event: Event) -> None:
        heard.append(event)

    bus = NatsBus(infra.nats.url, "test")
    await bus.connect()
    await bus.subscribe([facts_of("router.requests_finished"), facts_of("router.load_reported")], hear)
    await bus.subscribe([facts_of("request.waiting")], hear, durable="test-waiting")
    engine = await FakeEngine().start()
    trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    async with (
        a_router(infra.nats.url, infra.valkey.url, tmp_path) as router,
        a_client() as client,
    ):

        async def ask() -> httpx.Response:
            """Publish the model's fact first: a new router reads facts only from some moment on."""
            await bus.publish(fact(ModelDeployed(model=a_model("held-one"))))
            headers = {"x-request-id": "r-1", "traceparent": trace}
            url = f"{router.url}/v1/chat/completions"
            return await client.post(url, json=chat_body("held-one"), headers=headers, timeout=WAIT_S)

        asked = asyncio.create_task(ask())
        async with asyncio.timeout(WAIT_S):
            while not any(e.type == "request.waiting" for e in heard):
                if asked.done():  # the fact has not reached the router
                    asked = asyncio.create_task(ask())
                await asyncio.sleep(0.02)
        queue = (await client.get(f"{router.admin_url}/v1/queue")).json()["data"]
        assert [row["num_waiting"] for row in queue if row["model_key"] == "held-one"] == [1]
        live = (await client.get(f"{router.admin_url}/v1/requests")).json()["data"]
        assert (live[0]["request_id"], live[0]["state"]) == ("r-1", "held")
        await until(lambda: any(e.data.loads["held-one"].num_waiting for e in heard if "held-one" in _loads(e)))
        await bus.publish(fact(InstanceReady(instance=an_instance("i-h", engine.url, model_key="held-one"))))
        answer = await asked
        assert answer.status_code == 200 and "fetch;dur=" in answer.headers["server-timing"]
        await until(lambda: any(e.type == "router.requests_finished" for e in heard))
        done = (await client.get(f"{router.admin_url}/v1/requests")).json()["data"]
        assert (done[0]["request_id"], done[0]["state"], done[0]["cold"]) == ("r-1", "finished", True)
        metrics = (await client.get(f"{router.admin_url}/metrics")).text
        assert 'glowplug_requests_total{model="held-one",code="200"} 1.0' in metrics
        await bus.publish(fact(ModelUndeployed(model_key="held-one")))
    waiting = next(e for e in heard if e.type == "request.waiting")
    assert waiting.data.request_id == "r-1" and waiting.cause_id == "r-1"
    assert waiting.traceparent[3:35] == trace[3:35] and waiting.traceparent[36:52] != trace[36:52]
    (finished,) = next(e for e in heard if e.type == "router.requests_finished").data.requests
    assert finished.cold and finished.status == 200 and finished.instance_id == "i-h"
    await bus.close()
    await engine.stop()


async def test_sigterm_finishes_the_stream_and_exits(infra: Infra, tmp_path: Path) -> None:
    gate = asyncio.Event()
    engine = await FakeEngine(streaming(TOKEN, gate, DONE)).start()
    model, instance = a_model("drained"), an_instance("i-d", engine.url, model_key="drained")
    await write_rows(infra.valkey.url, model, instance)
    async with (
        a_router(infra.nats.url, infra.valkey.url, tmp_path) as router,
        a_client() as client,
    ):
        url, body = f"{router.url}/v1/chat/completions", chat_body("drained", stream=True)
        async with client.stream("POST", url, json=body) as stream:
            parts = stream.aiter_raw()
            assert await anext(parts) == TOKEN
            router.terminate()
            late = None
            async with asyncio.timeout(WAIT_S):
                while late is None or late.status_code != 503:
                    try:
                        # A stream sent before the signal arrives waits for the gate.
                        late = await client.post(url, json=body, timeout=2.0)
                    except httpx.TransportError:  # an idle connection is closed, perhaps just as it is used
                        await asyncio.sleep(0.01)
            assert late.json()["error"]["code"] == "router_stopping" and late.headers["retry-after"] == "1"
            gate.set()
            assert b"".join([part async for part in parts]) == DONE
        assert await router.ended() == 0, router.log()
    await engine.stop()


async def test_a_taken_port_is_one_clear_line(infra: Infra, tmp_path: Path) -> None:
    async with a_router(infra.nats.url, infra.valkey.url, tmp_path) as router:
        second = tmp_path / "second"
        second.mkdir()
        other = type(router)(router.nats_url, router.redis_url, second, router.data_port, 0)
        await other.start(wait=False)
        assert await other.ended() != 0
        assert f"cannot listen on 127.0.0.1:{router.data_port}" in other.log()


async def test_both_ports_of_the_process_obey_the_settings(infra: Infra, tmp_path: Path) -> None:
    env = {"GLOWPLUG_ALLOWED_HOSTS": "known.example", "GLOWPLUG_ALLOWED_ORIGINS": "https://app.example"}
    async with (
        a_router(infra.nats.url, infra.valkey.url, tmp_path, **env) as router,
        a_client() as client,
    ):
        for url in (f"{router.url}/v1/models", f"{router.admin_url}/policies"):

            async def status(url: str = url, **headers: str) -> int:
                return (await client.get(url, headers=headers)).status_code

            assert await status(Host="known.example") == 200
            assert await status(Host="other.example") == 421
            assert await status(Origin="https://app.example") == 200
            assert await status(Origin="https://other.example") == 403
