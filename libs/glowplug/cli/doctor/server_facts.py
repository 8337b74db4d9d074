"""Asking Redis and NATS themselves. Reads only."""

import asyncio
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar, cast

import httpx
import nats
from nats.aio.client import Client
from nats.errors import Error as NatsError
from nats.js import JetStreamContext
from nats.js.api import StorageType, StreamConfig
from nats.js.errors import NotFoundError
from redis.asyncio import Redis
from redis.exceptions import RedisError, ResponseError

from glowplug.bus.streams import stream_configs
from glowplug.cli.doctor.fleet import BusFacts, StoreFacts, StreamFacts
from glowplug.controllers.fencing import LEADERS
from glowplug.controllers.placer.controller import CORDONS, Cordon
from glowplug.domain.decision import DecisionRecord
from glowplug.domain.hardware import Node
from glowplug.domain.instance import Instance
from glowplug.domain.lease import Leader
from glowplug.domain.model import Model
from glowplug.policies.start_times import START_TIMES, StartRow
from glowplug.runtime.identity import PROCESSES, Holder
from glowplug.runtime.privileges import RIGHTS, inbox_of, user_of
from glowplug.runtime.shell import DECISIONS_KEPT, DECISIONS_LOG
from glowplug.runtime.supervisor.embedded import ACL_FILE, FSYNC
from glowplug.state.redis_store import PREFIX, table_row
from glowplug.state.rows import read_rows, shown

T = TypeVar("T")
ANSWER_S = 4.0
EPOCH_DIGITS = 16  # below 2^53, see state/redis_store.py
LOST = (OSError, TimeoutError, NatsError, asyncio.IncompleteReadError)


async def ask_store(url: str, state_dir: str) -> StoreFacts:
    """How it persists, and every table. `state_dir` of a local fleet tells how its server syncs."""
    if not url:
        return StoreFacts(unknown="no address of the store is known here")
    client: Redis | None = None
    try:
        client = Redis.from_url(url, socket_timeout=ANSWER_S, socket_connect_timeout=ANSWER_S)
        async with asyncio.timeout(4 * ANSWER_S):
            found = await _store(client)
            return replace(found, fsync=found.fsync or _fsync(state_dir), is_shared=not user_of(url))
    except (RedisError, OSError, TimeoutError, ValueError, asyncio.IncompleteReadError) as error:
        return StoreFacts(error=str(error) or "it took the connection and said nothing")
    finally:
        if client is not None:
            await client.aclose()


