"""The shared state of one data port's connections and exchanges."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from glowplug.domain.errors import GlowplugError
from glowplug.domain.instance import Instance
from glowplug.services.router.batch_paths import not_configured
from glowplug.services.router.ends import EngineReader
from glowplug.services.router.http_request import Access, HttpRequest
from glowplug.services.router.metrics import RouterMetrics
from glowplug.services.router.request_table import RequestExecutor, RequestTable
from glowplug.services.router.settings import Limits
from glowplug.services.router.upload import Upload
from glowplug.services.router.usage_journal import Journal


def _no_files(request: HttpRequest, length: int | None) -> Upload:
    raise not_configured()


E = TypeVar("E", bound=RequestExecutor)


@dataclass(slots=True)
class PortContext(Generic[E]):
    """A port's shared state, for requests of type E. `connect(reader, instance, fresh)` sends a request to its
    instance; `report` is called once at each exchange's end; `report_refusal` for each request that becomes none."""

    limits: Limits
    table: RequestTable[E]
    metrics: RouterMetrics
    access: Access
    connect: Callable[[EngineReader, Instance, bool], None]
    report: Callable[[E], None]
    report_refusal: Callable[[HttpRequest, GlowplugError], None]
    loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop)
    begin_upload: Callable[[HttpRequest, int | None], Upload] = _no_files  # raises GlowplugError
    journal: Journal = field(default_factory=Journal)
    buffered_bytes: int = 0  # of request bodies
    is_crowded: bool = False  # clients do not read: each gets a small buffer
    max_continuations: int = 0

    @property
    def write_buffer_bytes(self) -> int:
        return self.limits.crowded_buffer_bytes if self.is_crowded else self.limits.write_buffer_bytes
