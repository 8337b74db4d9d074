"""Files and batches in one router: the API, and the candidate for the lease of running batches."""

import asyncio
from typing import Any

from glowplug.runtime.leader import Candidate
from glowplug.runtime.service import World
from glowplug.runtime.tasks import end, essential
from glowplug.services.router.batches.api import BatchApi, FileRules
from glowplug.services.router.batches.metrics import BatchMetrics
from glowplug.services.router.batches.objects import Objects
from glowplug.services.router.batches.records import Records
from glowplug.services.router.batches.runner import Runner
from glowplug.services.router.batches.sender import IntakeSender
from glowplug.services.router.port import DataPort
from glowplug.services.router.settings import RouterSettings
from glowplug.services.router.shell import RouterShell
from glowplug.services.router.upload import Uploads
from glowplug.state.redis_store import RedisStore

LEASE_S = 6.0  # without its router, after which another runs batches


class Batches:
    """One router's files and batches."""

    def __init__(self, world: World, settings: RouterSettings, port: DataPort, shell: RouterShell) -> None:
        self._world, self._settings = world, settings
        self._store = RedisStore(settings.redis_url)  # fenced, unlike the router's other writes
        objects, keys = Objects(settings.files_url), shell.keys
        uploads = Uploads(settings.state_dir / settings.service_id / "uploads", settings.files_max_bytes)
        rules = FileRules(settings.files_tenant_bytes, settings.files_kept_s)
        api = BatchApi(Records(world.store), objects, uploads, rules)
        port.intake.answer_batches = api.take
        port.context.begin_upload = lambda request, length: api.begin_upload(request, port.context.access, length)
        self._runner = Runner(
            Records(self._store),
            objects,
            IntakeSender(port.intake, port.context, keys),
            BatchMetrics(),
            lines_at_once=settings.batch_lines_at_once,
            max_lines=settings.batch_max_lines,
            max_line_bytes=settings.limits.max_body_bytes,
            kept_s=settings.files_kept_s,
            is_ready=lambda: shell.has_synced,
        )
        self._candidate: Candidate | None = None
        self._standing: asyncio.Task[None] | None = None

    @classmethod
    def open(cls, world: World, settings: RouterSettings, port: DataPort, shell: RouterShell) -> "Batches | None":
        """Open them if the router has an object store."""
        return cls(world, settings, port, shell) if settings.files_url else None

    def start(self, url: str, stopping: asyncio.Event) -> None:
        """Compete for the lease of running batches."""
        world, settings = self._world, self._settings
        self._candidate = Candidate(
            world.service,
            settings.service_id,
            url,
            LEASE_S,
            world.store,
            world.metrics,
            self._term,
            stopping,
            does="runs the fleet's batches",
        )
        standing = asyncio.create_task(self._candidate.run(), name="standing for the lease of batches")
        self._standing = essential(standing, stopping)

    async def _term(self, epoch: int) -> Any:
        self._store.fence(self._world.service, epoch)
        await self._runner.term(epoch)

    async def stop(self) -> None:
        """Store the answers, and leave the rest to another router at once."""
        await end([self._standing])
        if self._candidate is not None:
            await self._candidate.resign()
        await self._store.close()
