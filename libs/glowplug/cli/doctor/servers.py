"""Do bus and store answer, and would their data survive a crash? `ask_store` and `ask_bus` read, `check` functions
judge."""

import asyncio
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar, cast

import httpx
import nats
from nats.aio.client import Client
from nats.errors import Error as NatsError
from nats.js.api import PeerInfo, StorageType, StreamConfig, StreamInfo
from redis.asyncio import Redis
from redis.exceptions import RedisError, ResponseError

from glowplug.bus.streams import stream_configs
from glowplug.cli.doctor.findings import Finding, Findings
from glowplug.controllers.autoscaler.learned import SCALING_LEARNED, LearnedRow
from glowplug.controllers.fencing import LEADERS
from glowplug.controllers.operator import CORDONS, Cordon
from glowplug.domain.decision import DecisionRecord
from glowplug.domain.hardware import Node
from glowplug.domain.instance import Instance
from glowplug.domain.lease import Leader
from glowplug.domain.model import Model
from glowplug.domain.units import show_bytes
from glowplug.fleet.start_times import START_TIMES, StartRow
from glowplug.runtime.identity import PROCESSES, ServiceHolder
from glowplug.runtime.privileges import RIGHTS, inbox_of, user_of
from glowplug.runtime.shell import DECISIONS_KEPT, DECISIONS_LOG
from glowplug.runtime.supervisor.embedded import ACL_FILE, FSYNC
from glowplug.state.address import connect
from glowplug.state.keys import PREFIX
from glowplug.state.redis_store import table_row
from glowplug.state.rows import read_rows, shown

T = TypeVar("T")
ANSWER_S = 4.0
EPOCH_DIGITS = 16  # below 2^53, see state/redis_store.py
LOST = (OSError, TimeoutError, NatsError, asyncio.IncompleteReadError)
SILENT = "it accepted the connection and sent nothing"
FULL_RATIO = 0.9
MANY_EVENTS = 1000
_F = Findings("fleet")


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreFacts:
    """Redis or Valkey. `error`: why it did not answer; `unknown`: why it was not asked."""

    unknown: str = ""
    error: str = ""
    info: Mapping[str, Any] = field(default_factory=dict)
    fsync: str = ""
    epochs: Mapping[str, int] = field(default_factory=dict)
    models: Mapping[str, Model] = field(default_factory=dict)
    instances: Mapping[str, Instance] = field(default_factory=dict)
    nodes: Mapping[str, Node] = field(default_factory=dict)
    unreadable: tuple[str, ...] = ()
    is_shared: bool = False  # services use one credential, or none


@dataclass(frozen=True, slots=True, kw_only=True)
class BusFacts:
    """NATS. `sync`: JetStream's sync_interval, `storing`: why it stores nothing; "" if unreadable."""

    unknown: str = ""
    error: str = ""
    version: str = ""
    cluster_size: int = 1
    sync: str = ""
    storing: str = ""
    streams: tuple[tuple[StreamConfig, StreamInfo | None], ...] = ()  # as wanted, and as on the server
    backlog: Mapping[str, int] = field(default_factory=dict)  # durable reader -> pending events
    is_shared: bool = False  # services use one credential, or none


def check_store(store: StoreFacts) -> Iterator[Finding]:
    if store.unknown:
        yield _F.skipped("store", store.unknown, "set GLOWPLUG_REDIS_URL")
        return
    if store.error:
        do = "start it: warm models are served meanwhile, nothing new is placed"
        yield _F.fail("store", f"Redis does not answer: {store.error}", do)
        return
    info = store.info
    if info.get("role") in ("slave", "replica"):
        yield _F.fail("store", "the address is that of a replica, which takes no writes", "name the primary")
    server = "Valkey" if info.get("server_name") == "valkey" else "Redis"
    version = info.get("valkey_version") or info.get("redis_version", "")
    yield _F.ok("store", f"{server} {version}".strip() + " answers")
    if store.is_shared:
        says = "its address has no user for this service alone: a compromised service may write every table"
        yield _F.warn("store rights", says, "create a user per service: docs/network.md")
    yield _persistence(store)
    used_bytes, max_bytes = int(info.get("used_memory", 0)), int(info.get("maxmemory", 0))
    policy = info.get("maxmemory_policy", "")
    if max_bytes and used_bytes > FULL_RATIO * max_bytes:
        says = f"{show_bytes(used_bytes)} of {show_bytes(max_bytes)} used"
        yield _F.fail("store memory", says, "raise maxmemory; is something else keeping keys there?")
    elif max_bytes and policy not in ("", "noeviction"):
        says = f"maxmemory-policy is {policy}: a full server would evict tables"
        yield _F.fail("store memory", says, "set maxmemory-policy noeviction")
    else:
        limit = f" of {show_bytes(max_bytes)}" if max_bytes else ", without a limit"
        yield _F.ok("store memory", f"{show_bytes(used_bytes)}{limit}")


