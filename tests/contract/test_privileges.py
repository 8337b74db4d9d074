"""NATS and Valkey themselves refuse undeclared rights, for every user."""

import asyncio
import subprocess
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import nats
import pytest
from nats.aio.client import Client
from redis.asyncio import Redis
from redis.exceptions import NoPermissionError, RedisError, ResponseError

from glowplug.bus import nats_bus
from glowplug.bus.memory_bus import matches
from glowplug.bus.nats_bus import NatsBus, arrive
from glowplug.bus.streams import consumer_config, stream_configs
from glowplug.events import encode
from glowplug.events.envelope import COMMANDS, PAYLOADS
from glowplug.events.subjects import (
    COMMANDS_STREAM,
    FACTS_STREAM,
    ROOT,
    USAGE_STREAM,
    commands_to,
    facts_of,
    is_telemetry,
    of_event,
    stream_of,
)
from glowplug.runtime.privileges import (
    LOGS,
    READER,
    RIGHTS,
    STREAMS,
    STREAMS_OWNER,
    USERS,
    inbox_of,
    makes_streams,
    nats_document,
    valkey_document,
    variable,
)
from glowplug.services.console.usage_api import FILTERS
from glowplug.state.keys import PREFIX
from glowplug.state.port import Fenced, StoreUnavailable
from glowplug.state.redis_store import RedisStore
from tests.contract.bus_rig import Listener, name, stop
from tests.house.tree import ROOT as TREE
from tests.servers import NatsProcess, ValkeyProcess
from tests.waiting import WAIT_S, until

LAST = f"{ROOT}.the.last"
PASSWORDS = {variable(user): f"the-secret-of-{user}" for user in USERS}
SUBJECTS = {kind: f"{ROOT}.cmd.{kind}.t" if kind in COMMANDS else facts_of(kind, "m")[:-1] + "t" for kind in PAYLOADS}
users = pytest.mark.parametrize("user", USERS)
TABLES = sorted({table for rights in RIGHTS.values() for table in (*rights.reads, *rights.writes)})
EPOCHS = [user for user, rights in RIGHTS.items() if rights.has_epoch]


def nats_users() -> str:
    """Those of the containers, plus one with all rights."""
    text = (TREE / "deploy/k8s/base/nats-users.conf").read_text(encoding="utf-8")
    return text.replace("users: [", "users: [\n    {user: witness, password: sees-all}")


@pytest.fixture(scope="module")
def bus_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsProcess]:
    with NatsProcess(tmp_path_factory.mktemp("nats"), PASSWORDS, nats_users()) as server:
        yield server


def url_of(server: NatsProcess | ValkeyProcess, user: str) -> str:
    return server.url.replace("//", f"//{user}:{PASSWORDS[variable(user)]}@")


@asynccontextmanager
async def guest(server: NatsProcess, user: str) -> AsyncIterator[Client]:
    """The server reports refusals late, so tests look at arrivals."""
    url = url_of(server, user)
    client = await nats.connect(url, error_cb=_quiet, inbox_prefix=inbox_of(url), allow_reconnect=False)
    try:
        yield client
    finally:
        await client.close()


async def _quiet(_: Exception) -> None:
    """A refusal."""


@asynccontextmanager
async def watching(server: NatsProcess) -> AsyncIterator[tuple[Client, set[str]]]:
    """A client with all rights, and the subjects let through since."""
    seen: set[str] = set()

    async def see(msg: Any) -> None:
        seen.add(msg.subject)

    client = await nats.connect(server.url.replace("//", "//witness:sees-all@"), allow_reconnect=False)
    try:
        await client.subscribe(">", cb=see)
        await arrive(client)
        yield client, seen
    finally:
        await client.close()


async def let_through(server: NatsProcess, user: str, subjects: Iterable[str]) -> set[str]:
    subjects = set(subjects)
    async with watching(server) as (witness, seen), guest(server, user) as client:
        for subject in subjects:
            await client.publish(subject, b"{}")
        await arrive(client)
        await witness.publish(LAST, b"")
        await until(lambda: LAST in seen, "the last message is seen")
        return seen & subjects


def new_bus(server: NatsProcess, user: str) -> NatsBus:
    url = url_of(server, user)
    return NatsBus(url, f"test-{user}", inbox=inbox_of(url), makes_streams=makes_streams(url))


