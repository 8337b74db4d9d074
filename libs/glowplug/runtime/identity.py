"""Allow one process per service id.

Two would share its durable readers and silently get half of the facts each, so a new process asks the name's holder
whether it lives.
"""

import asyncio
import logging
import time
import uuid
from dataclasses import dataclass, replace

from glowplug.events.envelope import MalformedEvent, from_json, to_json
from glowplug.state.port import Store, StoreUnavailable

log = logging.getLogger(__name__)
PROCESSES = "processes"  # service_id -> ServiceHolder
PROCESS = uuid.uuid4().hex  # this process, as in /live
PROBE_S, WATCH_S = 1.0, 10.0


class ServiceIdTaken(RuntimeError):
    """A living process has this service id already."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceHolder:
    """`seen_at`: epoch seconds."""

    url: str
    process: str
    seen_at: float


class Identity:
    def __init__(self, store: Store, service_id: str, url: str, process: str = PROCESS) -> None:
        self._store, self._service_id = store, service_id
        self._mine = ServiceHolder(url=url, process=process, seen_at=0.0)

    async def claim(self) -> None:
        """Take the name. Raises ServiceIdTaken if its holder answers. A silent store decides nothing: `watch` looks
        again."""
        try:
            other = await self._other()
            if other is not None:
                raise ServiceIdTaken(
                    f"the service id {self._service_id} belongs to a process that runs at {other.url}: "
                    "give this one another GLOWPLUG_SERVICE_ID"
                )
            await self._write()
        except StoreUnavailable as error:
            log.warning(
                "this process cannot find out whether another one has the service id %s: %s", self._service_id, error
            )

    async def watch(self) -> None:
        """Keep the name for ever, and report another living holder loudly."""
        while True:
            await asyncio.sleep(WATCH_S)
            try:
                other = await self._other()
                if other is None:
                    await self._write()
                else:
                    log.critical(
                        "the process at %s has this service id (%s) too: each receives half of the events; "
                        "stop one or give it another GLOWPLUG_SERVICE_ID",
                        other.url,
                        self._service_id,
                    )
            except StoreUnavailable as error:
                log.debug("the claim to the service id %s cannot be renewed: %s", self._service_id, error)

    async def release(self) -> None:
        try:
            raw = await self._store.get(PROCESSES, self._service_id)
            if raw is not None and from_json(raw, ServiceHolder).process == self._mine.process:
                await self._store.delete(PROCESSES, self._service_id)
        except (StoreUnavailable, MalformedEvent) as error:
            log.debug("the service id %s cannot be released: %s", self._service_id, error)

    async def _other(self) -> ServiceHolder | None:
        raw = await self._store.get(PROCESSES, self._service_id)
        try:
            holder = from_json(raw, ServiceHolder) if raw is not None else None
        except MalformedEvent:
            return None
        if holder is None or holder.process == self._mine.process:
            return None
        return holder if await _answers(holder) else None

    async def _write(self) -> None:
        now_s = time.time()
        await self._store.put(PROCESSES, self._service_id, to_json(replace(self._mine, seen_at=now_s)))


async def _answers(holder: ServiceHolder) -> bool:
    import httpx  # rarely needed: names are usually given back

    try:
        async with httpx.AsyncClient(timeout=PROBE_S, trust_env=False) as client:
            about = (await client.get(f"{holder.url}/live")).json()
    except (httpx.HTTPError, httpx.InvalidURL, ValueError):
        return False
    return isinstance(about, dict) and about.get("process") == holder.process
