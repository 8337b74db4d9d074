"""No prompt, answer or key appears in any output of a router at its most verbose."""

from pathlib import Path
from typing import Any

import httpx
import nats
from nats.aio.msg import Msg
from redis.asyncio import Redis

from glowplug.domain.model import OnCold
from tests.contract.data_port_rig import FakeEngine, a_model, an_instance
from tests.integration.router_process import RouterProcess, a_router, write_rows
from tests.servers import NatsProcess, ValkeyProcess
from tests.waiting import WAIT_S, until

PROMPT, KEY, WRONG_KEY, ADMIN = "canary-of-a-prompt", "canary-of-a-key", "canary-of-a-wrong-key", "canary-of-an-admin"
ANSWER = '"content":"a"'
SECRETS = (PROMPT, KEY, WRONG_KEY, ADMIN, ANSWER)


async def speak(router: RouterProcess) -> list[int]:
    """Every kind of request with a secret; returns the statuses."""
    url, key = f"{router.url}/v1/chat/completions", {"Authorization": f"Bearer {KEY}"}
    message = {"messages": [{"role": "user", "content": PROMPT}]}
    asked: list[tuple[dict[str, str], Any]] = [
        (key, {"model": "m", "stream": True, **message}),
        (key, {"model": "m", "user": PROMPT, **message}),
        (key, {"model": "sleeping", **message}),
        (key, {"model": "no-such-model", **message}),
        (key, {"model": 7, **message}),
        ({"Authorization": f"Bearer {WRONG_KEY}"}, {"model": "m", **message}),
        ({}, {"model": "m", **message}),
    ]
    async with httpx.AsyncClient(timeout=WAIT_S) as client:
        statuses = [(await client.post(url, json=body, headers=headers)).status_code for headers, body in asked]
        broken = await client.post(
            url, content=b'{"model": "m", "messages": [{"content": "' + PROMPT.encode(), headers=key
        )
        done = await client.post(f"{router.url}/v1/completions", json={"model": "m", "prompt": PROMPT}, headers=key)
    return [*statuses, broken.status_code, done.status_code]


async def everything(router: RouterProcess, valkey: ValkeyProcess, state_dir: Path) -> dict[str, str]:
    found = {str(p): p.read_text(errors="replace") for p in state_dir.rglob("*") if p.is_file()}
    async with httpx.AsyncClient(headers={"Authorization": f"Bearer {ADMIN}"}) as client:
        for path in ("/metrics", "/v1/requests", "/v1/queue", "/policies", "/logs"):
            found[path] = (await client.get(router.admin_url + path)).text
    redis = Redis.from_url(valkey.url, decode_responses=True)
    for name in map(str, await redis.keys("*")):
        kind = await redis.type(name)
        rows = {"hash": redis.hgetall, "string": redis.get}.get(str(kind))
        found[name] = str(await rows(name) if rows else await redis.lrange(name, 0, -1))
    await redis.aclose()
    return found


async def test_secrets_stay_where_they_belong(own_nats: NatsProcess, own_valkey: ValkeyProcess, tmp_path: Path) -> None:
    engine = await FakeEngine().start()
    sleeping = a_model("sleeping", on_cold=OnCold.REFUSE)
    await write_rows(own_valkey.url, a_model(), an_instance("i-1", engine.url), sleeping)
    received: list[bytes] = []

    async def receive(msg: Msg) -> None:
        received.append(msg.subject.encode() + repr(msg.headers).encode() + msg.data)

    tap = await nats.connect(own_nats.url)
    await tap.subscribe("glowplug.>", cb=receive)
    env = {"GLOWPLUG_LOG_LEVEL": "DEBUG", "GLOWPLUG_API_KEY": KEY, "GLOWPLUG_ADMIN_TOKEN": ADMIN}
    async with a_router(own_nats.url, own_valkey.url, tmp_path, **env) as router:
        statuses = await speak(router)
        await until(lambda: any(b"router.requests_finished" in one for one in received), "telemetry goes out")
        found = await everything(router, own_valkey, tmp_path)
        router.terminate()
        await router.ended()
    await tap.close()
    await engine.stop()
    found["bus"] = b"\n".join(received).decode(errors="replace")
    found["log after the end"] = (tmp_path / "router.log").read_text(errors="replace")
    assert statuses == [200, 200, 503, 404, 400, 401, 401, 400, 200]
    assert "router.requests_finished" in found["bus"]
    assert {(name, secret) for name, text in found.items() for secret in SECRETS if secret in text} == set()