def _persistence(store: StoreFacts) -> Finding:
    if "aof_enabled" not in store.info:
        return _F.skipped("store on disk", "this server does not tell how it persists", "ask its operator for AOF")
    if not int(store.info["aof_enabled"]):
        says = "no append-only file: a restart forgets pins, drains and models deployed over REST"
        return _F.warn("store on disk", says, "set appendonly yes and appendfsync everysec")
    for name in ("aof_last_write_status", "aof_last_bgrewrite_status"):
        if (status := store.info.get(name, "ok")) != "ok":
            says = f"{name} is {status}: it cannot write its append-only file"
            return _F.fail("store on disk", says, "is its disk full? its log says")
    if store.fsync == "no":
        return _F.warn("store on disk", "appendfsync no: a power cut loses half a minute", "set appendfsync everysec")
    return _F.ok("store on disk", f"append-only file, fsync {store.fsync or 'unknown'}")


def check_bus(bus: BusFacts) -> Iterator[Finding]:
    if bus.unknown:
        yield _F.skipped("bus", bus.unknown, "set GLOWPLUG_NATS_URL")
        return
    if bus.error:
        do = "start it: warm models are served meanwhile, cold ones wait"
        yield _F.fail("bus", f"NATS does not answer: {bus.error}", do)
        return
    yield _F.ok("bus", f"NATS {bus.version} answers, {bus.cluster_size} server(s)")
    if bus.is_shared:
        says = "its address has no user for this service alone: a compromised service may publish every command"
        yield _F.warn("bus rights", says, "create a user per service: docs/network.md")
    if bus.sync == "":
        says = "its sync_interval cannot be seen from here"
        yield _F.skipped("bus on disk", says, "jetstream { sync_interval: always }")
    elif bus.sync == "always":
        yield _F.ok("bus on disk", "synced on every write")
    else:
        says = f"sync_interval is {bus.sync}: a power cut loses events acknowledged since"
        yield _F.warn("bus on disk", says, "set jetstream { sync_interval: always }")
    if bus.storing:
        do = "free space on its disk; then restart it, which `glowplug up` does itself"
        yield _F.fail("bus storage", f"NATS answers but stores no events: {bus.storing}", do)
    for wanted, info in bus.streams:
        yield _stream(wanted, info, bus.cluster_size)
    late = {name: num for name, num in bus.backlog.items() if num > MANY_EVENTS}
    for name, num in sorted(late.items()):
        yield _F.warn("bus", f"{name} is {num} events behind", f"is its process alive? glowplug logs {name}")


def _stream(wanted: StreamConfig, info: StreamInfo | None, cluster_size: int) -> Finding:
    name = str(wanted.name)
    about = f"stream {name.removeprefix('GLOWPLUG_').lower()}"
    if info is None:
        return _F.fail(about, "is not there", "any service creates it when it connects: restart one")
    config, age_s, wanted_age_s = info.config, float(info.config.max_age or 0), float(wanted.max_age or 0)
    replicas, current = config.num_replicas or 1, 1 + sum(bool(peer.current) for peer in _peers(info))
    if config.storage != StorageType.FILE:
        return _F.fail(about, "is kept in memory: a restart forgets it", "delete it; services recreate it on file")
    if current < replicas:
        says = f"{current} of {replicas} replicas are current"
        return _F.fail(about, says, f"is every server of the NATS cluster up? nats stream info {name}")
    if cluster_size >= 3 and replicas < 3:
        says = f"{replicas} replica(s) in a cluster of {cluster_size}"
        return _F.warn(about, says, "set GLOWPLUG_NATS_REPLICAS=3 for every service and restart them")
    if abs(age_s - wanted_age_s) > 1:
        says = f"keeps events for {age_s:g} s, not {wanted_age_s:g} s"
        return _F.warn(about, says, f"made by another version? nats stream edit {name}")
    kept = f"{show_bytes(info.state.bytes)} of {show_bytes(config.max_bytes or 0)}"
    return _F.ok(about, f"{replicas} replica(s), keeps {age_s:g} s, {kept}")


def _peers(info: StreamInfo) -> list[PeerInfo]:
    return info.cluster.replicas or [] if info.cluster else []


async def ask_store(url: str, state_dir: str) -> StoreFacts:
    if not url:
        return StoreFacts(unknown="no address of the store is known here")
    client: Redis | None = None
    try:
        client = connect(url, socket_timeout=ANSWER_S, socket_connect_timeout=ANSWER_S)
        async with asyncio.timeout(4 * ANSWER_S):
            found = await _store(client)
            return replace(found, fsync=found.fsync or _fsync(state_dir), is_shared=not user_of(url))
    except (RedisError, OSError, TimeoutError, ValueError, asyncio.IncompleteReadError) as error:
        return StoreFacts(error=str(error) or SILENT)
    finally:
        if client is not None:
            await client.aclose()


async def _store(client: Redis) -> StoreFacts:
    unreadable: list[str] = []
    others: dict[str, type[Any]] = {
        LEADERS: Leader, CORDONS: Cordon, PROCESSES: ServiceHolder, START_TIMES: StartRow, SCALING_LEARNED: LearnedRow,
    }  # fmt: skip
    for table, cls in others.items():
        await _table(client, table, cls, unreadable)
    await _log(client, unreadable)
    return StoreFacts(
        info=cast(Mapping[str, Any], await client.info()),
        fsync=(await _config(client)).get("appendfsync", ""),
        epochs=await _epochs(client, unreadable),
        models=await _table(client, "models", Model, unreadable),
        instances=await _table(client, "instances", Instance, unreadable),
        nodes=await _table(client, "nodes", Node, unreadable),
        unreadable=tuple(unreadable),
    )


