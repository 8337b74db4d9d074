"""What all connections and exchanges of one data port share."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from glowplug.domain.instance import Instance
from services.router.ends import EngineReader
from services.router.http_request import Access
from services.router.metrics import RouterMetrics
from services.router.request_table import RequestTable, Routed
from services.router.settings import Limits

E = TypeVar("E", bound=Routed)


@dataclass(slots=True)
class PortContext(Generic[E]):
    """Of a port whose requests are of the type E. `connect(reader, instance, fresh)` sends a request on a connection to
    its instance; `report` is called once for each exchange, at its end."""

    limits: Limits
    table: RequestTable[E]
    metrics: RouterMetrics
    access: Access
    connect: Callable[[EngineReader, Instance, bool], None]
    report: Callable[[E], None]
    loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop)
    buffered_bytes: int = 0  # of request bodies
    max_continuations: int = 0