@asynccontextmanager
async def bus_of(server: NatsProcess, user: str) -> AsyncIterator[NatsBus]:
    bus = new_bus(server, user)
    try:
        async with asyncio.timeout(WAIT_S):
            await bus.connect()
            yield bus
    finally:
        await bus.close()


def wanted(user: str) -> set[str]:
    return {SUBJECTS[kind] for kind in RIGHTS[user].publishes}


@users
async def test_a_user_publishes_what_is_declared_and_nothing_else(bus_server: NatsProcess, user: str) -> None:
    async with bus_of(bus_server, STREAMS_OWNER), guest(bus_server, user) as client:
        assert await let_through(bus_server, user, SUBJECTS.values()) == wanted(user)
        for subject in wanted(user):
            if not is_telemetry(".".join(subject.split(".")[3:5])):
                await client.jetstream(timeout=30).publish(subject, b"{}")


@users
async def test_a_user_subscribes_to_what_is_declared_and_nothing_else(bus_server: NatsProcess, user: str) -> None:
    others = [f"{inbox_of(f'nats://{other}@h')}.x" for other in USERS if other != user]
    received: set[tuple[str, str]] = set()
    filters = {f"{ROOT}.cmd.{kind}.*" if kind in COMMANDS else facts_of(kind): SUBJECTS[kind] for kind in PAYLOADS}
    wide = [*others, ">", "*.>", "_INBOX.>", "$JS.>", "$JS.API.>", "$JS.ACK.>", f"{ROOT}.>", f"{ROOT}.*.>"]
    declared = {
        (filter_, subject)
        for filter_, subject in filters.items()
        if any(matches(watched, subject) for watched in RIGHTS[user].watches)
    }
    async with watching(bus_server) as (witness, _), guest(bus_server, user) as client:
        for filter_ in [*filters, *wide]:

            async def listen(msg: Any, filter_: str = filter_) -> None:
                received.add((filter_, msg.subject))

            await client.subscribe(filter_, cb=listen)
        await arrive(client)
        for subject in (*SUBJECTS.values(), *others, "_INBOX.x", "$JS.API.x", "$JS.ACK.x"):
            await witness.publish(subject, b"{}")
        await arrive(witness)
        await arrive(client)  # the answer follows everything the server has for it
        await until(lambda: received >= declared, "the callbacks have run")
    assert received == declared


# Every call of nats-server's JetStream API, by what follows the verb.
OF_SERVER = (
    "INFO", "STREAM.LIST", "STREAM.NAMES", "STREAM.TEMPLATE.LIST", "ACCOUNT.PURGE.x", "ACCOUNT.STREAM.MOVE.x.y",
    "META.LEADER.STEPDOWN", "SERVER.REMOVE",
)  # fmt: skip
OF_STREAM = (
    "STREAM.CREATE", "STREAM.UPDATE", "STREAM.INFO", "STREAM.DELETE", "STREAM.PURGE", "STREAM.SNAPSHOT",
    "STREAM.RESTORE", "STREAM.MSG.GET", "STREAM.MSG.DELETE", "STREAM.LEADER.STEPDOWN", "STREAM.PEER.REMOVE",
    "DIRECT.GET", "CONSUMER.LIST", "CONSUMER.NAMES", "CONSUMER.CREATE",
)  # fmt: skip
OF_READER = (
    "CONSUMER.CREATE", "CONSUMER.DURABLE.CREATE", "CONSUMER.INFO", "CONSUMER.DELETE", "CONSUMER.PAUSE",
    "CONSUMER.RESET", "CONSUMER.UNPIN", "CONSUMER.LEADER.STEPDOWN", "CONSUMER.MSG.NEXT",
)  # fmt: skip
KEPT = [str(config.name) for config in stream_configs(1)]
READERS = [*(f"{user}{end}" for user in USERS for end in ("-commands", "-1-facts", "-1-commands")), *FILTERS, "mine"]
NARROW = sorted({f"{ROOT}.cmd.{user}.*.any" for user in USERS} | {of_event(kind) for kind in PAYLOADS} | {"glowplug.>"})


def calls() -> Iterator[tuple[str, str, str, str]]:
    """(verb, stream, reader, filter), "" where there is none."""
    yield from ((verb, "", "", "") for verb in OF_SERVER)
    for stream in (*KEPT, "OTHER"):
        yield from ((verb, stream, "", "") for verb in OF_STREAM)
        for reader in READERS:
            yield from ((verb, stream, reader, "") for verb in (*OF_READER, "ACK"))
            yield from (("CONSUMER.CREATE", stream, reader, only) for only in NARROW)