async def _config(client: Redis) -> dict[str, str]:
    """Managed servers refuse CONFIG, and so does ours to readers."""
    try:
        return cast(dict[str, str], await client.config_get("appendfsync"))
    except RedisError:
        return {}


def _fsync(state_dir: str) -> str:
    return FSYNC if state_dir and (Path(state_dir) / "valkey" / ACL_FILE).exists() else ""


async def _epochs(client: Redis, unreadable: list[str]) -> dict[str, int]:
    found = {}
    for name in (name for name, rights in RIGHTS.items() if rights.has_epoch):
        try:
            raw = await client.get(f"{PREFIX}:epoch:{name}")
        except ResponseError as error:
            unreadable.append(f"epoch:{name} cannot be read: {error}")
            continue
        if raw is not None and raw.isdigit() and len(raw) <= EPOCH_DIGITS:
            found[name] = int(raw)
        elif raw is not None:
            unreadable.append(f"epoch:{name} is not an epoch: {raw[:40]!r}")
    return found


async def _table(client: Redis, table: str, cls: type[T], unreadable: list[str]) -> dict[str, T]:
    try:
        raw = await cast(Any, client.hgetall(f"{PREFIX}:{table}"))
    except ResponseError as error:
        unreadable.append(f"{table} is not a table: {error}")
        return {}
    rows, problems = read_rows(table, dict(table_row(key, value) for key, value in raw.items()), cls)
    unreadable += [f"{table}/{shown(key)} cannot be read: {problem}" for key, problem in problems.items()]
    return rows


async def _log(client: Redis, unreadable: list[str]) -> None:
    try:
        raw = await cast(Any, client.lrange(f"{PREFIX}:{DECISIONS_LOG}", 0, DECISIONS_KEPT - 1))
    except ResponseError as error:
        unreadable.append(f"{DECISIONS_LOG} is not a log: {error}")
        return
    _, problems = read_rows(DECISIONS_LOG, {str(place): row for place, row in enumerate(raw)}, DecisionRecord)
    if problems:
        first = next(iter(problems))
        unreadable.append(f"{len(problems)} row(s) of {DECISIONS_LOG} cannot be read; {first}: {problems[first]}")


async def ask_bus(url: str, state_dir: str) -> BusFacts:
    if not url:
        return BusFacts(unknown="no address of the bus is known here")
    client: Client | None = None
    try:
        async with asyncio.timeout(4 * ANSWER_S):
            client = await nats.connect(
                url.split(","),
                name="doctor",
                connect_timeout=3,
                allow_reconnect=False,
                error_cb=_quiet,
                max_reconnect_attempts=0,
                inbox_prefix=inbox_of(url),
            )
            return replace(await _bus(client, *await _monitor(state_dir)), is_shared=not user_of(url))
    except LOST as error:
        return BusFacts(error=str(error) or SILENT)
    finally:
        if client is not None and client.is_connected:
            await client.close()


async def _quiet(_: Exception) -> None:
    """Ignore: its message returns as a finding."""


async def _bus(client: Client, sync: str, storing: str) -> BusFacts:
    context = client.jetstream(timeout=ANSWER_S)
    known: dict[str | None, StreamInfo] = {}
    while page := await context.streams_info(offset=len(known)):
        known |= {info.config.name: info for info in page}
    streams = [(wanted, known.get(wanted.name)) for wanted in stream_configs(1)]
    there = [info for _, info in streams if info]
    backlog: dict[str, int] = {}
    for info in there:
        for consumer in await context.consumers_info(str(info.config.name)):
            backlog[consumer.name or "?"] = consumer.num_pending or 0
    version = client.connected_server_version
    return BusFacts(
        version=f"{version.major}.{version.minor}.{version.patch}",
        cluster_size=max([len(client.servers), *(info.config.num_replicas or 1 for info in there)]),
        sync=sync,
        storing=storing,
        streams=tuple(streams),
        backlog=backlog,
    )


async def _monitor(state_dir: str) -> tuple[str, str]:
    """Return (sync_interval, why it stores nothing) of a local fleet's server, from its monitoring port; two ""
    elsewhere."""
    for file in sorted((Path(state_dir) / "nats").glob("nats-server_*.ports")) if state_dir else ():
        try:
            url = json.loads(file.read_text())["monitoring"][0]
            async with httpx.AsyncClient(timeout=ANSWER_S, trust_env=False) as http:
                config = (await http.get(f"{url}/varz")).json()["jetstream"]["config"]
                health = (await http.get(f"{url}/healthz")).json()
            sync = "always" if config.get("sync_always") else f"{config.get('sync_interval', 0) / 1e9:g} s"
            return sync, str(health.get("error", ""))
        except (OSError, ValueError, LookupError, TypeError, AttributeError, httpx.HTTPError):
            continue
    return "", ""
