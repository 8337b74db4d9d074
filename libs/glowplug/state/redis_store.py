"""The store on Redis or Valkey: one hash per table, one capped list per log, one counter per issuer.

What the server does in one step are scripts: epochs, leases, and writes that an old leader may no longer make. A lease
is a hash {holder, epoch, url} that expires; beside it stands the counter of epochs, which does not."""

import asyncio
import time
from collections.abc import Awaitable
from typing import Any, TypeVar, cast

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError

from glowplug.domain.lease import Lease
from glowplug.state.port import Fenced, NotATable, StoreUnavailable

PREFIX = "glowplug:v1"  # of every key

# An epoch as the store has it. What is no epoch, or more than a number of Lua holds exactly, counts as none: the next
# one is taken from the clock, which is past every one that was ever given.
_EPOCH = """
local function epoch_of(text)
  local epoch = type(text) == 'string' and tonumber(text)
  if not epoch or epoch ~= epoch or epoch < 0 or epoch >= 2^53 or epoch % 1 ~= 0 then return 0 end
  return epoch
end
local function epoch_at(key) return epoch_of(redis.pcall('get', key)) end
"""

NEXT_EPOCH = f"""{_EPOCH}
local next = math.max(epoch_at(KEYS[1]) + 1, tonumber(ARGV[1]))
redis.call('set', KEYS[1], string.format('%.0f', next))
return next
"""

LONGEST_LEASE_MS = 3_600_000  # far above every GLOWPLUG_LEADER_LEASE_S in use, which is seconds

# The answer of every lease script: holder, its epoch, its url, ms left, newest epoch. What stands at the lease and is
# none (another type, no holder, no end, or one far away) goes first: nobody could lead again.
_SEEN = f"""{_EPOCH}
local LONGEST_MS = {LONGEST_LEASE_MS}
local function whole(number) return string.format('%.0f', number) end
local function seen()
  local lease = redis.call('hmget', KEYS[1], 'holder', 'epoch', 'url')
  local left = redis.call('pttl', KEYS[1])
  return {{lease[1] or '', whole(epoch_of(lease[2])), lease[3] or '', left, whole(epoch_at(KEYS[2]))}}
end
local function hold(holder, url, ms, epoch)
  redis.call('set', KEYS[2], epoch)
  redis.call('hset', KEYS[1], 'holder', holder, 'epoch', epoch, 'url', url)
  redis.call('pexpire', KEYS[1], ms)
  return seen()
end
local holder = redis.pcall('hget', KEYS[1], 'holder')
local left = redis.call('pttl', KEYS[1])
if type(holder) ~= 'string' or left < 0 or left > LONGEST_MS then
  redis.call('del', KEYS[1])
  holder = false
end
local newest = epoch_at(KEYS[2])
"""

# ARGV: highest epoch known to the caller
SEE = f"""{_SEEN}
if holder and newest < tonumber(ARGV[1]) then redis.call('set', KEYS[2], ARGV[1]) end
return seen()
"""

# ARGV: holder, url, ms, floor
TAKE = f"""{_SEEN}
if holder and holder ~= ARGV[1] then return seen() end
return hold(ARGV[1], ARGV[2], ARGV[3], string.format('%.0f', math.max(newest + 1, tonumber(ARGV[4]))))
"""

# ARGV: holder, url, ms, epoch
KEEP = f"""{_SEEN}
if newest > tonumber(ARGV[4]) or (holder and holder ~= ARGV[1]) then return seen() end
return hold(ARGV[1], ARGV[2], ARGV[3], ARGV[4])
"""

# ARGV: holder
DROP = f"""{_SEEN}
if holder == ARGV[1] then redis.call('del', KEYS[1]) end
return seen()
"""

FENCED = "GLOWPLUG-FENCED"
# KEYS: counter of epochs, key. ARGV: our epoch, command, its words
FENCED_WRITE = f"""{_EPOCH}
if epoch_at(KEYS[1]) > tonumber(ARGV[1]) then
  return redis.error_reply('{FENCED} a newer epoch has been given')
end
return redis.call(ARGV[2], KEYS[2], unpack(ARGV, 3))
"""
T = TypeVar("T")
TIMEOUT_S = 2.0
READ_ONLY = ("MISCONF", "OOM command", "READONLY")  # a full disk, full memory, a replica: reads are answered
WRONG_TYPE = "WRONGTYPE"  # how the server's error begins: the key holds another kind of value


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
        self._fence: tuple[str, int] | None = None
        self.refusal = ""  # why the server takes no writes though it answers, or ""

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
        """One write, refused as Fenced when this client is fenced off."""
        if self._fence is None:
            await self._ask(cast(Any, self._redis).execute_command(command, key, *words))
        else:
            service, epoch = self._fence
            fenced = (_epoch(service), key, str(epoch), command, *words)
            await self._ask(self._redis.eval(FENCED_WRITE, 2, *fenced))
        self.refusal = ""

    async def put(self, table: str, key: str, row: bytes) -> None:
        await self._write("HSET", f"{PREFIX}:{table}", key, row)

    async def delete(self, table: str, key: str) -> None:
        await self._write("HDEL", f"{PREFIX}:{table}", key)

    async def get(self, table: str, key: str) -> bytes | None:
        return cast(bytes | None, await self._ask(self._redis.hget(f"{PREFIX}:{table}", key)))

    async def load(self, table: str) -> dict[str, bytes]:
        rows: dict[bytes, bytes] = await self._ask(self._redis.hgetall(f"{PREFIX}:{table}"))
        return dict(table_row(key, row) for key, row in rows.items())

    async def append(self, log: str, row: bytes, *, keep: int) -> None:
        await self._write("LPUSH", f"{PREFIX}:{log}", row)
        await self._write("LTRIM", f"{PREFIX}:{log}", 0, keep - 1)

    async def tail(self, log: str, count: int) -> list[bytes]:
        if count <= 0:
            return []  # LRANGE would read -1 as "to the end"
        return cast(list[bytes], await self._ask(self._redis.lrange(f"{PREFIX}:{log}", 0, count - 1)))

    async def next_epoch(self, issuer: str) -> int:
        return int(await self._ask(self._redis.eval(NEXT_EPOCH, 1, _epoch(issuer), _floor())))

    async def see_lease(self, service: str, known_epoch: int = 0) -> Lease:
        return await self._lease(SEE, service, known_epoch)

    async def take_lease(self, service: str, holder: str, url: str, lease_s: float) -> Lease:
        return await self._lease(TAKE, service, holder, url, round(lease_s * 1000), _floor())

    async def keep_lease(self, service: str, holder: str, epoch: int, url: str, lease_s: float) -> Lease:
        return await self._lease(KEEP, service, holder, url, round(lease_s * 1000), epoch)

    async def drop_lease(self, service: str, holder: str) -> None:
        await self._lease(DROP, service, holder)

    async def _lease(self, script: str, service: str, *words: Any) -> Lease:
        keys = (f"{PREFIX}:lease:{service}", _epoch(service))
        answer = await self._ask(self._redis.eval(script, len(keys), *keys, *(str(word) for word in words)))
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


def table_row(key: bytes, row: bytes) -> tuple[str, bytes]:
    """One field of a table's hash. See Store.load for a key that is no UTF-8."""
    try:
        return key.decode(), row
    except UnicodeDecodeError:
        return key.decode("utf-8", "backslashreplace"), b""


def _epoch(service: str) -> str:
    return f"{PREFIX}:epoch:{service}"


def _floor() -> str:
    """The clock, below which no epoch is given: a store that came back empty still gives a higher one than before."""
    return str(int(time.time() * 1000))
