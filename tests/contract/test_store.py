"""Every store, in memory and on a real Valkey, also with foreign data in it."""

import asyncio
import uuid
from collections.abc import AsyncIterator
from typing import Any

import pytest
from redis.asyncio import Redis

from glowplug.state.keys import PREFIX
from glowplug.state.memory_store import MemoryStore
from glowplug.state.port import Fenced, NotATable, Store, StoreUnavailable
from glowplug.state.redis_store import RedisStore
from tests.servers import Infra, ValkeyProcess
from tests.waiting import WAIT_S


@pytest.fixture(params=["memory", "valkey"])
async def store(request: pytest.FixtureRequest) -> AsyncIterator[Store]:
    is_memory = request.param == "memory"
    made: Store = MemoryStore() if is_memory else RedisStore(request.getfixturevalue("infra").valkey.url)
    yield made
    await made.close()


@pytest.fixture
async def own(own_valkey: ValkeyProcess) -> AsyncIterator[RedisStore]:
    store = RedisStore(own_valkey.url)
    yield store
    await store.close()


@pytest.fixture
async def operator(own_valkey: ValkeyProcess) -> AsyncIterator[Redis]:
    async with Redis.from_url(own_valkey.url) as client:
        yield client


@pytest.fixture
def table() -> str:
    return f"t-{uuid.uuid4().hex[:10]}"


async def test_a_row_comes_back_as_it_was(store: Store, table: str) -> None:
    row = '{"name":"é\\u0000","n":1}'.encode()
    await store.put(table, "a/b c", row)
    assert await store.get(table, "a/b c") == row
    assert await store.load(table) == {"a/b c": row}


async def test_a_row_that_is_not_there_is_none(store: Store, table: str) -> None:
    assert await store.get(table, "a") is None
    assert await store.load(table) == {}


async def test_the_latest_row_wins(store: Store, table: str) -> None:
    for row in (b"1", b"2", b"3"):
        await store.put(table, "a", row)
    assert await store.load(table) == {"a": b"3"}


async def test_a_deleted_row_is_gone_and_deleting_twice_is_no_error(store: Store, table: str) -> None:
    await store.put(table, "a", b"1")
    await store.put(table, "b", b"2")
    await store.delete(table, "a")
    await store.delete(table, "a")
    assert await store.load(table) == {"b": b"2"}


async def test_tables_do_not_mix(store: Store, table: str) -> None:
    await store.put(table, "a", b"1")
    await store.put(table + "x", "a", b"2")
    assert await store.get(table, "a") == b"1"


async def test_what_was_loaded_does_not_change_with_the_table(store: Store, table: str) -> None:
    await store.put(table, "a", b"1")
    loaded = await store.load(table)
    await store.put(table, "b", b"2")
    assert loaded == {"a": b"1"}


async def test_a_log_keeps_its_newest_rows(store: Store, table: str) -> None:
    for num in range(10):
        await store.append(table, str(num).encode(), keep=4)
    assert await store.tail(table, 100) == [b"9", b"8", b"7", b"6"]
    assert await store.tail(table, 2) == [b"9", b"8"]


async def test_no_rows_asked_for_or_there_are_no_rows(store: Store, table: str) -> None:
    assert await store.tail(table, 5) == []
    await store.append(table, b"1", keep=3)
    assert await store.tail(table, 0) == await store.tail(table, -1) == []


async def test_epochs_of_an_issuer_grow(store: Store, table: str) -> None:
    taken = [await store.next_epoch(table) for _ in range(50)]
    assert taken == sorted(set(taken))
    assert taken[0] > 0


async def test_epochs_taken_at_once_differ(store: Store, table: str) -> None:
    taken = await asyncio.gather(*(store.next_epoch(table) for _ in range(20)))
    assert len(set(taken)) == 20


async def test_a_living_store_answers_a_ping(store: Store) -> None:
    assert await store.ping() is True


async def all_calls_refuse(store: Store) -> None:
    for call in (
        lambda: store.put("t", "k", b"1"),
        lambda: store.delete("t", "k"),
        lambda: store.get("t", "k"),
        lambda: store.load("t"),
        lambda: store.append("l", b"1", keep=2),
        lambda: store.tail("l", 2),
        lambda: store.next_epoch("i"),
        lambda: store.see_lease("i"),
        lambda: store.take_lease("i", "a", "", 1.0),
        lambda: store.keep_lease("i", "a", 1, "", 1.0),
        lambda: store.drop_lease("i", "a"),
    ):
        with pytest.raises(StoreUnavailable):
            await call()
    assert await store.ping() is False


async def test_a_memory_store_that_is_down_refuses() -> None:
    store = MemoryStore()
    store.down = True
    await all_calls_refuse(store)


