"""Start one router: the data port first, from the copy of the tables if need be, then bus and store beside it."""

import asyncio
import gc
import logging
import resource

from glowplug.controllers.router.controller import RouterController
from glowplug.controllers.router.reads import READS
from glowplug.runtime.identity import Identity
from glowplug.runtime.service import World, announce, listen, run, serve_rest
from glowplug.runtime.tasks import essential
from services.router.app import make
from services.router.conversation import open_lengths
from services.router.exchange import Exchange
from services.router.metrics import RouterMetrics
from services.router.port import DataPort
from services.router.reports import Outbox, Reports
from services.router.request_table import RequestTable
from services.router.settings import RouterSettings
from services.router.shell import RouterShell

log = logging.getLogger(__name__)
GC_EVERY_ALLOCATIONS = 20_000
SPARE_FILES = 256
AWAIT_BUS_S = 5.0  # longer, and the router serves what its tables say without the bus


async def serve(stopping: asyncio.Event) -> None:
    settings = RouterSettings()
    world = World.open("router", settings)
    raise_file_limit(settings.max_connections)
    controller = RouterController(settings.params())
    metrics = RouterMetrics(controller=controller, shell=world.metrics)
    outbox = Outbox(world.bus, settings.service_id, metrics, settings.outbox_limit)
    table = RequestTable[Exchange](controller, outbox.publish)
    reports = Reports(settings.service_id, table, metrics, outbox.put, settings.requests_kept)
    port = DataPort(
        table,
        metrics,
        reports.finished,
        settings.limits(),
        api_key=settings.api_key,
        rules=settings.web_rules(),
        tracing=world.tracing,
        sampler=settings.sampler(),
        passed_fields=settings.passed,
        engine_secret=settings.engine_secret,
        lengths=open_lengths(settings.length_model) if controller.tracks_tokens else None,
    )
    shell = RouterShell(world, settings, table)
    shell.take_copy()
    if not table.table_loaded:  # nothing can be warm yet: the first request needs the bus
        table.await_bus(AWAIT_BUS_S)
    sock = listen(settings.host, settings.data_port, reuse_port=settings.reuse_port)
    server, url = await serve_rest(make(settings, table, reports), settings)
    await port.serve(sock)
    data_url = f"{url.rpartition(':')[0]}:{sock.getsockname()[1]}"
    await shell.start()
    beside = [
        essential(asyncio.create_task(job, name=name), stopping)
        for name, job in (
            ("the outbox", outbox.run()),
            ("reporting loads", reports.report_loads(settings.load_soonest_s, settings.load_every_s)),
            (
                "reporting requests",
                reports.report_requests(settings.requests_every_s, settings.requests_reported),
            ),
            ("following the fleet", _follow(world, shell, table, url, data_url)),
        )
    ]
    settle_memory()
    log.info("data port at http://%s:%d, admin at %s", settings.host, sock.getsockname()[1], url)
    await stopping.wait()
    log.info("leaving in %g s, %d requests here", settings.drain_delay_s, len(table.exchanges))
    await port.leave(settings.drain_delay_s)
    await port.drain(settings.drain_s, keep_listening=not (settings.reuse_port or settings.drain_delay_s))
    await shell.stop()
    await world.close(*beside, server)
    for job in beside:
        if not job.cancelled() and (error := job.exception()) is not None:
            raise error  # so that the exit status says that this was a failure


def raise_file_limit(num_connections: int) -> None:
    """Two descriptors per connection (client and engine) and some: the soft limit of a shell is often 1024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 2 * num_connections + SPARE_FILES
    if soft != resource.RLIM_INFINITY and soft < wanted:
        allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
        if allowed < wanted:
            log.warning(
                "only %d open files are allowed; %d connections would want %d", allowed, num_connections, wanted
            )


def settle_memory() -> None:
    """What has been imported stays: the collector need not walk it. Requests leave by reference counts, so it may run
    seldom."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(GC_EVERY_ALLOCATIONS, 10, 20)


async def _follow(world: World, shell: RouterShell, table: RequestTable[Exchange], url: str, data_url: str) -> None:
    """Connect to the bus, however long that takes, and follow the fleet."""
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
