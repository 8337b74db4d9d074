"""Carry out the effects of the prefetcher's controller: fetches, their link, regions, copies on disk."""

import asyncio
import logging
import threading
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from glowplug.controllers.prefetcher import messages as msg
from glowplug.domain.errors import ChecksumMismatch, GlowplugError, NoSpace, WeightsUnavailable
from glowplug.domain.hardware import Link
from glowplug.events.envelope import Event
from glowplug.runtime.clock import now_s
from glowplug.runtime.shell import Executor
from glowplug.services.prefetcher.metrics import PrefetcherMetrics
from glowplug.weights.disk import CopyStopped, CopyUnusable, DiskCopies, DiskSource
from glowplug.weights.fetch import Fetch, FetchOptions, PiecesWrong
from glowplug.weights.files import NoAnswer, PatientReader
from glowplug.weights.inventory import is_whole, write_links
from glowplug.weights.link import LinkMeter
from glowplug.weights.region import Region
from glowplug.weights.source import Source, SourceInterrupted, SourceOptions, local_path, redacted
from glowplug.weights.sources import open_source
from glowplug.weights.sources.peer import PeerRegion, peer_token
from glowplug.weights.transfer import LOCAL
from glowplug.weights.writer import FULL, is_unchanged

log = logging.getLogger(__name__)

DISK_FAILED = "disk_failed"
WAIT_S = 10.0


@dataclass
class _Writing:
    stop: threading.Event = field(default_factory=threading.Event)
    task: asyncio.Task[None] | None = None