async def test_a_killed_store_refuses_promptly_and_keeps_its_rows(own: RedisStore, own_valkey: ValkeyProcess) -> None:
    """AOF keeps writes over a kill -9."""
    await own.put("t", "a", b"1")
    await own.append("l", b"row", keep=5)
    before = await own.next_epoch("placer")
    own_valkey.kill()
    async with asyncio.timeout(WAIT_S):
        await all_calls_refuse(own)
    own_valkey.start()
    assert await own.load("t") == {"a": b"1"}
    assert await own.tail("l", 5) == [b"row"]
    assert await own.next_epoch("placer") > before


async def test_a_frozen_store_refuses_in_time_and_answers_again(own: RedisStore, own_valkey: ValkeyProcess) -> None:
    """Its late answer must not pass for another call's."""
    await own.put("t", "a", b"1")
    own_valkey.freeze()
    with pytest.raises(StoreUnavailable):
        await own.get("t", "a")
    own_valkey.thaw()
    assert await own.load("t") == {"a": b"1"}
    assert await own.get("t", "nothing") is None


async def test_epochs_grow_over_an_emptied_store(own: RedisStore, operator: Redis) -> None:
    before = [await own.next_epoch("placer") for _ in range(3)]
    await operator.flushall()
    assert await own.next_epoch("placer") > max(before)


async def test_a_read_only_store_refuses_writes_and_still_reads(own: RedisStore, operator: Redis) -> None:
    await own.put("t", "a", b"1")
    await operator.config_set("min-replicas-to-write", 1)
    for write in (own.put("t", "a", b"2"), own.append("l", b"1", keep=2), own.next_epoch("placer")):
        with pytest.raises(StoreUnavailable):
            await write
    assert await own.get("t", "a") == b"1"


async def test_a_store_that_is_not_there_yet_is_asked_again(own: RedisStore, own_valkey: ValkeyProcess) -> None:
    own_valkey.kill()
    assert await own.ping() is False
    own_valkey.start()
    assert await own.ping() is True


async def test_one_of_two_takes_the_lease_and_keeps_it(store: Store, table: str) -> None:
    first = await store.take_lease(table, "a", "http://a", 30.0)
    assert (first.holder, first.url) == ("a", "http://a") and 0 < first.left_s <= 30 and first.epoch > 0
    refused = await store.take_lease(table, "b", "http://b", 30.0)
    assert (refused.holder, refused.epoch, refused.url) == ("a", first.epoch, "http://a")
    kept = await store.keep_lease(table, "a", first.epoch, "http://a", 60.0)
    assert (kept.holder, kept.epoch) == ("a", first.epoch) and kept.left_s > 30
    seen = await store.see_lease(table)
    assert (seen.holder, seen.newest_epoch) == ("a", first.epoch)


async def test_a_leader_with_less_than_a_known_epoch_cannot_keep_its_lease(store: Store, table: str) -> None:
    first = await store.take_lease(table, "a", "", 30.0)
    assert (await store.see_lease(table, first.epoch)).newest_epoch == first.epoch
    assert (await store.see_lease(table, first.epoch + 7)).newest_epoch == first.epoch + 7
    kept = await store.keep_lease(table, "a", first.epoch, "", 60.0)
    assert kept.newest_epoch == first.epoch + 7 and kept.left_s <= 30
    again = await store.take_lease(table, "a", "", 30.0)
    assert again.holder == "a" and again.epoch > first.epoch + 7


async def test_nobody_has_a_lease_nobody_took(store: Store, table: str) -> None:
    seen = await store.see_lease(table)
    assert (seen.holder, seen.epoch, seen.left_s, seen.newest_epoch) == ("", 0, 0.0, 0)


async def test_a_lease_runs_out_and_the_next_has_a_higher_epoch(store: Store, table: str) -> None:
    first = await store.take_lease(table, "a", "", 0.05)
    async with asyncio.timeout(WAIT_S):
        while (await store.see_lease(table)).holder:
            await asyncio.sleep(0.01)
    assert (await store.see_lease(table)).newest_epoch == first.epoch
    second = await store.take_lease(table, "b", "", 30.0)
    assert second.holder == "b" and second.epoch > first.epoch
    late = await store.keep_lease(table, "a", first.epoch, "", 30.0)
    assert (late.holder, late.epoch) == ("b", second.epoch)
    await store.drop_lease(table, "b")
    still = await store.keep_lease(table, "a", first.epoch, "", 30.0)  # no leader now, but there has been one
    assert still.holder == "" and still.newest_epoch == second.epoch


