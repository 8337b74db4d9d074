"""The store on Redis or Valkey: one hash per table, one capped list per log, one counter per issuer."""

import asyncio
import time
from collections.abc import Awaitable
from typing import Any, TypeVar, cast

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError

from glowplug.state.port import StoreUnavailable

T = TypeVar("T")
PREFIX = "glowplug:v1"
TIMEOUT_S = 2.0
# The clock is a floor, so that a store that came back empty still gives a higher number than before.
_NEXT_EPOCH = """
local next = math.max(tonumber(redis.call('get', KEYS[1]) or '0') + 1, tonumber(ARGV[1]))
redis.call('set', KEYS[1], string.format('%.0f', next))
return next
"""


class RedisStore:
    """`url`: redis://host:port/db or unix:///path/to/socket."""

    def __init__(self, url: str) -> None:
        self._redis: Redis = Redis.from_url(
            url,
            socket_timeout=TIMEOUT_S,
            socket_connect_timeout=TIMEOUT_S,
            # Once more on a connection the server has closed; never after a timeout, which has cost its time already.
            retry=Retry(NoBackoff(), 1, supported_errors=(RedisConnectionError,)),
            health_check_interval=0,
        )

    async def _ask(self, call: Any) -> Any:
        try:
            return await cast(Awaitable[Any], call)
        except (RedisError, OSError, TimeoutError, asyncio.IncompleteReadError) as error:
            raise StoreUnavailable(repr(error)) from error

    async def put(self, table: str, key: str, row: bytes) -> None:
        await self._ask(self._redis.hset(f"{PREFIX}:{table}", key, cast(Any, row)))

    async def delete(self, table: str, key: str) -> None:
        await self._ask(self._redis.hdel(f"{PREFIX}:{table}", key))

    async def get(self, table: str, key: str) -> bytes | None:
        return cast(bytes | None, await self._ask(self._redis.hget(f"{PREFIX}:{table}", key)))

    async def load(self, table: str) -> dict[str, bytes]:
        rows: dict[bytes, bytes] = await self._ask(self._redis.hgetall(f"{PREFIX}:{table}"))
        return {key.decode(): row for key, row in rows.items()}

    async def append(self, log: str, row: bytes, *, keep: int) -> None:
        pipe = self._redis.pipeline(transaction=True)
        pipe.lpush(f"{PREFIX}:{log}", row)
        pipe.ltrim(f"{PREFIX}:{log}", 0, keep - 1)
        await self._ask(pipe.execute())

    async def tail(self, log: str, count: int) -> list[bytes]:
        if count <= 0:
            return []  # LRANGE would read -1 as "to the end"
        return cast(list[bytes], await self._ask(self._redis.lrange(f"{PREFIX}:{log}", 0, count - 1)))

    async def next_epoch(self, issuer: str) -> int:
        floor = int(time.time() * 1000)
        return int(await self._ask(self._redis.eval(_NEXT_EPOCH, 1, f"{PREFIX}:epoch:{issuer}", str(floor))))

    async def ping(self) -> bool:
        try:
            return bool(await self._ask(self._redis.ping()))
        except StoreUnavailable:
            return False

    async def close(self) -> None:
        await self._redis.aclose()