def subject_of(verb: str, stream: str, reader: str, only: str) -> str:
    if verb == "ACK":
        return f"$JS.ACK.{stream}.{reader}.1.1.1.1.0"
    return "$JS.API." + ".".join(part for part in (verb, stream, reader, only) if part)


def is_granted(user: str, verb: str, stream: str, reader: str, only: str) -> bool:
    """As the table says it."""
    rights = RIGHTS[user]
    if stream not in KEPT or not reader:
        looks, makes = rights.inspects, user == STREAMS_OWNER
        wants = {"STREAM.CREATE": makes, "STREAM.UPDATE": makes, "STREAM.INFO": not looks, "CONSUMER.LIST": looks}
        return (verb == "STREAM.LIST" and looks) or (stream in KEPT and wants.get(verb, False))
    alone = {f"{other}-commands": other for other, its in RIGHTS.items() if its.obeys and its.leads}
    if stream == COMMANDS_STREAM:
        may_use = rights.obeys and (reader == f"{user}-commands" if rights.leads else reader not in alone)
        may_make = may_use and matches(f"{ROOT}.cmd.{user}.>", only)
    else:
        followed = [filter_ for filter_ in rights.follows if stream_of(filter_) == stream]
        may_use = bool(followed)
        may_make = may_use and (only in followed if len(followed) == 1 else not only)
    return {"CONSUMER.CREATE": may_make, "CONSUMER.MSG.NEXT": may_use, "ACK": may_use}.get(verb, False)


@users
async def test_a_user_asks_of_jetstream_what_it_needs_and_no_more(bus_server: NatsProcess, user: str) -> None:
    """Each call of the API, on each stream, reader and filter."""
    assert set(KEPT) == set(STREAMS), "a new stream needs a row"
    granted = {subject_of(*call): is_granted(user, *call) for call in calls()}
    async with bus_of(bus_server, STREAMS_OWNER):
        assert await let_through(bus_server, user, granted) == {call for call, may in granted.items() if may}


@users
async def test_where_an_answer_goes_nothing_is_done(bus_server: NatsProcess, user: str) -> None:
    """The server does not check the subject that a user names for an answer: an acknowledgement of another's reader, a
    call that this user may not make, another's inbox and a command all get it, and none takes effect."""
    node, obeying, listener = name(), name(), Listener()
    async with (
        bus_of(bus_server, STREAMS_OWNER) as placer,
        watching(bus_server) as (witness, seen),
        guest(bus_server, user) as client,
    ):
        js, reader = witness.jetstream(timeout=30), f"agent-{node}"
        await js.add_consumer(COMMANDS_STREAM, consumer_config(reader, [commands_to("agent", node)]))
        sent = stop(node)
        await placer.publish(sent)
        [taken] = await (await js.pull_subscribe_bind(durable=reader, stream=COMMANDS_STREAM)).fetch(1, timeout=30)
        streams = {str(one.config.name) for one in await js.streams_info()}
        aims = [taken.reply, f"{ROOT}.cmd.agent.stop.{obeying}", *(f"{inbox_of(f'nats://{one}@h')}.x" for one in USERS)]
        aims += [subject_of(verb, stream, "", "") for verb in ("STREAM.DELETE", "STREAM.PURGE") for stream in KEPT]
        aims += [subject_of("CONSUMER.DELETE", COMMANDS_STREAM, reader, ""), "$JS.API.STREAM.CREATE.OTHER"]
        looks = ("STREAM.LIST", "") if RIGHTS[user].inspects else ("STREAM.INFO", FACTS_STREAM)
        asked = [subject_of(*looks, "", ""), *sorted(wanted(user))]
        for aim in aims:
            for subject in asked:
                await client.publish(subject, b"{}", reply=aim)
        await arrive(client)
        await until(lambda: f"{inbox_of('nats://reader@h')}.x" in seen, "the answers are sent")
        assert {str(one.config.name) for one in await js.streams_info()} == streams
        left = await js.consumer_info(COMMANDS_STREAM, reader)
        assert (left.num_ack_pending, left.num_pending) == (1, 0)
        assert (await js.get_msg(COMMANDS_STREAM, taken.metadata.sequence.stream)).data == taken.data
        async with bus_of(bus_server, "agent") as agent:
            last = stop(obeying)
            await agent.subscribe([commands_to("agent", obeying)], listener, durable=name())
            await placer.publish(last)
            assert await listener.listen(1) == [last]