async def test_a_lease_that_ran_out_unnoticed_is_kept_by_whoever_led_last(store: Store, table: str) -> None:
    first = await store.take_lease(table, "a", "", 0.02)
    await asyncio.sleep(0.05)
    kept = await store.keep_lease(table, "a", first.epoch, "", 30.0)
    assert (kept.holder, kept.epoch) == ("a", first.epoch)


async def test_a_lease_taken_twice_by_one_holder_has_a_new_epoch(store: Store, table: str) -> None:
    """Its answer may have been lost."""
    first = await store.take_lease(table, "a", "", 30.0)
    again = await store.take_lease(table, "a", "", 30.0)
    assert again.holder == "a" and again.epoch > first.epoch


async def test_a_dropped_lease_is_free_at_once_and_only_its_holder_drops_it(store: Store, table: str) -> None:
    await store.take_lease(table, "a", "", 30.0)
    await store.drop_lease(table, "b")
    assert (await store.see_lease(table)).holder == "a"
    await store.drop_lease(table, "a")
    assert (await store.take_lease(table, "b", "", 30.0)).holder == "b"


async def test_many_candidates_at_once_are_one_leader(store: Store, table: str) -> None:
    answers = await asyncio.gather(*(store.take_lease(table, f"c-{k}", "", 30.0) for k in range(20)))
    assert len({answer.holder for answer in answers}) == 1 and len({answer.epoch for answer in answers}) == 1


async def test_an_epoch_taken_without_a_lease_ends_it(store: Store, table: str) -> None:
    """A process started without election: the leader must know."""
    first = await store.take_lease(table, "a", "", 30.0)
    newer = await store.next_epoch(table)
    kept = await store.keep_lease(table, "a", first.epoch, "", 30.0)
    assert kept.newest_epoch == newer > kept.epoch


async def test_writes_of_a_fenced_client_are_refused_once_another_leads(store: Store, table: str) -> None:
    first = await store.take_lease(table, "a", "", 30.0)
    store.fence(table, first.epoch)
    await store.put(table, "k", b"1")
    await store.put(table, "gone", b"1")
    await store.delete(table, "gone")
    await store.append(f"{table}-log", b"1", keep=2)
    await store.drop_lease(table, "a")
    await store.put(table, "k", b"2")
    await store.take_lease(table, "b", "", 30.0)
    for write in (
        lambda: store.put(table, "k", b"3"),
        lambda: store.delete(table, "k"),
        lambda: store.append(f"{table}-log", b"3", keep=2),
    ):
        with pytest.raises(Fenced):
            await write()
    assert await store.load(table) == {"k": b"2"} and await store.tail(f"{table}-log", 5) == [b"1"]
    store.fence(table, 0)
    await store.put(table, "k", b"4")
    assert await store.get(table, "k") == b"4"


async def test_an_emptied_store_takes_the_lease_from_whoever_led(own: RedisStore, operator: Redis) -> None:
    first = await own.take_lease("placer", "a", "http://a", 30.0)
    await operator.flushall()
    assert (await own.see_lease("placer")).newest_epoch == 0
    kept = await own.keep_lease("placer", "a", first.epoch, "http://a", 30.0)
    assert (kept.holder, kept.epoch, kept.newest_epoch) == ("a", first.epoch, first.epoch)
    await operator.flushall()
    taken = await own.take_lease("placer", "b", "http://b", 30.0)
    lost = await own.keep_lease("placer", "a", first.epoch, "http://a", 30.0)
    assert taken.epoch > first.epoch and lost.holder == "b"


async def test_the_memory_twin_loses_its_rows_as_a_store_does() -> None:
    store = MemoryStore()
    first = await store.take_lease("placer", "a", "", 30.0)
    store.empty()
    assert (await store.see_lease("placer")).newest_epoch == 0
    assert (await store.take_lease("placer", "b", "", 30.0)).epoch > first.epoch


@pytest.fixture
async def raw(infra: Infra) -> AsyncIterator[Redis]:
    async with Redis.from_url(infra.valkey.url) as client:
        yield client


@pytest.fixture
async def real(infra: Infra) -> AsyncIterator[RedisStore]:
    made = RedisStore(infra.valkey.url)
    yield made
    await made.close()


async def test_a_row_whose_key_is_no_utf8_is_named_without_bytes(real: RedisStore, raw: Redis, table: str) -> None:
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
async def test_what_is_no_lease_keeps_no_one_from_leading(real: RedisStore, raw: Redis, table: str, odd: str) -> None:
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
    if odd == "no epoch":
        assert (seen.holder, seen.epoch) == ("other@1", 0)
    elif odd == "no utf8":
        assert seen.holder == "\\xff@\\xfe" and seen.url == "\\xff"
    else:
        assert seen.holder == ""
        assert (await real.take_lease(table, "a@1", "http://a", 5.0)).holder == "a@1"
