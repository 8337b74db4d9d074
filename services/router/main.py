"""Start one router: the data port first, perhaps from the tables' copy on disk, then the bus and the store."""

import asyncio
import gc
import logging
import resource
import time
from typing import Any

from fastapi import APIRouter, Depends, FastAPI, Query

from glowplug.controllers.router.controller import RouterController
from glowplug.controllers.router.reads import READS
from glowplug.domain.access import ApiKey, Role, find_key
from glowplug.runtime.identity import Identity
from glowplug.runtime.rest import admin, make_app
from glowplug.runtime.service import World, announce, listen, run, serve_rest
from glowplug.runtime.tasks import essential
from glowplug.services.router.batches.service import Batches
from glowplug.services.router.conversation import TextReader, open_lengths
from glowplug.services.router.exchange import Exchange
from glowplug.services.router.limits import LimitsCopy
from glowplug.services.router.metrics import RouterMetrics
from glowplug.services.router.port import DataPort
from glowplug.services.router.reports import Outbox, Reports
from glowplug.services.router.request_table import RequestTable
from glowplug.services.router.settings import RouterSettings
from glowplug.services.router.shell import RouterShell
from glowplug.services.router.usage import open_usage

# The router's REST API: its queues, its live requests and the last finished ones.


def make(settings: RouterSettings, table: RequestTable[Exchange], reports: Reports) -> FastAPI:
    app = make_app(
        "router",
        settings.service_id,
        ready=table.not_ready,
        policies=lambda: {"routing": settings.policy_routing, "fairness": settings.policy_fairness},
        description="The queue and the requests of one router. The OpenAI API is on the data port.",
    )

    async def find(presented: str) -> ApiKey | None:
        return find_key(table.keys.rows, presented, time.time())

    viewers = Depends(admin(settings.admin_token, least=Role.VIEWER, find=find))
    routes = APIRouter(prefix="/v1", tags=["requests"], dependencies=[viewers])

    @routes.get("/queue")
    async def queue() -> dict[str, Any]:
        """Depth of each model's queue, and when its next request should be dispatched."""
        return {"object": "list", "data": [_queue_row(table, key) for key in sorted(table.controller.fleet.models)]}

    @routes.get("/requests")
    async def requests(limit: int = Query(200, ge=1, le=10_000)) -> dict[str, Any]:
        """Live requests, oldest first, then those that finished or were refused, newest first. No prompts."""
        return {"object": "list", "data": reports.rows(limit)}

    app.include_router(routes)
    return app


def _queue_row(table: RequestTable[Exchange], key: str) -> dict[str, Any]:
    controller = table.controller
    model, load = controller.fleet.models[key], controller.load(key)
    queue = controller.queues.get(key)
    oldest = queue.oldest() if queue else None
    return {
        "model": model.name,
        "model_key": key,
        "state": controller.fleet.temperature(key).value,
        "num_waiting": load.num_waiting,
        "num_in_flight": load.num_in_flight,
        "max_queue": model.max_queue,
        "max_wait_s": model.max_wait_s,
        "oldest_waiting_s": table.clock() - oldest.arrived_at if oldest else 0.0,
        "eta_s": table.eta_s(key),
        "in_flight_by_instance": load.in_flight_by_instance,
    }


log = logging.getLogger(__name__)
GC_EVERY_ALLOCATIONS = 20_000
SPARE_FILES = 256
AWAIT_BUS_S = 5.0  # later the router serves without the bus


async def serve(stopping: asyncio.Event) -> None:
    settings = RouterSettings.read()
    world = World.open("router", settings)
    raise_file_limit(settings.limits.max_connections)
    controller = RouterController(settings.controller_params())
    metrics = RouterMetrics(controller=controller, shell=world.metrics)
    outbox = Outbox(world.bus, settings.service_id, metrics)
    table = RequestTable[Exchange](controller, outbox.publish)
    usage, sender = open_usage(settings, world.bus, metrics)
    reports = Reports(settings.service_id, table, metrics, outbox.put, settings.requests_kept, usage)
    lengths = open_lengths(settings.length_model) if controller.tracks_tokens else None
    texts = TextReader(lengths, table) if lengths is not None else None
    port = DataPort(
        table,
        metrics,
        reports.finished,
        reports.refusals.take,
        settings.limits,
        api_key=settings.api_key,
        rules=settings.web_rules(),
        sampler=settings.sampler(),
        strict_fields=settings.strict_fields,
        console_url=settings.console_url,
        engine_secret=settings.engine_secret,
        texts=texts,
        journal=sender.journal,
    )
    shell = RouterShell(world, settings, table)
    batches = Batches.open(world, settings, port, shell)
    shell.take_copy()
    limits_copy = LimitsCopy(settings.state_dir / settings.service_id / "limits.json")
    limits_copy.read(table.limits.limiter, table.clock())
    if not table.table_loaded:  # nothing can be warm yet
        table.await_bus(AWAIT_BUS_S)
    sock = listen(settings.host, settings.data_port, reuse_port=settings.reuse_port)
    server, url = await serve_rest(make(settings, table, reports), settings)
    await port.serve(sock)
    data_url = f"{url.rpartition(':')[0]}:{sock.getsockname()[1]}"
    await shell.start()
    if batches is not None:
        batches.start(url, stopping)
    beside = [
        essential(asyncio.create_task(job, name=name), stopping)
        for name, job in (
            ("the outbox", outbox.run()),
            ("reporting loads", reports.report_loads(texts)),
            ("reporting requests", reports.report_requests()),
            ("reporting limits", table.limits.report(outbox.put, table.keys.has_limits, limits_copy)),
            ("sending usage", sender.run()),
            ("following the fleet", _follow(world, shell, table, url, data_url)),
        )
    ]
    settle_memory()
    log.info("the data port listens at http://%s:%d, admin at %s", settings.host, sock.getsockname()[1], url)
    await stopping.wait()
    log.info("the router stops: it drains in %g s, with %d requests", settings.drain_delay_s, len(table.exchanges))
    if batches is not None:
        await batches.stop()
    await port.leave(settings.drain_delay_s)
    await port.drain(settings.drain_s, keep_listening=not (settings.reuse_port or settings.drain_delay_s))
    reports.report_ended()
    await limits_copy.write(table.limits.limiter, table.clock())
    await shell.stop()
    await sender.finish()
    await world.close(*beside, server)


def raise_file_limit(num_connections: int) -> None:
    """Allow two open files per connection (client and engine) and spare ones; a shell's soft limit is often 1024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 2 * num_connections + SPARE_FILES
    if soft != resource.RLIM_INFINITY and soft < wanted:
        allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
        if allowed < wanted:
            log.warning("the system allows %d open files, but %d connections need %d", allowed, num_connections, wanted)


def settle_memory() -> None:
    """Exclude imports from garbage collection, and collect seldom: reference counts free requests."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(GC_EVERY_ALLOCATIONS, 10, 20)


async def _follow(world: World, shell: RouterShell, table: RequestTable[Exchange], url: str, data_url: str) -> None:
    identity = Identity(world.store, world.settings.service_id, url)
    await identity.claim()
    await world.bus.connect()
    await world.bus.subscribe(READS.telemetry_filters(), shell.on_event)
    await world.bus.subscribe(READS.fact_filters(), shell.on_event, durable=f"{world.settings.service_id}-facts")
    table.bus_reached()
    await announce(shell, url, data_url)
    await identity.watch()


def main() -> None:
    run(serve)