class Copier:
    """Write and remove disk copies, in the background. `copies` None: no disk tier, and no such effects."""

    def __init__(
        self,
        copies: DiskCopies | None,
        region: Callable[[str], Region],
        put: Callable[[Any], Awaitable[None]],
        metrics: PrefetcherMetrics,
        wait_s: float = WAIT_S,
    ) -> None:
        self._copies, self._region, self._put, self._metrics = copies, region, put, metrics
        self._wait_s, self._reader = wait_s, PatientReader(wait_s)
        self._writing: dict[str, _Writing] = {}

    def executors(self) -> dict[type[Any], Executor]:
        return {msg.WriteCopy: self._write, msg.StopCopy: self._stop, msg.DropCopy: self._drop}

    async def _write(self, effect: msg.WriteCopy, _: Event | None) -> None:
        writing = self._writing[effect.digest] = _Writing()
        writing.task = asyncio.create_task(self._run(effect.digest, writing), name=f"copy-{effect.digest[:12]}")

    async def _run(self, digest: str, writing: _Writing) -> None:
        try:
            end = await self._ended(digest, writing.stop)
        except Exception as error:
            log.exception("the copy of %s to disk failed", digest[:12])
            end = msg.CopyEnded(digest=digest, code=DISK_FAILED, message=f"{type(error).__name__}: {error}")
        if self._writing.get(digest) is writing:
            del self._writing[digest]
        if end.code and not end.is_needless and end.code != msg.CANCELLED:
            self._metrics.disk_failures(end.code).inc()
            log.warning("the prefetcher could not copy %s to disk: %s", digest[:12], end.message)
        elif not end.code:
            self._metrics.disk_written_bytes.inc(end.num_bytes)
            log.info(
                "the prefetcher has copied %s to disk: %d bytes in %.2f s", digest[:12], end.num_bytes, end.seconds
            )
        await self._put(end)

    async def _ended(self, digest: str, stop: threading.Event) -> msg.CopyEnded:
        assert self._copies is not None
        memory = self._region(digest)
        source = local_path(str(memory.read_meta().get("source", "x:")))
        if source is not None and await self._is_beside(source):
            why = f"{source} is on the same file system"
            return msg.CopyEnded(digest=digest, code=DISK_FAILED, message=why, is_needless=True)
        began = time.monotonic()
        writing = asyncio.create_task(asyncio.to_thread(self._copies.write, memory, stop))
        try:
            num_bytes = await asyncio.shield(writing)
        except asyncio.CancelledError:  # the process ends, but not during a thread's write
            stop.set()
            await asyncio.wait([writing])
            raise
        except CopyStopped:
            return msg.CopyEnded(digest=digest, code=msg.CANCELLED, message="stopped")
        except OSError as error:
            if not is_whole(memory):
                return msg.CopyEnded(digest=digest, code=msg.CANCELLED, message="the weights have left host memory")
            what = "is full" if error.errno in FULL else "fails"
            code = NoSpace.code if error.errno in FULL else DISK_FAILED
            message = f"the disk at {self._copies.root} {what}: {error.strerror or error}"
            return msg.CopyEnded(digest=digest, code=code, message=message)
        return msg.CopyEnded(digest=digest, num_bytes=num_bytes, seconds=time.monotonic() - began)

    async def _is_beside(self, source: Path) -> bool:
        assert self._copies is not None
        copies = self._copies
        try:
            return await self._reader.run(f"beside {source}", lambda: copies.is_beside(source))
        except NoAnswer:
            return False

    async def _stop(self, effect: msg.StopCopy, _: Event | None) -> None:
        """Return once the region is no longer read, so that its bytes are free on removal; at the latest after
        wait_s."""
        writing = self._writing.get(effect.digest)
        if writing is not None and writing.task is not None:
            writing.stop.set()
            late = (await asyncio.wait([writing.task], timeout=self._wait_s))[1]
            if late:
                assert self._copies is not None
                message = f"the disk at {self._copies.root} has not ended a write within {self._wait_s:g} s"
                await self._failed(msg.DiskFailed(message))

    async def _drop(self, effect: msg.DropCopy, _: Event | None) -> None:
        assert self._copies is not None
        copies = self._copies
        if effect.evicted:
            self._metrics.disk_evictions.inc()
        try:
            await self._reader.run(f"remove {effect.digest}", lambda: copies.remove(effect.digest))
        except OSError as error:
            message = f"cannot remove the copy of {effect.digest[:12]} in {copies.root}: {error.strerror or error}"
            await self._failed(msg.DiskFailed(message, effect.digest, effect.num_bytes))

    async def _failed(self, failed: msg.DiskFailed) -> None:
        self._metrics.disk_failures(DISK_FAILED).inc()
        log.error("the prefetcher's disk tier fails: %s", failed.message)
        await self._put(failed)

    async def close(self) -> None:
        tasks = [writing.task for writing in self._writing.values() if writing.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


DISK_CHECK_S = 2.0  # for the source to confirm an unpinned copy
PEER = "peer"
_WORTHLESS = (NoSpace.code, ChecksumMismatch.code)


@dataclass
class _Running:
    effect: msg.StartFetch
    task: asyncio.Task[None] | None = None
    fetch: Fetch | None = None
    granted: "asyncio.Future[int] | None" = None
    urgency: int = 0
    reported: int = -1
    stopping: bool = False
    scheme: str = ""
    started_at: float = field(default_factory=time.monotonic)


class Fetcher:
    def __init__(
        self,
        shm_dir: Path,
        node_id: str,
        put: Callable[[Any], Awaitable[None]],
        metrics: PrefetcherMetrics,
        *,
        fetch_options: FetchOptions = FetchOptions(),
        source_options: SourceOptions = SourceOptions(),
        link_bytes_per_s: float = 0.0,
        copies: DiskCopies | None = None,
        max_peers: int = 0,
        admin_token: str = "",
    ) -> None:
        self.shm_dir, self.node_id = shm_dir, node_id
        self._put, self._metrics = put, metrics
        self._fetch_options = fetch_options
        self.link = LinkMeter(f"{node_id}/nic", link_bytes_per_s)
        self._source_options = replace(source_options, window=self.link.window)
        self._disk_link = LinkMeter(f"{node_id}/disk", 0.0)
        self._copies = copies
        self._max_peers, self._peer_token = max_peers, peer_token(admin_token)
        self._copier = Copier(copies, self.region, put, metrics)
        self._running: dict[str, _Running] = {}
        self._checks = SourceChecks(put, source_options)

    def executors(self) -> dict[type[Any], Executor]:
        return {
            msg.StartFetch: self._start,
            msg.GrantRoom: self._grant,
            msg.RaiseUrgency: self._raise,
            msg.StopFetch: self._stop,
            msg.UseRegion: self._use,
            msg.NameRegion: self._name,
            msg.MarkFailed: self._mark_failed,
            msg.DropRegion: self._drop,
            **self._copier.executors(),
        }

    def region(self, digest: str) -> Region:
        return Region.at(self.shm_dir, self.node_id, digest)

    async def _start(self, effect: msg.StartFetch, _: Event | None) -> None:
        self._metrics.misses.inc()
        running = _Running(effect, urgency=effect.want.urgency)
        self._running[effect.digest] = running
        running.task = asyncio.create_task(self._run(running), name=f"fetch-{effect.digest[:12]}")

    async def _run(self, running: _Running) -> None:
        effect = running.effect
        try:
            end = await self._from_disk(running) if effect.from_disk else None
            end = end or await self._read(running, open_source(effect.want.command.weights.uri, self._source_options))
        except asyncio.CancelledError:
            if not running.stopping:
                raise
            end = await self._failed(running, msg.CANCELLED, "stopped")
        except GlowplugError as error:
            end = await self._failed(running, error.code, error.message)
        except Exception as error:
            if not isinstance(error, OSError):
                log.exception("the fetch of %s failed", effect.digest)
            is_full = isinstance(error, OSError) and error.errno in FULL
            code = NoSpace.code if is_full else WeightsUnavailable.code
            end = await self._failed(running, code, f"{type(error).__name__}: {error}")
        if self._running.get(effect.digest) is running:
            del self._running[effect.digest]
        await self._put(end)  # first: an unreported end blocks the digest
        self._observe(running, end)

    async def _read(self, running: _Running, source: Source, copy: DiskSource | None = None) -> msg.FetchEnded:
        running.scheme = source.scheme
        fetch = running.fetch = self._fetch(running, source, copy)
        try:
            whole = await fetch.run() is not None
        finally:
            await source.close()
        digest, num_bytes = running.effect.digest, fetch.num_bytes
        return msg.FetchEnded(
            digest=digest,
            num_bytes=num_bytes,
            whole=whole,
            seconds=fetch.seconds,
            source=source.scheme,
            resumed_bytes=fetch.num_bytes_resumed,
            num_retries=fetch.tally.num_retries,
        )

    async def _from_disk(self, running: _Running) -> msg.FetchEnded | None:
        """Fetch from the disk copy. None if it is unusable or damaged: then it is dropped, and only its good pieces are
        in host memory."""
        digest, weights = running.effect.digest, running.effect.want.command.weights
        assert self._copies is not None
        try:
            copy = await asyncio.to_thread(self._copies.open, digest, self._source_options)
            if not weights.sha256 and await self._checks.is_changed(weights.uri, copy.meta, DISK_CHECK_S):
                raise CopyUnusable("its source has changed")
            end = await self._read(running, copy, copy)
        except PiecesWrong as error:
            await self._without_damage(running, copy, error)
            return None
        except (CopyUnusable, ChecksumMismatch, WeightsUnavailable) as error:
            why = error.message if isinstance(error, GlowplugError) else str(error)
            log.warning("the prefetcher cannot use the copy of %s on disk: %s", digest[:12], why)
            self._metrics.disk_failures(getattr(error, "code", DISK_FAILED)).inc()
            running.fetch, running.scheme = None, ""
            await asyncio.to_thread(self.region(digest).clear_bytes)
            await self._put(msg.CopyLost(digest, why))
            return None
        if end.whole:
            try:
                await asyncio.to_thread(copy.restore, self.region(digest))
                await asyncio.to_thread(copy.forget_pages)
            except OSError as error:
                log.warning(
                    "the prefetcher could not clean up after it read the copy of %s on disk: %s",
                    digest[:12],
                    error,
                )
        return end

    async def _without_damage(self, running: _Running, copy: DiskSource, error: PiecesWrong) -> None:
        """Give up a damaged copy; only its bad pieces come from the source."""
        digest, fetch = running.effect.digest, running.fetch
        log.warning("the prefetcher drops the copy of %s on disk: %s", digest[:12], error)
        self._metrics.disk_failures(DISK_FAILED).inc()
        self._metrics.wrong_pieces(copy.scheme).inc(fetch.tally.num_wrong_pieces if fetch else 0)
        await asyncio.to_thread(copy.keep, self.region(digest), fetch.landed if fetch else [])
        running.fetch, running.scheme = None, ""
        await self._put(msg.CopyLost(digest, str(error)))

    def _fetch(self, running: _Running, source: Source, copy: DiskSource | None) -> Fetch:
        digest, command = running.effect.digest, running.effect.want.command
        options = self._fetch_options
        if copy is not None:
            options = replace(options, max_attempts=2, max_mismatches=0)

        async def on_sized(num_bytes: int) -> int:
            running.granted = asyncio.get_running_loop().create_future()
            await self._put(msg.FetchSized(digest, num_bytes))
            return await running.granted

        return Fetch(
            copy.reference(command.weights) if copy else command.weights,
            self.region(digest),
            source,
            self._disk_link if copy else self.link,
            on_sized,
            options=options,
            priority=running.urgency,
            first_byte=command.first_byte,
            last_byte=command.last_byte,
            stage=command.stage,
            num_stages=command.num_stages,
            peers=self._peers(digest, command.peers) if source.scheme not in LOCAL else (),
            piece_digests=copy.piece_digests if copy else (),
        )

    def _peers(self, digest: str, urls: Sequence[str]) -> list[PeerRegion]:
        chunk_bytes, window = self._source_options.chunk_bytes, self.link.window
        return [
            PeerRegion(url, digest, self._peer_token, chunk_bytes, window=window) for url in urls[: self._max_peers]
        ]

    async def _failed(self, running: _Running, code: str, message: str) -> msg.FetchEnded:
        fetch = running.fetch
        kept = fetch.num_bytes if fetch and fetch.num_bytes_landed and code not in _WORTHLESS else 0
        if not kept:
            await asyncio.to_thread(self.region(running.effect.digest).clear_bytes)
        return msg.FetchEnded(
            digest=running.effect.digest,
            num_bytes=kept,
            code=code,
            message=message,
            seconds=time.monotonic() - running.started_at,
            source=running.scheme,
        )

    def _observe(self, running: _Running, end: msg.FetchEnded) -> None:
        fetch, scheme, took_s = running.fetch, running.scheme, time.monotonic() - running.started_at
        digest, model_key = running.effect.digest, running.effect.want.command.model_key
        if scheme and fetch:
            for holder, num_bytes in fetch.tally.by_holder.items():
                self._metrics.fetched_bytes(scheme if holder == scheme else PEER).inc(num_bytes)
            if fetch.tally.num_wrong_pieces:
                self._metrics.wrong_pieces(PEER).inc(fetch.tally.num_wrong_pieces)
            self._metrics.retries(scheme).inc(fetch.tally.num_retries)
            if end.whole:
                self._metrics.fetch_s.labels(scheme).observe(took_s)
        if end.code:
            self._metrics.failures(end.code).inc()
        fetched, resumed = (fetch.tally.num_bytes, fetch.num_bytes_resumed) if fetch else (0, 0)
        came = f"has brought {end.num_bytes} bytes ({fetched} from {scheme}, {resumed} resumed) in {end.seconds:.2f} s"
        said = f"has ended: {end.message}" if end.message else came
        log.info("the fetch of %s for %s %s", digest[:12], model_key, said)

    async def _grant(self, effect: msg.GrantRoom, _: Event | None) -> None:
        running = self._running.get(effect.digest)
        if running and running.granted and not running.granted.done():
            running.granted.set_result(effect.max_bytes)

    async def _raise(self, effect: msg.RaiseUrgency, _: Event | None) -> None:
        if (running := self._running.get(effect.digest)) is not None:
            running.urgency = effect.urgency
            if running.fetch:
                running.fetch.tally.priority = effect.urgency

    async def _stop(self, effect: msg.StopFetch, _: Event | None) -> None:
        """Return once the task has released the region's files, so that they may be removed."""
        running = self._running.get(effect.digest)
        if running and running.task and not running.task.done():
            running.stopping = True
            running.task.cancel()
            await asyncio.wait([running.task])

    async def _use(self, effect: msg.UseRegion, _: Event | None) -> None:
        region = self.region(effect.digest)
        if not is_whole(region):
            await asyncio.to_thread(region.remove)
            await self._put(msg.RegionLost(effect.digest, effect.want))
            return
        self._metrics.hits.inc()
        region.touch(now_s())
        region.add_model_key(effect.want.command.model_key)
        weights = effect.want.command.weights
        if not weights.sha256:
            self._checks.spawn(region, weights.uri)

    async def _name(self, effect: msg.NameRegion, _: Event | None) -> None:
        self.region(effect.digest).add_model_key(effect.model_key)

    async def _mark_failed(self, effect: msg.MarkFailed, _: Event | None) -> None:
        region = self.region(effect.digest)
        if not effect.keep:
            await asyncio.to_thread(region.clear_bytes)
        try:
            region.fail(effect.code, effect.message, failed_at=time.time(), instance_ids=effect.instance_ids)
        except OSError as error:
            log.error(
                "the prefetcher cannot record that the fetch of %s failed (%s): %s",
                effect.digest[:12],
                effect.message,
                error,
            )

    async def _drop(self, effect: msg.DropRegion, _: Event | None) -> None:
        if effect.evicted:
            self._metrics.evictions.inc()
        await asyncio.to_thread(self.region(effect.digest).remove)

    def recheck(self) -> None:
        """Compare unpinned cached files with their source."""
        for complete in sorted((self.shm_dir / self.node_id).glob("*/complete.json")):
            region = Region(complete.parent)
            meta = region.read_meta()
            if meta.get("checked") is False and urlsplit(meta.get("source", "x:")).scheme in ("", "file"):
                self._checks.spawn(region, meta["source"])

    async def report(self) -> None:
        """Report progress to the controller, and the link's load to the node's agent."""
        for digest, running in list(self._running.items()):
            fetch = running.fetch
            if fetch and fetch.num_bytes_landed != running.reported:
                running.reported = fetch.num_bytes_landed
                await self._put(msg.FetchProgressed(digest, running.reported, fetch.num_bytes))
        self._metrics.link_bytes.set(self.link.bytes_in_flight)
        measured = 0.0 if self.link.bytes_per_s else self.link.rate.bytes_per_s
        self._metrics.link_bytes_per_s.set(self.link.bytes_per_s or measured)
        link = Link(
            link_id=self.link.link_id,
            bytes_per_s=self.link.bytes_per_s or measured,
            is_measured=measured > 0,
            bytes_in_flight=max(0, self.link.bytes_in_flight),
            num_transfers=self.link.num_transfers,
        )
        try:
            write_links(self.shm_dir, self.node_id, [link])
        except OSError as error:
            log.warning("the prefetcher cannot tell the agent how busy the links are: %s", error)

    async def close(self) -> None:
        """Stop every task; regions stay for a resumption."""
        tasks = [*(r.task for r in self._running.values() if r.task), *self._checks.tasks]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._copier.close()


class SourceChecks:
    """Check whether the source of unpinned cached weights has changed, once at a time per region. A silent source keeps
    its copy."""

    def __init__(self, put: Callable[[Any], Awaitable[None]], options: SourceOptions) -> None:
        self._put = put
        self._options = replace(options, hf_falls_back=False)  # an older commit in the cache is not a change
        self._running: dict[str, asyncio.Task[None]] = {}

    @property
    def tasks(self) -> list[asyncio.Task[None]]:
        return list(self._running.values())

    def spawn(self, region: Region, uri: str) -> None:
        if region.digest not in self._running:
            task = asyncio.create_task(self._check(region, uri))
            self._running[region.digest] = task
            task.add_done_callback(lambda _: self._running.pop(region.digest, None))

    async def _check(self, region: Region, uri: str) -> None:
        if await self.is_changed(uri, region.read_meta()):
            await self._put(msg.RegionChanged(region.digest))

    async def is_changed(self, uri: str, meta: Mapping[str, Any], within_s: float | None = None) -> bool:
        try:
            source = open_source(uri, self._options)
        except WeightsUnavailable as error:
            log.warning("the prefetcher cannot check whether %s has changed: %s", redacted(uri), error)
            return False
        try:
            async with asyncio.timeout(within_s):
                info = await source.probe()
        except (WeightsUnavailable, SourceInterrupted, TimeoutError) as error:
            log.debug("the prefetcher cannot check whether %s has changed: %s", redacted(uri), error)
            return False
        finally:
            await source.close()
        return not is_unchanged(meta, info)
