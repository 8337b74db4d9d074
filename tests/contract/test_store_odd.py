"""A real store in which something stands that is none of ours: rows, tables, epochs and leases."""

import uuid
from collections.abc import AsyncIterator
from typing import Any

import pytest
from redis.asyncio import Redis

from glowplug.state.port import NotATable
from glowplug.state.redis_store import PREFIX, RedisStore


@pytest.fixture
def table() -> str:
    """A table, log or service no other test uses."""
    return f"t-{uuid.uuid4().hex[:10]}"


@pytest.fixture
async def raw(request: pytest.FixtureRequest) -> AsyncIterator[Redis]:
    client: Redis = Redis.from_url(request.getfixturevalue("infra").valkey.url)
    yield client
    await client.aclose()


@pytest.fixture
async def real(request: pytest.FixtureRequest) -> AsyncIterator[RedisStore]:
    made = RedisStore(request.getfixturevalue("infra").valkey.url)
    yield made
    await made.close()


async def test_a_row_whose_key_is_no_utf8_is_named_and_left_to_be_refused(
    real: RedisStore, raw: Redis, table: str
) -> None:
    await raw.hset(f"{PREFIX}:{table}", mapping={b"\xff\xfe": b'{"a":1}', b"good": b"1"})  # type: ignore[misc, arg-type]
    assert await real.load(table) == {"\\xff\\xfe": b"", "good": b"1"}


@pytest.mark.parametrize("kind", ["text", "list", "set", "sorted"])
async def test_what_is_no_table_says_so_and_is_no_outage(real: RedisStore, raw: Redis, table: str, kind: str) -> None:
    key = f"{PREFIX}:{table}"
    made: Any = {
        "text": lambda: raw.set(key, b"\xff"),
        "list": lambda: raw.rpush(key, b"x"),
        "set": lambda: raw.sadd(key, b"x"),
        "sorted": lambda: raw.zadd(key, {"x": 1.0}),
    }
    await made[kind]()
    calls = [lambda: real.load(table), lambda: real.get(table, "k"), lambda: real.put(table, "k", b"1")]
    if kind != "list":
        calls += [lambda: real.tail(table, 5), lambda: real.append(table, b"1", keep=5)]
    for call in calls:
        with pytest.raises(NotATable):
            await call()
    assert await real.ping()


ODD_EPOCHS = (b"", b"x", b"\xff", b"nan", b"inf", b"1e400", b"-5", b"1.5", b"9" * 40, b"9" * 5000, b"9007199254740993")


@pytest.mark.parametrize("found", ODD_EPOCHS)
async def test_an_epoch_that_is_none_is_as_good_as_lost(real: RedisStore, raw: Redis, table: str, found: bytes) -> None:
    before = await real.next_epoch(table)
    await raw.set(f"{PREFIX}:epoch:{table}", found)
    seen = await real.see_lease(table)
    assert (seen.holder, seen.newest_epoch) == ("", 0)
    assert await real.next_epoch(table) > before
    await raw.set(f"{PREFIX}:epoch:{table}", found)
    taken = await real.take_lease(table, "a@1", "http://a", 5.0)
    assert taken.holder == "a@1" and taken.epoch > before
    await raw.set(f"{PREFIX}:epoch:{table}", found)
    assert (await real.keep_lease(table, "a@1", taken.epoch, "http://a", 5.0)).epoch == taken.epoch
    real.fence(table, taken.epoch)
    await real.put(table, "k", b"1")


async def test_an_epoch_of_another_type_is_as_good_as_lost(real: RedisStore, raw: Redis, table: str) -> None:
    await raw.rpush(f"{PREFIX}:epoch:{table}", b"7")  # type: ignore[misc]
    assert await real.next_epoch(table) > 0
    await raw.delete(f"{PREFIX}:epoch:{table}")
    await raw.hset(f"{PREFIX}:epoch:{table}", "a", "b")  # type: ignore[misc]
    real.fence(table, 5)
    await real.put(table, "k", b"1")
    assert (await real.take_lease(table, "a@1", "", 5.0)).holder == "a@1"


@pytest.mark.parametrize("odd", ["text", "no end", "no holder", "no epoch", "far end", "no utf8"])
async def test_a_lease_that_is_none_keeps_nobody_from_leading(
    real: RedisStore, raw: Redis, table: str, odd: str
) -> None:
    key = f"{PREFIX}:lease:{table}"
    whole: dict[Any, Any] = {"holder": "other@1", "epoch": "7", "url": "http://o"}
    if odd == "text":
        await raw.set(key, b"\xff")
    else:
        whole |= {"epoch": b"\xff"} if odd == "no epoch" else {}
        whole |= {"holder": b"\xff@\xfe", "url": b"\xff"} if odd == "no utf8" else {}
        await raw.hset(key, mapping={k: v for k, v in whole.items() if odd != "no holder" or k != "holder"})  # type: ignore[misc]
        if odd != "no end":
            await raw.pexpire(key, 10**12 if odd == "far end" else 60_000)
    seen = await real.see_lease(table)
    if odd == "no epoch":  # a holder, whoever it is: until it runs out
        assert (seen.holder, seen.epoch) == ("other@1", 0)
    elif odd == "no utf8":
        assert seen.holder == "\\xff@\\xfe" and seen.url == "\\xff"
    else:
        assert seen.holder == ""
        assert (await real.take_lease(table, "a@1", "http://a", 5.0)).holder == "a@1"
