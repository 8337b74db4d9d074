"""The servers the contract tests stand on start, are found by their urls, and keep their port over a restart."""

import nats
from redis.asyncio import Redis

from tests.servers import Infra, NatsProcess


async def test_both_servers_answer(infra: Infra) -> None:
    client = await nats.connect(infra.nats.url)
    account = await client.jetstream().account_info()
    await client.close()
    redis = Redis.from_url(infra.valkey.url)
    assert account.limits is not None
    assert await redis.ping()
    assert (await redis.config_get("appendonly"))["appendonly"] == "yes"
    await redis.aclose()


def test_a_restarted_nats_keeps_its_port(own_nats: NatsProcess) -> None:
    before = own_nats.url
    own_nats.kill()
    assert own_nats.start().url == before
