"""Weights arriving in one node's host memory, and engines that wait for them."""

from collections.abc import Callable
from typing import Any

from glowplug.controllers.agent import messages as aw
from glowplug.controllers.prefetcher import messages as pw
from glowplug.controllers.prefetcher.controller import DISK
from glowplug.domain.hardware import CachedWeights
from glowplug.domain.model import WeightsRef
from glowplug.fleet.start_times import StartKind
from glowplug_lab.simulator.hardware.disk import Disk
from glowplug_lab.simulator.hardware.engine import SimEngine
from glowplug_lab.simulator.hardware.server import Server
from glowplug_lab.simulator.links import Transfer
from glowplug_lab.simulator.run import digest_of

Arrived = Callable[[SimEngine], None]


class Fetching:
    """`regions`: complete weights by digest. Fetches in `failing` end with that error code. `changed()` follows a
    change in host memory."""

    def __init__(self, node: Server, disk: Disk, changed: Callable[[], None]) -> None:
        self.node, self.run, self._disk, self._changed = node, node.run, disk, changed
        self.regions: dict[str, CachedWeights] = {}
        self.failing: dict[str, str] = {}
        self._failed: dict[str, pw.MarkFailed] = {}  # instances not waiting yet
        self._waiting: dict[str, tuple[str, SimEngine, Arrived]] = {}  # digest, engine, callback
        self._parts: dict[str, list[tuple[int, int]]] = {}  # byte ranges by digest
        self._fetches: dict[str, tuple[pw.StartFetch, Transfer | None]] = {}
        self.handlers: dict[type, Any] = {
            pw.StartFetch: self._start,
            pw.GrantRoom: self._granted,
            pw.StopFetch: self._stop,
            pw.UseRegion: self._use,
            pw.DropRegion: self._drop,
            pw.MarkFailed: self._mark_failed,
            pw.RaiseUrgency: self._raise,
        }

    def keep(self, digest: str, num_bytes: int) -> None:
        model_keys = self.run.keys_of.get(digest, ())
        self.regions[digest] = CachedWeights(digest=digest, num_bytes=num_bytes, model_keys=model_keys)

    def has(self, engine: SimEngine, weights: WeightsRef) -> bool:
        return self.has_all(weights) or self._covers(engine, digest_of(weights))

    def found(self, engine: SimEngine, weights: WeightsRef) -> StartKind:
        if self.has(engine, weights):
            return StartKind.CACHED
        return StartKind.DISK if digest_of(weights) in self._disk.copies else StartKind.COLD

    def _covers(self, engine: SimEngine, digest: str) -> bool:
        """Stages are equal, up to rounding."""
        num_bytes, num = engine.model.model.weights.num_bytes, engine.num_stages
        first, last = num_bytes * engine.stage // num, num_bytes * (engine.stage + 1) // num
        return any(a <= first + num and b >= last - num for a, b in self._parts.get(digest, ()))

    def has_all(self, weights: WeightsRef) -> bool:
        return not weights.uri or digest_of(weights) in self.regions

    def wait(self, engine: SimEngine, weights: WeightsRef, then: Arrived) -> None:
        """Call `then(engine)` once its part has arrived."""
        if (failed := self._failed.pop(engine.instance_id, None)) is not None:
            self.node.answer_agent(aw.WeightsFailed(engine.instance_id, failed.code, failed.message))
            return
        self._waiting[engine.instance_id] = (digest_of(weights), engine, then)

    def forget(self, instance_id: str) -> None:
        self._waiting.pop(instance_id, None)
        self._failed.pop(instance_id, None)

    def wait_for_none(self) -> None:
        self._waiting.clear()

    def stop_all(self) -> None:
        for _, transfer in self._fetches.values():
            if transfer is not None:
                self.run.links.stop(transfer)
        self._fetches.clear()

    def rename(self, engine: SimEngine, instance_id: str) -> None:
        found = self._waiting.pop(engine.instance_id, None)
        if found is not None:
            self._waiting[instance_id] = found

    def _arrived(self, digest: str, asked_by: str) -> None:
        for instance_id, (wanted, engine, then) in list(self._waiting.items()):
            if wanted != digest:
                continue
            if digest in self.regions or instance_id == asked_by or self._covers(engine, digest):
                del self._waiting[instance_id]
                then(engine)

    def _start(self, effect: pw.StartFetch) -> None:
        self._fetches[effect.digest] = (effect, None)
        there = sum(last - first for first, last in self._with(effect))
        self.run.kernel.after(0.0, self.node.tell_prefetcher, pw.FetchSized(effect.digest, there))

    def _with(self, fetch: pw.StartFetch) -> list[tuple[int, int]]:
        """Bytes already there are not fetched again."""
        command = fetch.want.command
        first, num_bytes = command.first_byte, command.weights.num_bytes
        last = min(command.last_byte or num_bytes, num_bytes)
        return _joined([*self._parts.get(fetch.digest, ()), (first, max(first, last))])

    def _missing(self, fetch: pw.StartFetch) -> int:
        here = sum(last - first for first, last in self._parts.get(fetch.digest, ()))
        return sum(last - first for first, last in self._with(fetch)) - here

    def _granted(self, effect: pw.GrantRoom) -> None:
        found = self._fetches.get(effect.digest)
        if found is None or found[1] is not None:
            return
        want = found[0].want
        start = self.run.models[want.command.model_key].start
        waits = not start.overlap and want.urgency > 0
        delay_s = start.launch_s + start.library_s if waits else 0.0
        self.run.kernel.after(delay_s, self._move, found[0])

    def _move(self, fetch: pw.StartFetch) -> None:
        found = self._fetches.get(fetch.digest)
        if found is None or found[0] is not fetch or found[1] is not None:
            return
        began = self.run.kernel.now_s
        num_bytes = self._missing(fetch)
        transfer = self.run.links.start(
            f"fetch {fetch.digest}",
            num_bytes,
            (self._disk.link if fetch.from_disk else self.node.network,),
            lambda: self._fetched(fetch, num_bytes, began),
            priority=0 if fetch.want.urgency > 0 else 1,
        )
        self._fetches[fetch.digest] = (fetch, transfer)

    def _fetched(self, fetch: pw.StartFetch, num_moved: int, began: float) -> None:
        digest = fetch.digest
        del self._fetches[digest]
        seconds = self.run.kernel.now_s - began
        if fetch.from_disk:
            self._disk.num_bytes_read += num_moved
        else:
            self.run.results.bytes_fetched += num_moved
            self.run.results.fetch_seconds += seconds
        if (code := self.failing.get(digest)) is not None:
            self._parts.pop(digest, None)
            ended = pw.FetchEnded(digest=digest, num_bytes=0, code=code, message="broken by a fault")
            self.node.tell_prefetcher(ended)
            return
        parts = self._with(fetch)
        num_bytes = sum(last - first for first, last in parts)
        is_whole = num_bytes >= fetch.want.command.weights.num_bytes
        if is_whole:
            self.keep(digest, num_bytes)
            self._parts.pop(digest, None)
        else:
            self._parts[digest] = parts
        source = DISK if fetch.from_disk else "sim"
        ended = pw.FetchEnded(digest=digest, num_bytes=num_bytes, whole=is_whole, seconds=seconds, source=source)
        self.node.tell_prefetcher(ended)
        self._arrived(digest, fetch.want.command.instance_id)
        self._changed()

    def _raise(self, effect: pw.RaiseUrgency) -> None:
        found = self._fetches.get(effect.digest)
        if found is not None and found[1] is not None and effect.urgency > 0:
            self.run.links.hurry(found[1], 0)

    def _stop(self, effect: pw.StopFetch) -> None:
        found = self._fetches.pop(effect.digest, None)
        if found is not None and found[1] is not None:
            self.run.links.stop(found[1])
        ended = pw.FetchEnded(digest=effect.digest, num_bytes=0, code=pw.CANCELLED)
        self.run.kernel.after(0.0, self.node.tell_prefetcher, ended)

    def _use(self, effect: pw.UseRegion) -> None:
        if effect.digest not in self.regions:
            self.run.kernel.after(0.0, self.node.tell_prefetcher, pw.RegionLost(effect.digest, effect.want))

    def _drop(self, effect: pw.DropRegion) -> None:
        self.regions.pop(effect.digest, None)
        self._parts.pop(effect.digest, None)
        self.run.results.num_evictions += effect.evicted
        self._changed()

    def _mark_failed(self, effect: pw.MarkFailed) -> None:
        for instance_id in effect.instance_ids:
            if self._waiting.pop(instance_id, None) is not None:
                self.node.answer_agent(aw.WeightsFailed(instance_id, effect.code, effect.message))
            else:
                self._failed[instance_id] = effect


def _joined(ranges: list[tuple[int, int]]) -> list[tuple[int, int]]:
    joined: list[tuple[int, int]] = []
    for first, last in sorted(ranges):
        if joined and first <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(last, joined[-1][1]))
        else:
            joined.append((first, last))
    return joined