async def _store(client: Redis) -> StoreFacts:
    info = cast(Mapping[str, Any], await client.info())
    config = await _config(client)
    unreadable: list[str] = []
    others: dict[str, type[Any]] = {LEADERS: Leader, CORDONS: Cordon, PROCESSES: Holder, START_TIMES: StartRow}
    for table, cls in others.items():
        await _table(client, table, cls, unreadable)
    await _log(client, unreadable)
    server = "Valkey" if info.get("server_name") == "valkey" else "Redis"
    return StoreFacts(
        version=f"{server} {info.get('valkey_version') or info.get('redis_version', '')}".strip(),
        role=str(info.get("role", "")),
        append_only=bool(int(info["aof_enabled"])) if "aof_enabled" in info else None,
        fsync=config.get("appendfsync", ""),
        aof_problem=_aof_problem(info),
        used_bytes=int(info.get("used_memory", 0)),
        max_bytes=int(info.get("maxmemory", 0)),
        policy=str(info.get("maxmemory_policy", "")),
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


def _aof_problem(info: Mapping[str, Any]) -> str:
    bad = [name for name in ("aof_last_write_status", "aof_last_bgrewrite_status") if info.get(name, "ok") != "ok"]
    return f"{bad[0]} is {info[bad[0]]}: it cannot write its append-only file" if bad else ""


def _fsync(state_dir: str) -> str:
    """appendfsync as the server that a local fleet starts has it, "" elsewhere."""
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
            unreadable.append(f"epoch:{name} is no epoch: {raw[:40]!r}")
    return found


async def _table(client: Redis, table: str, cls: type[T], unreadable: list[str]) -> dict[str, T]:
    """Rows that can be read; `unreadable` gets a line for each other one."""
    try:
        raw = await cast(Any, client.hgetall(f"{PREFIX}:{table}"))
    except ResponseError as error:
        unreadable.append(f"{table} is no table: {error}")
        return {}
    rows, problems = read_rows(table, dict(table_row(key, value) for key, value in raw.items()), cls)
    unreadable += [f"{table}/{shown(key)} cannot be read: {problem}" for key, problem in problems.items()]
    return rows


async def _log(client: Redis, unreadable: list[str]) -> None:
    """The log of decisions: rows of it that cannot be read, as one line."""
    try:
        raw = await cast(Any, client.lrange(f"{PREFIX}:{DECISIONS_LOG}", 0, DECISIONS_KEPT - 1))
    except ResponseError as error:
        unreadable.append(f"{DECISIONS_LOG} is no log: {error}")
        return
    _, problems = read_rows(DECISIONS_LOG, {str(place): row for place, row in enumerate(raw)}, DecisionRecord)
    if problems:
        first = next(iter(problems))
        unreadable.append(f"{len(problems)} row(s) of {DECISIONS_LOG} cannot be read; {first}: {problems[first]}")


async def ask_bus(url: str, state_dir: str) -> BusFacts:
    """Its streams and readers. `state_dir` of a local fleet tells how it syncs."""
    if not url:
        return BusFacts(unknown="no address of the bus is known here")
    client: Client | None = None
    try:
        async with asyncio.timeout(4 * ANSWER_S):
            client = await nats.connect(
                url,
                name="doctor",
                connect_timeout=3,
                allow_reconnect=False,
                error_cb=_quiet,
                max_reconnect_attempts=0,
                inbox_prefix=inbox_of(url),
            )
            return replace(await _bus(client, *await _monitor(state_dir)), is_shared=not user_of(url))
    except LOST as error:
        return BusFacts(error=str(error) or "it took the connection and said nothing")
    finally:
        if client is not None and client.is_connected:
            await client.close()


async def _quiet(_: Exception) -> None:
    """What it would print is returned as a finding."""


async def _bus(client: Client, sync: str, storing: str) -> BusFacts:
    context = client.jetstream(timeout=ANSWER_S)
    streams = [await _stream(context, wanted) for wanted in stream_configs(1)]
    backlog: dict[str, int] = {}
    for stream in streams:
        if not stream.problem:
            for consumer in await context.consumers_info(stream.name):
                backlog[consumer.name or "?"] = consumer.num_pending or 0
    version = client.connected_server_version
    return BusFacts(
        version=f"{version.major}.{version.minor}.{version.patch}",
        cluster_size=max(len(client.servers), *(stream.replicas for stream in streams)),
        sync=sync,
        storing=storing,
        streams=tuple(streams),
        backlog=backlog,
    )


async def _stream(context: JetStreamContext, wanted: StreamConfig) -> StreamFacts:
    name, wanted_age_s = str(wanted.name), float(wanted.max_age or 0)
    try:
        info = await context.stream_info(name)
    except NotFoundError:
        return StreamFacts(name=name, problem="is not there", wanted_age_s=wanted_age_s)
    config, peers = info.config, (info.cluster.replicas if info.cluster and info.cluster.replicas else [])
    return StreamFacts(
        name=name,
        on_file=config.storage == StorageType.FILE,
        replicas=config.num_replicas or 1,
        replicas_current=1 + sum(bool(peer.current) for peer in peers),
        max_age_s=float(config.max_age or 0),
        wanted_age_s=wanted_age_s,
        num_bytes=info.state.bytes,
        max_bytes=config.max_bytes or 0,
    )


async def _monitor(state_dir: str) -> tuple[str, str]:
    """(sync_interval, why it stores nothing) of the server a local fleet brought along, from its monitoring port; two
    "" elsewhere."""
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
