"""Start the prefetcher of one node."""

import asyncio
import contextlib
import logging
from dataclasses import dataclass, replace
from typing import Any

from glowplug.controllers.prefetcher.controller import PrefetcherController
from glowplug.controllers.prefetcher.messages import Measured, RegionsFound
from glowplug.controllers.prefetcher.params import IMPORTANCE
from glowplug.controllers.prefetcher.reads import reads_of
from glowplug.domain.errors import NoSpace
from glowplug.domain.hardware import CachedWeights
from glowplug.runtime.clock import CLOCK
from glowplug.runtime.control import ControlService
from glowplug.runtime.service import World, run
from glowplug.runtime.shell import Shell
from glowplug.services.prefetcher.app import make
from glowplug.services.prefetcher.fetcher import Fetcher
from glowplug.services.prefetcher.metrics import PrefetcherMetrics
from glowplug.services.prefetcher.settings import PrefetcherSettings
from glowplug.weights.disk import DiskCopies
from glowplug.weights.inventory import DiskContent, read_inventory, write_disk
from glowplug.weights.region import Region, region_digest
from glowplug.weights.sources import load_libraries

log = logging.getLogger(__name__)

REPORT_S = 0.5


@dataclass(frozen=True)
class Disk:
    """`copies`: None without a disk tier, or (`trouble`) if it is unusable."""

    copies: DiskCopies | None = None
    whole: tuple[CachedWeights, ...] = ()
    capacity_bytes: int = 0
    trouble: str = ""


def found_disk(settings: PrefetcherSettings) -> Disk:
    """Adopt copies of an earlier process; remove incomplete ones."""
    if not settings.disk_cache_bytes:
        return Disk()
    copies = DiskCopies(settings.disk_dir, settings.node_id)
    try:
        whole = copies.found()
        capacity_bytes = settings.disk_capacity_bytes(sum(copy.num_bytes for copy in whole))
    except OSError as error:
        trouble = f"cannot keep weights in GLOWPLUG_DISK_CACHE_DIR={settings.disk_dir}: {error.strerror or error}"
        log.warning("the prefetcher keeps no weights on disk: %s", trouble)
        return Disk(trouble=trouble)
    return Disk(copies, whole, capacity_bytes, "" if capacity_bytes else f"no space is free at {settings.disk_dir}")


def found_regions(settings: PrefetcherSettings, disk: Disk = Disk()) -> RegionsFound:
    """Adopt regions of an earlier process; remove useless ones."""
    inventory = read_inventory(settings.shm_dir, settings.node_id)
    for name in inventory.rubbish:
        Region.at(settings.shm_dir, settings.node_id, name).remove()
    for digest in [*(one.digest for one in inventory.complete), *(one.digest for one in inventory.partial)]:
        with contextlib.suppress(OSError):  # host memory is full: the region serves no pipeline
            Region.at(settings.shm_dir, settings.node_id, digest).renew_order()
    partial = tuple((p.digest, p.num_bytes, p.changed_at) for p in inventory.partial)
    regions = [Region.at(settings.shm_dir, settings.node_id, one.digest) for one in inventory.complete]
    regions += [disk.copies.region(one.digest) for one in disk.whole] if disk.copies else []
    infos = [(region.digest, region.read_state().info) for region in regions]
    measured = tuple(Measured(digest, i.num_bytes, i.seconds, i.source) for digest, i in infos if i is not None)
    return RegionsFound(inventory.complete, partial, inventory.failed, disk.whole, measured)


async def serve(stopping: asyncio.Event) -> None:
    settings = PrefetcherSettings.read()
    settings.service_id = settings.service_id or f"prefetcher-{settings.node_id}"
    world = World.open("prefetcher", settings)
    reads = reads_of(settings.policy_caching, IMPORTANCE)  # fails for an unknown name
    metrics = PrefetcherMetrics(settings.node_id)
    try:
        capacity_bytes = settings.capacity_bytes()
    except NoSpace as error:
        raise SystemExit(f"glowplug: {error}") from error
    disk = found_disk(settings)
    metrics.capacity_bytes.set(capacity_bytes)
    metrics.disk_capacity_bytes.set(disk.capacity_bytes)
    stimuli: asyncio.Queue[Any] = asyncio.Queue()
    fetcher = Fetcher(
        settings.shm_dir,
        settings.node_id,
        stimuli.put,
        metrics,
        source_options=settings.source_options(),
        link_bytes_per_s=settings.link_bytes_per_s,
        copies=disk.copies,
        max_peers=settings.max_peers,
        admin_token=settings.admin_token,
    )

    def controller(_: int) -> PrefetcherController:
        params = replace(
            settings.params,
            capacity_bytes=capacity_bytes,
            caching=settings.policy_caching,
            disk_bytes=disk.capacity_bytes,
            disk_trouble=disk.trouble,
        )
        made = PrefetcherController(settings.node_id, params, digest_of=region_digest)
        made.handle(found_regions(settings, disk), CLOCK.now_s())
        return made

    async def beside(shell: Shell) -> None:
        await asyncio.gather(
            _forward(stimuli, shell),
            _report(fetcher, shell, metrics, settings),
            _recheck(fetcher, settings.recheck_s),
            _warm(),
        )

    await fetcher.report()  # publish the link's rate before any placement
    service = ControlService(world, reads, fetcher.executors(), target=settings.node_id)
    await service.run(stopping, make(service, settings, fetcher.link, metrics), controller, beside)
    await fetcher.close()


async def _forward(stimuli: asyncio.Queue[Any], shell: Shell) -> None:
    while True:
        await shell.put(await stimuli.get())


async def _report(fetcher: Fetcher, shell: Shell, metrics: PrefetcherMetrics, settings: PrefetcherSettings) -> None:
    controller, before = shell.controller, None
    assert isinstance(controller, PrefetcherController)
    while True:
        await fetcher.report()
        on_disk = DiskContent(copies=controller.disk.whole, bytes_per_s=controller.disk.bytes_per_s)
        before = on_disk if on_disk == before or _wrote(settings, on_disk) else before
        metrics.cache_bytes.set(controller.cache.used_bytes)
        metrics.disk_bytes.set(controller.disk.used_bytes)
        metrics.in_flight.set(len(controller.jobs))
        await asyncio.sleep(REPORT_S)


def _wrote(settings: PrefetcherSettings, on_disk: DiskContent) -> bool:
    try:
        write_disk(settings.shm_dir, settings.node_id, on_disk)
    except OSError as error:
        log.warning("the prefetcher cannot tell the agent which weights are on disk: %s", error)
        return False
    return True


async def _recheck(fetcher: Fetcher, every_s: float) -> None:
    while True:
        await asyncio.sleep(every_s)
        fetcher.recheck()


async def _warm() -> None:
    try:
        await asyncio.to_thread(load_libraries)
    except Exception:
        log.exception("a library that reads weights cannot be loaded")


def main() -> None:
    run(serve)
