"""Bring a region's bytes from several holders at once: the source of its address, and peers.

A peer that fails, is slow beside the others, or sends a piece that differs from its own checksum is dropped, and its
part goes to the others; a wrong piece never lands. The source is retried as its options say.
"""

import asyncio
import logging
from bisect import insort
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Protocol

from glowplug.domain.errors import WeightsUnavailable
from glowplug.weights.link import LinkMeter
from glowplug.weights.pieces import Layout, is_piece
from glowplug.weights.source import (
    Chunk,
    Source,
    SourceChanged,
    SourceFile,
    SourceInterrupted,
    SourceSlow,
    not_slower,
)
from glowplug.weights.writer import Intervals, RegionWriter

# Assignment of missing bytes to holders. Pure: time and rates are arguments.
# Parts follow the order of the ranges, each about `part_s` of its holder's time, so that early bytes land soon. When
# none are left, a free holder takes over the end of a slow one's part. Bounds are those of pieces (weights/pieces.py).

PART_S = 1.0
FIRST_PART_BYTES = 4 << 20  # for a holder of unknown rate
STALLED_S = 2.0  # without a byte: the rest of a part may be taken over
_WORTH_TAKING = 2.0  # a part is taken over if it would take that many times as long where it is


@dataclass(slots=True, eq=False)
class Part:
    """[position, last) of the region, under way from `holder`. `last` falls when another takes over the end."""

    rank: int
    first: int
    last: int
    holder: str
    began_at: float
    moved_at: float
    position: int
    num_bytes: int = 0  # received; exceeds the position's progress after rereads

    @property
    def num_bytes_left(self) -> int:
        return max(0, self.last - self.position)


