"""Store state on Redis or Valkey: one hash per table, one capped list per log, one counter per issuer. Atomic steps are
scripts in redis_store.lua."""

import asyncio
import re
import time
from collections.abc import Awaitable, Iterable
from itertools import accumulate
from pathlib import Path
from typing import Any, cast

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError, ResponseError

from glowplug.domain.lease import Lease
from glowplug.state.address import Sentinels, connect
from glowplug.state.keys import PREFIX
from glowplug.state.port import Fenced, NotATable, StoreUnavailable

FENCED = "GLOWPLUG-FENCED"
TIMEOUT_S = 2.0
REPLICATED_MS = 200
READ_ONLY = ("MISCONF", "OOM command", "READONLY")  # full disk, full memory, a replica: still readable
WRONG_TYPE = "WRONGTYPE"  # prefix of the server's error for another kind of value


def _scripts(text: str) -> dict[str, str]:
    found: dict[str, str] = {}
    for part in re.split(r"^-- script ", text, flags=re.MULTILINE)[1:]:
        title, _, body = part.partition("\n")
        name, *above = title.split()
        found[name] = "".join([*(found[other] for other in above), body])
    return found


SCRIPTS = _scripts(Path(__file__).with_suffix(".lua").read_text(encoding="utf-8"))


class RedisStore:
    """`url`: see address.py. Under Sentinel a write is answered once a replica has it, or after REPLICATED_MS: losing a
    master loses no answered write while a replica keeps up."""

    def __init__(self, url: str) -> None:
        self._has_replicas = Sentinels.of(url) is not None
        self._redis: Redis = connect(
            url,
            socket_timeout=TIMEOUT_S,
            socket_connect_timeout=TIMEOUT_S,
            # One retry on a closed connection; none after a timeout, which has cost its time.
            retry=Retry(NoBackoff(), 1, supported_errors=(RedisConnectionError,)),
            health_check_interval=0,
        )
        self._fence: tuple[str, int] | None = None
        self._packs = True  # read tables as one string, unless refused (an old server, or its users)
        self.refusal = ""  # why it takes no writes, or ""

    async def _ask(self, call: Any) -> Any:
        try:
            return await cast(Awaitable[Any], call)
        except (RedisError, OSError, TimeoutError, asyncio.IncompleteReadError) as error:
            if FENCED in str(error):
                raise Fenced(f"{self._fence}: another leads with a newer epoch") from error
            if WRONG_TYPE in str(error):
                raise NotATable(str(error)) from error
            if any(word in str(error) for word in READ_ONLY):
                self.refusal = f"the store takes no writes: {error}"
            raise StoreUnavailable(f"{type(error).__name__}: {error}") from error

    async def _write(self, command: str, key: str, *words: Any) -> None:
        """Raises Fenced."""
        words = (command, key, *words)
        if self._fence is not None:
            service, epoch = self._fence
            words = ("EVAL", SCRIPTS["fenced_write"], 2, _epoch(service), key, str(epoch), command, *words[2:])
        if self._has_replicas:
            pipe = self._redis.pipeline(transaction=False)  # one connection: WAIT covers its own writes
            pipe.execute_command(*words)
            pipe.execute_command("WAIT", 1, REPLICATED_MS)
            await self._ask(pipe.execute())
        else:
            await self._ask(cast(Any, self._redis).execute_command(*words))
        self.refusal = ""

    async def put(self, table: str, key: str, row: bytes) -> None:
        await self._write("HSET", f"{PREFIX}:{table}", key, row)

    async def delete(self, table: str, key: str) -> None:
        await self._write("HDEL", f"{PREFIX}:{table}", key)

    async def get(self, table: str, key: str) -> bytes | None:
        return cast(bytes | None, await self._ask(self._redis.hget(f"{PREFIX}:{table}", key)))

    async def load(self, table: str) -> dict[str, bytes]:
        key, rows = f"{PREFIX}:{table}", None
        if self._packs:
            try:
                rows = _unpacked(*await self._ask(self._redis.eval_ro(SCRIPTS["table"], 1, key)))
            except StoreUnavailable as error:
                if not isinstance(error.__cause__, ResponseError) or isinstance(error, NotATable):
                    raise
                self._packs = False
        if rows is None:
            found: dict[bytes, bytes] = await self._ask(self._redis.hgetall(key))
            rows = found.items()
        return dict(table_row(key, row) for key, row in rows)

    async def append(self, log: str, row: bytes, *, keep: int) -> None:
        await self._write("LPUSH", f"{PREFIX}:{log}", row)
        await self._write("LTRIM", f"{PREFIX}:{log}", 0, keep - 1)

    async def tail(self, log: str, count: int) -> list[bytes]:
        if count <= 0:
            return []  # to LRANGE, -1 means the end
        return cast(list[bytes], await self._ask(self._redis.lrange(f"{PREFIX}:{log}", 0, count - 1)))

    async def next_epoch(self, issuer: str) -> int:
        return int(await self._ask(self._redis.eval(SCRIPTS["next_epoch"], 1, _epoch(issuer), _floor())))

    async def see_lease(self, service: str, known_epoch: int = 0) -> Lease:
        return await self._lease("see", service, known_epoch)

    async def take_lease(self, service: str, holder: str, url: str, lease_s: float) -> Lease:
        return await self._lease("take", service, holder, url, round(lease_s * 1000), _floor())

    async def keep_lease(self, service: str, holder: str, epoch: int, url: str, lease_s: float) -> Lease:
        return await self._lease("keep", service, holder, url, round(lease_s * 1000), epoch)

    async def drop_lease(self, service: str, holder: str) -> None:
        await self._lease("drop", service, holder)

    async def _lease(self, script: str, service: str, *words: Any) -> Lease:
        keys = (f"{PREFIX}:lease:{service}", _epoch(service))
        answer = await self._ask(self._redis.eval(SCRIPTS[script], len(keys), *keys, *(str(word) for word in words)))
        holder, epoch, url, left_ms, newest = answer
        return Lease(
            holder=holder.decode("utf-8", "backslashreplace"),
            epoch=int(epoch),
            url=url.decode("utf-8", "backslashreplace"),
            left_s=max(int(left_ms), 0) / 1000,
            newest_epoch=int(newest),
        )

    def fence(self, service: str, epoch: int) -> None:
        self._fence = (service, epoch) if epoch else None

    async def ping(self) -> bool:
        try:
            return bool(await self._ask(self._redis.ping()))
        except StoreUnavailable:
            return False

    async def close(self) -> None:
        await self._redis.aclose()


def _unpacked(lengths: bytes, joined: bytes) -> Iterable[tuple[bytes, bytes]]:
    ends = list(accumulate(map(int, lengths.split(b","))) if lengths else ())
    parts = [joined[start:end] for start, end in zip([0, *ends], ends, strict=False)]
    return zip(parts[::2], parts[1::2], strict=True)


def table_row(key: bytes, row: bytes) -> tuple[str, bytes]:
    """Decode a field; see Store.load for keys that are not UTF-8."""
    try:
        return key.decode(), row
    except UnicodeDecodeError:
        return key.decode("utf-8", "backslashreplace"), b""


def _epoch(service: str) -> str:
    return f"{PREFIX}:epoch:{service}"


def _floor() -> str:
    """Lower bound of epochs, from the clock, so that they grow even in an emptied store."""
    return str(int(time.time() * 1000))