@pytest.mark.parametrize("user", [user for user in USERS if user != READER])
async def test_every_service_reads_what_it_follows(bus_server: NatsProcess, user: str) -> None:
    rights, listener = RIGHTS[user], Listener()
    async with bus_of(bus_server, STREAMS_OWNER), bus_of(bus_server, user) as bus:
        if rights.watches:
            await bus.subscribe(rights.watches, listener)
        for stream in (FACTS_STREAM, USAGE_STREAM):
            if followed := [filter_ for filter_ in rights.follows if stream_of(filter_) == stream]:
                await bus.subscribe(followed, listener, durable=f"{user}-{name()}-facts")
        if rights.obeys:
            reader = f"{user}-commands" if rights.leads else name()
            await bus.subscribe([commands_to(user, "node-1")], listener, durable=reader)
        assert bus.connected


async def test_streams_are_made_by_one_user_and_waited_for_by_the_others(tmp_path: Path) -> None:
    with NatsProcess(tmp_path, PASSWORDS, nats_users()) as server:
        router = new_bus(server, "router")
        waiting = asyncio.create_task(router.connect())
        async with bus_of(server, STREAMS_OWNER):
            await asyncio.wait_for(waiting, WAIT_S)
        assert router.connected
        await router.close()


async def test_a_reader_that_another_user_changes_hears_again(
    bus_server: NatsProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Names of readers are not by user: a prefetcher's may put a filter of its own on an agent's."""
    monkeypatch.setattr(nats_bus, "RENEW_S", 0.2)
    monkeypatch.setattr(nats_bus, "FETCH_WAIT_S", 0.2)
    node, listener = name(), Listener()
    async with (
        bus_of(bus_server, STREAMS_OWNER) as placer,
        bus_of(bus_server, "agent") as agent,
        guest(bus_server, "prefetcher") as taken,
    ):
        await agent.subscribe([commands_to("agent", node)], listener, durable=node)
        await taken.jetstream(timeout=30).add_consumer(
            COMMANDS_STREAM, consumer_config(node, [commands_to("prefetcher", node)])
        )

        async def hears() -> bool:
            await placer.publish(stop(node))
            return bool(listener.received)

        await until(hears, "the agent hears its commands")


async def test_a_reply_sent_elsewhere_starts_nothing(bus_server: NatsProcess) -> None:
    """The server does not check a reader's right to publish on the subject it names for answers. A fact that contains a
    command keeps its own subject and reaches no agent."""
    node, listener = name(), Listener()
    evil = stop(node)
    onto = f"{ROOT}.cmd.agent.stop.{node}"
    async with (
        bus_of(bus_server, STREAMS_OWNER) as placer,
        bus_of(bus_server, "agent") as agent,
        guest(bus_server, "router") as taken,
    ):
        await agent.subscribe([commands_to("agent", node)], listener, durable=name())
        js, mine = taken.jetstream(timeout=30), name()
        await js.add_consumer(FACTS_STREAM, name=mine, durable_name=mine, deliver_policy="new")
        await js.publish(SUBJECTS["request.waiting"], encode(evil))
        await taken.publish(f"$JS.API.CONSUMER.MSG.NEXT.{FACTS_STREAM}.{mine}", b'{"batch":1}', reply=onto)
        pushed = {"deliver_subject": onto, "deliver_policy": "last", "ack_policy": "none"}
        await js.add_consumer(FACTS_STREAM, name=(reader := name()), durable_name=reader, **pushed)
        await arrive(taken)

        async def kept() -> bool:
            info = await js.stream_info(COMMANDS_STREAM, subjects_filter=SUBJECTS["request.waiting"])
            return bool(info.state.subjects)

        await until(kept, "it went where the answer was asked for")
        last = stop(node, "i-after")
        await placer.publish(last)
        assert await listener.listen(1) == [last]
        assert agent.counts.num_malformed == 0, "the server itself keeps it from the agent"


@pytest.fixture(scope="module")
def store_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ValkeyProcess]:
    folder = tmp_path_factory.mktemp("valkey")
    script = TREE / "deploy/k8s/base/valkey-users.sh"
    subprocess.run(["sh", str(script), str(folder / "users.acl")], env=PASSWORDS, check=True)
    assert (folder / "users.acl").stat().st_mode & 0o777 == 0o600
    with ValkeyProcess(folder, acl=str(folder / "users.acl")) as server:
        yield server


@users
async def test_a_user_writes_its_tables_and_reads_what_is_declared(store_server: ValkeyProcess, user: str) -> None:
    rights = RIGHTS[user]
    async with Redis.from_url(url_of(store_server, user)) as client:

        async def may(*words: str) -> bool:
            try:
                await client.execute_command(*words)
            except NoPermissionError:
                return False
            except ResponseError as error:
                assert "WRONGTYPE" in str(error), error
            return True

        for table in [*TABLES, "another"]:
            key, is_log = f"{PREFIX}:{table}", table in LOGS
            if is_log:
                reads, writes = [("LRANGE", key, "0", "9")], [("LPUSH", key, "{}"), ("LTRIM", key, "0", "9")]
            else:
                reads = [("HGET", key, "k"), ("HGETALL", key)]
                writes = [("HSET", key, "k", "{}"), ("HDEL", key, "k")]
            assert [await may(*words) for words in writes] == [table in rights.writes] * 2, table
            assert {await may(*words) for words in reads} == {table in (*rights.reads, *rights.writes)}, table
            if table not in rights.writes:
                for words in (("SET", key, "x"), ("DEL", key), ("PEXPIRE", key, "1"), ("HSET", key, "k", "{}")):
                    assert not await may(*words), words
        for other in USERS:
            mine = user == other and rights.has_epoch
            assert await may("SET", f"{PREFIX}:epoch:{other}", "1") == mine, other
            assert await may("HSET", f"{PREFIX}:lease:{other}", "holder", "x") == (mine and rights.leads), other
            if mine and rights.leads:
                await client.delete(f"{PREFIX}:lease:{other}")
        script = "return redis.call('hset', KEYS[1], 'k', '{}')"
        for table in (t for t in TABLES if t not in rights.writes):
            with pytest.raises(RedisError, match=r"(?i)permission"):
                await client.eval(script, 1, f"{PREFIX}:{table}")


@pytest.mark.parametrize("user", [*USERS, ""])
async def test_nobody_commands_the_server(store_server: ValkeyProcess, user: str) -> None:
    """Without a password a client may only ask whether the server lives. A writer may wait for a replica."""
    url = url_of(store_server, user) if user else store_server.url
    refused = """CONFIG GET *|CONFIG SET dir /|KEYS *|SCAN 0|FLUSHALL|FLUSHDB|ACL LIST|ACL SETUSER x|
        SHUTDOWN|SAVE|BGREWRITEAOF|MONITOR|CLIENT LIST|CLIENT KILL ID 1|RANDOMKEY|SWAPDB 0 1|REPLICAOF NO ONE|
        MODULE LIST|FUNCTION LIST|SCRIPT FLUSH|SUBSCRIBE x|PUBLISH x y|OBJECT ENCODING x|DUMP x|MIGRATE h 1 k 0 1|
        SLOWLOG GET|LATENCY LATEST|DBSIZE|COMMAND|RENAME a b|COPY a b|CLUSTER INFO|FAILOVER"""
    async with Redis.from_url(url) as client:
        assert await client.ping()
        more = ([] if user == READER else ["INFO"]) + ([] if user else ["GET x", "HGETALL x"])
        more += [] if user and RIGHTS[user].writes else ["WAIT 0 0"]
        for words in [*refused.split("|"), *more]:
            with pytest.raises(NoPermissionError):
                await client.execute_command(*words.split())
        with pytest.raises(ResponseError):
            await client.execute_command("DEBUG", "SLEEP", "0")


async def test_a_wrong_password_opens_nothing(store_server: ValkeyProcess) -> None:
    of_another = url_of(store_server, "placer").replace("of-placer", "of-agent")
    for url in (of_another, store_server.url.replace("//", "//root:x@")):
        async with Redis.from_url(url) as client:
            with pytest.raises(RedisError, match="password"):
                await client.hgetall(f"{PREFIX}:models")


@pytest.mark.parametrize("user", EPOCHS)
async def test_epochs_leases_and_fences_work_under_the_rules(store_server: ValkeyProcess, user: str) -> None:
    rights = RIGHTS[user]
    store, second = (RedisStore(url_of(store_server, user)) for _ in range(2))
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
    folder = "deploy/k8s/base"
    for name_, made in (("nats-users.conf", nats_document()), ("valkey-users.sh", valkey_document())):
        text = (TREE / folder / name_).read_text(encoding="utf-8")
        assert text == made, f"python -m glowplug.runtime.privileges {name_.split('-')[0]} > {folder}/{name_}"