class PartQueue:
    """`ranges`: [first, last) in the wanted order, of whole pieces and disjoint."""

    def __init__(self, layout: Layout, ranges: Sequence[tuple[int, int]], part_bytes: int) -> None:
        self._layout, self._part_bytes = layout, part_bytes
        self._missing = [(rank, first, last) for rank, (first, last) in enumerate(ranges) if first < last]
        self._running: list[Part] = []

    @property
    def is_done(self) -> bool:
        """The rest of a part taken over from a stalled holder does not count."""
        return not self._missing and not any(part.num_bytes_left for part in self._running)

    def take(self, holder: str, bytes_per_s: float, has: bytes | None, now_s: float) -> Part | None:
        """`bytes_per_s` 0: unknown. `has` None: all pieces."""
        for at, (rank, first, last) in enumerate(self._missing):
            start, end = (first, last) if has is None else self._available(first, last, has)
            if start >= end:
                continue
            end = min(end, start + self._size(bytes_per_s))
            rest = [(rank, a, b) for a, b in ((first, start), (end, last)) if a < b]
            self._missing[at : at + 1] = rest
            return self._began(Part(rank, start, end, holder, now_s, now_s, start))
        return None

    def take_over(self, holder: str, bytes_per_s: float, has: bytes | None, now_s: float) -> Part | None:
        """Split another's slow part so that both end at about the same time."""
        if bytes_per_s <= 0:
            return None
        others = [part for part in self._running if part.holder != holder and part.num_bytes_left]
        for part in sorted(others, key=lambda one: -one.num_bytes_left):
            first = self._split(part, bytes_per_s, now_s)
            start, end = (first, part.last) if has is None else self._available(first, part.last, has)
            if start < end == part.last:
                part.last = start
                return self._began(Part(part.rank, start, end, holder, now_s, now_s, start))
        return None

    def moved(self, part: Part, position: int, now_s: float) -> None:
        part.position, part.moved_at = position, now_s

    def end(self, part: Part) -> None:
        """Reassign its missing bytes."""
        self._running.remove(part)
        first, _ = self._layout.rounded(part.position, part.position + 1)
        if part.num_bytes_left:
            insort(self._missing, (part.rank, max(part.first, first), part.last))

    def _began(self, part: Part) -> Part:
        self._running.append(part)
        return part

    def _size(self, bytes_per_s: float) -> int:
        wanted = bytes_per_s * PART_S if bytes_per_s else FIRST_PART_BYTES
        piece = self._layout.piece_bytes
        return max(piece, min(int(wanted), self._part_bytes) // piece * piece)

    def _split(self, part: Part, bytes_per_s: float, now_s: float) -> int:
        if now_s - part.moved_at >= STALLED_S:
            return self._layout.rounded(part.position, part.position + 1)[0]
        left, taken_s = part.num_bytes_left, now_s - part.began_at
        if part.position == part.first:
            return part.last
        rate = (part.position - part.first) / max(taken_s, 1e-6)
        own_s = left / bytes_per_s
        if rate * own_s * _WORTH_TAKING >= left:
            return part.last
        kept = int(left * rate / (rate + bytes_per_s))
        return self._layout.rounded(part.position, part.position + kept + 1)[1]

    def _available(self, first: int, last: int, has: bytes) -> tuple[int, int]:
        pieces = self._layout.touched(first, last)
        start = has.find(1, pieces.start, pieces.stop)
        if start < 0:
            return first, first
        end = has.find(0, start, pieces.stop)
        end = pieces.stop if end < 0 else end
        return max(first, self._layout.piece(start)[0]), min(last, self._layout.piece(end - 1)[1])


log = logging.getLogger(__name__)
LOCAL = ("file", "disk")
IDLE_S = 0.1  # between polls of an idle reader
LOOK_S = 0.5  # between questions to a peer that is still fetching
GIVE_UP_S = 10.0  # without a byte, once the source is lost
SLOW_RATIO = 0.1  # of the fastest rate: a peer below it for `SLOW_AFTER_S` is dropped
SLOW_AFTER_S = 2.0
KNOWN_AFTER_S = 0.25  # reading time before a holder's rate counts
PAUSE_S = 1.0


class PeerBusy(SourceInterrupted):
    """The peer is busy: ask again after `PAUSE_S`."""


class WrongPiece(Exception):
    """A piece differs from its holder's checksum."""

    def __init__(self, holder: str, index: int, first: int, last: int) -> None:
        super().__init__(f"piece {index} from {holder} differs from its checksum")
        self.index, self.first, self.last = index, first, last


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerFiles:
    """`files` with their validators, in the region's order; `landed` one byte per piece; `digests` one per piece, or
    none; `sha256` "" while incomplete."""

    files: tuple[SourceFile, ...]
    landed: bytes
    sha256: str = ""
    digests: tuple[str, ...] = ()

    @property
    def is_complete(self) -> bool:
        return bool(self.sha256)


class Peer(Protocol):
    """A prefetcher of another node, for one set of weights."""

    @property
    def name(self) -> str: ...

    async def look(self, *, again: bool = False) -> PeerFiles | None:
        """Return None for nothing; `again` leaves the checksums out. Raises SourceInterrupted."""
        ...

    def read(self, first: int, last: int) -> AsyncGenerator[Chunk, None]:
        """Raises SourceInterrupted; may end early."""
        ...

    async def close(self) -> None: ...


@dataclass(slots=True)
class TransferCounts:
    priority: int = 0
    num_bytes: int = 0  # over the link
    num_retries: int = 0
    num_wrong_pieces: int = 0
    by_holder: dict[str, int] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class Holder:
    """The source (`source`) or a `peer`. `landed` None: it has all bytes."""

    name: str
    num_readers: int
    source: Source | None = None
    peer: Peer | None = None
    landed: bytes | None = None
    digests: tuple[str, ...] = ()
    lost: Exception | None = None  # why it is no longer read
    num_bytes: int = 0
    busy_s: float = 0.0
    num_busy: int = 0
    busy_since: float = 0.0
    looked_at: float = 0.0
    paused_until: float = 0.0

    @property
    def is_remote(self) -> bool:
        return self.source is None or self.source.scheme not in LOCAL

    def rate(self, now_s: float) -> float:
        """Return bytes a second of reading time, all readers together; 0.0 at first."""
        busy_s = self.seconds(now_s)
        return self.num_bytes / busy_s if busy_s > 0 else 0.0

    def seconds(self, now_s: float) -> float:
        return self.busy_s + (now_s - self.busy_since if self.num_busy else 0.0)

    def begin(self, now_s: float) -> None:
        if not self.num_busy:
            self.busy_since = now_s
        self.num_busy += 1

    def end(self, now_s: float) -> None:
        self.num_busy -= 1
        if not self.num_busy:
            self.busy_s += now_s - self.busy_since


class Transfer:
    """`back_off(failures, error)` waits before the source is retried, or raises WeightsUnavailable. `joining`: peers
    still to answer."""

    def __init__(
        self,
        writer: RegionWriter,
        link: LinkMeter,
        tally: TransferCounts,
        origin: Holder,
        joining: Sequence[Awaitable[Holder | None]],
        back_off: Callable[[int, Exception], Awaitable[None]],
        *,
        part_bytes: int,
        slow_s: float,
        clock: Callable[[], float],
    ) -> None:
        self._writer, self._link, self._tally, self._back_off = writer, link, tally, back_off
        self._part_bytes, self._slow_s, self._clock = part_bytes, slow_s, clock
        self._joining = [asyncio.ensure_future(one) for one in joining]
        self._origin, self._holders = origin, [origin]
        self.from_peers = Intervals()
        self.wrong: list[WrongPiece] = []  # skipped pieces of an origin with checksums

    async def bring(self, ranges: Sequence[tuple[int, int]]) -> None:
        """Return when all of `ranges` has landed except `wrong`. Raises the source's error once no holder has the
        rest."""
        layout = self._writer.layout
        assert layout is not None
        done = Intervals([*self._writer.landed.as_list(), *((one.first, one.last) for one in self.wrong)])
        wanted = [gap for first, last in ranges for gap in done.gaps(*layout.rounded(first, last))]
        parts = PartQueue(layout, distinct(wanted), self._part_bytes)
        if parts.is_done:
            return
        run = _Run(parts)
        try:
            async with asyncio.TaskGroup() as group:
                run.group = group
                for holder in self._holders:
                    self._begin(run, holder)
                for one in self._joining:
                    run.tasks.append(group.create_task(self._join(run, one)))
                await self._watch(run)
                for task in run.tasks:
                    task.cancel()
        except BaseExceptionGroup as errors:
            raise _first(errors) from errors

    async def _watch(self, run: "_Run") -> None:
        """Return once nothing is missing. Raises the source's error when no other holder remains."""
        num_bytes, moved_at = self._tally.num_bytes, self._clock()
        while not run.parts.is_done:
            await run.idle()
            self._drop_slow()
            if num_bytes != self._tally.num_bytes:
                num_bytes, moved_at = self._tally.num_bytes, self._clock()
            lost = self._origin.lost
            if lost and (not self._living() or self._clock() - moved_at > GIVE_UP_S):
                raise lost

    def _living(self) -> list[Holder]:
        waiting = any(not one.done() for one in self._joining)
        return [one for one in self._holders if one.lost is None] or ([self._origin] if waiting else [])

    def _begin(self, run: "_Run", holder: Holder) -> None:
        assert run.group is not None
        for _ in range(holder.num_readers if holder.lost is None else 0):
            run.tasks.append(run.group.create_task(self._work(run, holder)))

    async def _join(self, run: "_Run", joining: "asyncio.Future[Holder | None]") -> None:
        holder = await asyncio.shield(joining)
        self._joining = [one for one in self._joining if one is not joining]
        if holder is not None:
            self._holders.append(holder)
            self._begin(run, holder)

    async def _work(self, run: "_Run", holder: Holder) -> None:
        while not run.parts.is_done and holder.lost is None:
            now_s = self._clock()
            if now_s < holder.paused_until:
                await run.idle()
                continue
            rate = holder.rate(now_s) / max(1, holder.num_readers)
            known = rate if holder.seconds(now_s) >= KNOWN_AFTER_S else 0.0
            part = run.parts.take(holder.name, known, holder.landed, now_s)
            if part is None and len(self._holders) > 1:
                part = run.parts.take_over(holder.name, rate, holder.landed, now_s)
            if part is None:
                await run.idle()
                await self._look_again(holder)
                continue
            holder.begin(now_s)
            try:
                await self._bring_part(run, holder, part)
                self._writer.save()
            except WrongPiece as wrong:
                self._tally.num_wrong_pieces += 1
                if holder.peer is None:  # left to the caller
                    self.wrong.append(wrong)
                    run.parts.moved(part, min(wrong.last, part.last), self._clock())
                else:
                    self._lose(holder, wrong)
            except PeerBusy:
                holder.paused_until = self._clock() + PAUSE_S
            except (SourceInterrupted, WeightsUnavailable) as error:
                self._lose(holder, error)
            except SourceChanged as error:
                if holder.peer is None:
                    raise
                self._lose(holder, error)
            finally:
                holder.end(self._clock())
                run.end(part)

    def _lose(self, holder: Holder, error: Exception) -> None:
        """Raises the source's error where no holder is left."""
        holder.lost = error
        if holder.peer is None and not self._living():
            raise error
        log.warning("the fetch of %s stops reading from %s: %s", self._writer.region.digest[:12], holder.name, error)

    def _drop_slow(self) -> None:
        now_s = self._clock()
        best = max((one.rate(now_s) for one in self._holders if one.lost is None), default=0.0)
        for one in self._holders:
            is_slow = one.seconds(now_s) >= SLOW_AFTER_S and one.rate(now_s) < SLOW_RATIO * best
            if one.peer is not None and one.lost is None and is_slow:
                self._lose(one, SourceInterrupted(f"it is slow: {one.rate(now_s):.0f} bytes/s beside {best:.0f}"))

    async def _look_again(self, holder: Holder) -> None:
        """Refresh the holding of a peer that is still fetching."""
        now_s = self._clock()
        if holder.peer is None or holder.landed is None or holder.lost is not None or now_s - holder.looked_at < LOOK_S:
            return
        holder.looked_at = now_s
        try:
            holding = await holder.peer.look(again=True)
        except SourceInterrupted as error:
            self._lose(holder, error)
            return
        if holding is None or len(holding.landed) != len(holder.landed):
            self._lose(holder, SourceInterrupted("it no longer has them"))
        else:
            holder.landed = holding.landed if 0 in holding.landed else None

    async def _bring_part(self, run: "_Run", holder: Holder, part: Part) -> None:
        asked = part.num_bytes_left
        self._link.begin(asked)
        num_failures = 0
        try:
            while part.position < part.last and holder.lost is None:
                position = part.position
                failure: Exception = SourceInterrupted(f"{holder.name} ended early at byte {position}")
                try:
                    await self._stream(run.parts, holder, part)
                except SourceInterrupted as error:
                    failure = error
                if part.position < part.last and holder.lost is None:
                    has_come = part.position > position and not isinstance(failure, SourceSlow)
                    num_failures = 1 if has_come else num_failures + 1
                    if holder.peer is not None:
                        raise failure
                    await self._back_off(num_failures, failure)
        finally:
            self._link.end(asked - part.num_bytes)

    async def _stream(self, parts: PartQueue, holder: Holder, part: Part) -> None:
        """Read by whole pieces where the holder has checksums, until another holder takes over."""
        position, end = self._bounds(holder, part)
        chunks = holder.peer.read(position, end) if holder.peer else self._read_source(holder, position, end)
        landing = _Landing(self._writer, holder, position)
        async with aclosing(not_slower(chunks, holder.name, self._slow_s)) as coming:
            async for chunk in coming:
                limit = max(0, self._bounds(holder, part)[1] - position)  # 0: cut off before bytes that have arrived
                piece = chunk[:limit]
                if not piece or holder.lost is not None:
                    break  # past the request, or no longer wanted
                first = landing.position
                await landing.take(piece)
                position += len(piece)
                if holder.peer is not None:
                    self.from_peers.add(first, landing.position)
                parts.moved(part, landing.position, self._clock())
                part.num_bytes += len(piece)
                holder.num_bytes += len(piece)
                self._tally.num_bytes += len(piece)
                self._tally.by_holder[holder.name] = self._tally.by_holder.get(holder.name, 0) + len(piece)
                fetch = self._writer.region.digest
                await self._link.take(len(piece), self._tally.priority, fetch, is_remote=holder.is_remote)
                if len(piece) < len(chunk):
                    break

    def _bounds(self, holder: Holder, part: Part) -> tuple[int, int]:
        layout = self._writer.layout
        assert layout is not None
        return layout.rounded(part.position, part.last) if holder.digests else (part.position, part.last)

    async def _read_source(self, holder: Holder, first: int, last: int) -> AsyncGenerator[Chunk, None]:
        """Read file after file; end where one ends early."""
        assert holder.source is not None
        while first < last:
            index = self._writer.file_at(first)
            file, start = self._writer.info.files[index], self._writer.file_start(index)
            end = min(last, self._writer.file_end(index))
            async with aclosing(holder.source.read(file, first - start, end - start)) as chunks:
                async for chunk in chunks:
                    landing = chunk[: end - first]
                    if not landing:
                        break
                    yield landing
                    first += len(landing)
            if first < end:
                return

    async def close(self) -> None:
        for one in self._joining:
            one.cancel()
        await asyncio.gather(*self._joining, return_exceptions=True)


class _Run:
    def __init__(self, parts: PartQueue) -> None:
        self.parts = parts
        self.group: asyncio.TaskGroup | None = None
        self.tasks: list[asyncio.Task[None]] = []
        self._done = asyncio.Event()

    async def idle(self) -> None:
        try:
            async with asyncio.timeout(IDLE_S):
                await self._done.wait()
        except TimeoutError:
            return

    def end(self, part: Part) -> None:
        self.parts.end(part)
        if self.parts.is_done:
            self._done.set()


class _Landing:
    """Lands bytes at once without checksums, else by whole pieces, with which the read then begins and ends."""

    def __init__(self, writer: RegionWriter, holder: Holder, position: int) -> None:
        self._writer, self._holder, self.position = writer, holder, position
        self._waiting = bytearray()

    async def take(self, chunk: Chunk) -> None:
        """Raises WrongPiece."""
        if not self._holder.digests:
            self._writer.write(self.position, chunk)
            self.position += len(chunk)
            return
        layout, view = self._writer.layout, memoryview(chunk)
        assert layout is not None
        while view:
            index = self.position // layout.piece_bytes
            first, last = layout.piece(index)
            taken = view[: last - first - len(self._waiting)]
            view = view[len(taken) :]
            if len(taken) == last - first:
                await self._land(index, taken)
                continue
            self._waiting += taken
            if len(self._waiting) < last - first:
                return
            content, self._waiting = self._waiting, bytearray()
            await self._land(index, content)

    async def _land(self, index: int, content: bytearray | memoryview) -> None:
        layout, expected = self._writer.layout, self._holder.digests[index]
        assert layout is not None
        first, last = layout.piece(index)
        if not await asyncio.to_thread(is_piece, content, expected):
            raise WrongPiece(self._holder.name, index, first, last)
        self._writer.write(first, content)
        self._writer.checked_pieces[index] = expected
        self.position = last


def distinct(ranges: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Keep the order; drop from each range its overlap with earlier ones."""
    taken, found = Intervals(), []
    for first, last in ranges:
        found += taken.gaps(first, last)
        taken.add(first, last)
    return found


def _first(errors: BaseExceptionGroup[BaseException]) -> BaseException:
    inner = errors.exceptions[0]
    return _first(inner) if isinstance(inner, BaseExceptionGroup) else inner
