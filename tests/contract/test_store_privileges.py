"""What the declaration of rights forbids in the store is refused by Valkey itself, and what it allows works: every user
and every table, under the configuration that containers are given."""

import subprocess
from collections.abc import Iterator

import pytest
from redis.asyncio import Redis
from redis.exceptions import NoPermissionError, RedisError, ResponseError

from glowplug.runtime.privileges import LOGS, READER, RIGHTS, USERS, nats_document, valkey_document, variable
from glowplug.state.port import Fenced, StoreUnavailable
from glowplug.state.redis_store import PREFIX, RedisStore
from tests.house.tree import ROOT as TREE
from tests.servers import ValkeyProcess

PASSWORDS = {variable(user): f"the-secret-of-{user}" for user in USERS}
TABLES = sorted({table for rights in RIGHTS.values() for table in (*rights.reads, *rights.writes)})
EPOCHS = [user for user, rights in RIGHTS.items() if rights.has_epoch]
users = pytest.mark.parametrize("user", USERS)


@pytest.fixture(scope="module")
def store_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ValkeyProcess]:
    """Valkey with the users that the script of deploy/docker writes."""
    folder = tmp_path_factory.mktemp("valkey")
    script = TREE / "deploy/docker/valkey-users.sh"
    subprocess.run(["sh", str(script), str(folder / "users.acl")], env=PASSWORDS, check=True)
    assert (folder / "users.acl").stat().st_mode & 0o777 == 0o600
    server = ValkeyProcess(folder, acl=str(folder / "users.acl"))
    try:
        yield server.start()
    finally:
        server.kill()


def store_url(server: ValkeyProcess, user: str) -> str:
    return server.url.replace("//", f"//{user}:{PASSWORDS[variable(user)]}@")


@users
async def test_a_user_writes_its_tables_and_reads_what_is_declared(store_server: ValkeyProcess, user: str) -> None:
    rights = RIGHTS[user]
    client = Redis.from_url(store_url(store_server, user))

    async def may(*words: str) -> bool:
        try:
            await client.execute_command(*words)
        except NoPermissionError:
            return False
        except ResponseError as error:  # it may, and the words make no sense
            assert "WRONGTYPE" in str(error), error
        return True

    try:
        for table in [*TABLES, "another"]:
            key, is_log = f"{PREFIX}:{table}", table in LOGS
            writes = (
                [("LPUSH", key, "{}"), ("LTRIM", key, "0", "9")]
                if is_log
                else [("HSET", key, "k", "{}"), ("HDEL", key, "k")]
            )
            reads = [("LRANGE", key, "0", "9")] if is_log else [("HGET", key, "k"), ("HGETALL", key)]
            assert [await may(*words) for words in writes] == [table in rights.writes] * 2, table
            assert {await may(*words) for words in reads} == {table in (*rights.reads, *rights.writes)}, table
            if table not in rights.writes:
                for words in (("SET", key, "x"), ("DEL", key), ("PEXPIRE", key, "1"), ("HSET", key, "k", "{}")):
                    assert not await may(*words), words
        for other in USERS:
            mine = user == other and rights.has_epoch
            assert await may("SET", f"{PREFIX}:epoch:{other}", "1") == mine, other
            assert await may("HSET", f"{PREFIX}:lease:{other}", "holder", "x") == (mine and rights.leads), other
            if mine:
                await client.delete(f"{PREFIX}:lease:{other}") if rights.leads else None
        script = "return redis.call('hset', KEYS[1], 'k', '{}')"
        for table in (t for t in TABLES if t not in rights.writes):
            try:
                await client.eval(script, 1, f"{PREFIX}:{table}")
            except RedisError as error:
                assert "permission" in str(error).lower(), error
            else:
                pytest.fail(f"{user} wrote {table} by a script")
    finally:
        await client.aclose()


@pytest.mark.parametrize("user", [*USERS, ""])
async def test_nobody_commands_the_server(store_server: ValkeyProcess, user: str) -> None:
    """Nor does who gives no password, who may ask whether it lives and nothing else."""
    url = store_url(store_server, user) if user else store_server.url
    client = Redis.from_url(url)
    refused = """CONFIG GET *|CONFIG SET dir /|KEYS *|SCAN 0|FLUSHALL|FLUSHDB|ACL LIST|ACL SETUSER x|
        SHUTDOWN|SAVE|BGREWRITEAOF|MONITOR|CLIENT LIST|CLIENT KILL ID 1|RANDOMKEY|SWAPDB 0 1|REPLICAOF NO ONE|
        MODULE LIST|FUNCTION LIST|SCRIPT FLUSH|SUBSCRIBE x|PUBLISH x y|OBJECT ENCODING x|DUMP x|MIGRATE h 1 k 0 1|
        SLOWLOG GET|LATENCY LATEST|DBSIZE|COMMAND|RENAME a b|COPY a b|CLUSTER INFO|FAILOVER|WAIT 0 0"""
    try:
        assert await client.ping()
        for words in [
            *refused.split("|"),
            *([] if user == READER else ["INFO"]),
            *([] if user else ["GET x", "HGETALL x"]),
        ]:
            with pytest.raises(NoPermissionError):
                await client.execute_command(*words.split())
        with pytest.raises(ResponseError):  # refused to everybody, before anybody's rights are looked at
            await client.execute_command("DEBUG", "SLEEP", "0")
    finally:
        await client.aclose()


async def test_a_wrong_password_opens_nothing(store_server: ValkeyProcess) -> None:
    for url in (
        store_url(store_server, "placer").replace("of-placer", "of-agent"),
        store_server.url.replace("//", "//root:x@"),
    ):
        client = Redis.from_url(url)
        with pytest.raises(RedisError, match="password"):
            await client.hgetall(f"{PREFIX}:models")
        await client.aclose()


@pytest.mark.parametrize("user", EPOCHS)
async def test_epochs_leases_and_fences_work_under_the_rules(store_server: ValkeyProcess, user: str) -> None:
    rights = RIGHTS[user]
    store, second = (RedisStore(store_url(store_server, user)) for _ in range(2))
    table = next(t for t in rights.writes if t not in LOGS)
    try:
        epoch = await store.next_epoch(user)
        store.fence(user, epoch)
        await store.put(table, "k", b"{}")
        await store.delete(table, "k")
        for log in set(rights.writes) & set(LOGS):
            await store.append(log, b"{}", keep=5)
        if rights.leads:
            held = await store.take_lease(user, "a", "http://a", 5.0)
            assert held.holder == "a" and (await store.keep_lease(user, "a", held.epoch, "http://a", 5.0)).left_s > 0
            assert (await store.see_lease(user)).holder == "a"
            await store.drop_lease(user, "a")
        await second.next_epoch(user)
        with pytest.raises(Fenced):
            await store.put(table, "k", b"{}")
        other = next(o for o in EPOCHS if o != user)
        with pytest.raises(StoreUnavailable):
            await store.next_epoch(other)
    finally:
        await store.close()
        await second.close()


def test_the_files_of_containers_are_those_the_declaration_makes() -> None:
    for folder in ("deploy/docker", "deploy/k8s/base"):
        for name_, made in (("nats-users.conf", nats_document()), ("valkey-users.sh", valkey_document())):
            text = (TREE / folder / name_).read_text(encoding="utf-8")
            assert text == made, f"python -m glowplug.runtime.privileges {name_.split('-')[0]} > {folder}/{name_}"
