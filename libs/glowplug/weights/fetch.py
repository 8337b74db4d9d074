"""One fetch of weights into a region: in reading order, from several holders, resumed, rate-limited, checked.

A region is complete only after size and checksum hold, so that nothing corrupt is ever served.
"""

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass

from glowplug.domain.errors import ChecksumMismatch, WeightsUnavailable
from glowplug.domain.gguf import NeedMore
from glowplug.domain.model import WeightsRef
from glowplug.weights.link import LinkMeter
from glowplug.weights.order import Header, RangeKind, ReadingOrder, has_header, offset_order, read_header, reading_order
from glowplug.weights.order import stage_ranges as ranges_of_stage
from glowplug.weights.region import Region, RegionInfo
from glowplug.weights.source import Source, SourceChanged, SourceInfo, SourceInterrupted, not_slower, redacted
from glowplug.weights.transfer import Holder, Peer, PeerFiles, Transfer, TransferCounts, WrongPiece
from glowplug.weights.writer import Digester, RegionWriter

log = logging.getLogger(__name__)
FILE = "file"


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchOptions:
    """`max_attempts` counts successive tries without a byte."""

    part_bytes: int = 16 << 20
    max_parts: int = 4
    max_attempts: int = 5
    max_mismatches: int = 1  # refetches after a wrong checksum
    backoff_first_s: float = 0.1
    backoff_cap_s: float = 5.0
    timeout_s: float = 3600.0
    slow_s: float = 30.0  # of waiting for too few bytes: a try without any
    peer_parts: int = 2  # of one peer, in parallel
    peer_ask_s: float = 2.0  # a slower peer is left out


class PiecesWrong(Exception):
    """All has landed except pieces that differ from the source's own checksums."""

    def __init__(self, wrong: Sequence[WrongPiece]) -> None:
        super().__init__(f"{len(wrong)} pieces are damaged; the first: {wrong[0]}")


class PeerMismatch(Exception):
    """The whole is wrong, with bytes from peers or by a peer's checksum alone; the peers' bytes have been dropped."""


class Fetch:
    """Runs once. `on_sized(num_bytes)` requests memory once the size is known (0: unknown), and returns the granted
    bytes or raises NoSpace. With `num_stages`, only stage `stage` is fetched; without known layers, all of a
    directory, since its engine opens every file, or bytes [first_byte, last_byte) of a single file (0: to the
    end). `piece_digests` are the source's own."""

    def __init__(
        self,
        ref: WeightsRef,
        region: Region,
        source: Source,
        link: LinkMeter,
        on_sized: Callable[[int], Awaitable[int]],
        *,
        options: FetchOptions = FetchOptions(),
        rng: random.Random | None = None,
        priority: int = 0,
        first_byte: int = 0,
        last_byte: int = 0,
        stage: int = 0,
        num_stages: int = 1,
        peers: Sequence[Peer] = (),
        piece_digests: tuple[str, ...] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._ref, self.region, self._source, self._link = ref, region, source, link
        self._on_sized, self._options, self._clock = on_sized, options, clock
        self._rng = rng or random.Random(region.digest)
        self._first_byte, self._last_byte = first_byte, last_byte
        self._stage, self._num_stages = stage, num_stages
        self._peers, self._digests = tuple(peers), piece_digests
        self.tally = TransferCounts(priority=priority)
        self.num_bytes = ref.num_bytes
        self.num_bytes_resumed = 0
        self.seconds = 0.0
        self._writer: RegionWriter | None = None
        self._sha256_of_peers = ""  # of a complete peer, where the reference has no checksum

    @property
    def landed(self) -> list[tuple[int, int]]:
        return self._writer.landed.as_list() if self._writer else []

    @property
    def num_bytes_landed(self) -> int:
        return self._writer.landed.total if self._writer else 0

    async def run(self) -> RegionInfo | None:
        """Return None when only a part was requested and the rest is missing. Raises WeightsUnavailable,
        ChecksumMismatch, NoSpace, PiecesWrong; cancelling keeps landed bytes."""
        started, peers = self._clock(), self._peers
        try:
            async with asyncio.timeout(self._options.timeout_s):
                return await self._until_whole(started)
        except TimeoutError as error:
            raise WeightsUnavailable(
                f"{redacted(self._ref.uri)}: not all after {self._options.timeout_s:g} s"
            ) from error
        finally:
            self.seconds = self._clock() - started
            await asyncio.gather(*(peer.close() for peer in peers), return_exceptions=True)

    async def _until_whole(self, started: float) -> RegionInfo | None:
        num_mismatches = num_failures = 0
        while True:
            try:
                return await self._attempt(started)
            except PeerMismatch as error:  # at most once: no peers remain
                log.warning("the fetch of %s continues without other nodes: %s", self.region.digest[:12], error)
            except ChecksumMismatch as error:
                self.region.clear_bytes()
                num_mismatches += 1
                if num_mismatches > self._options.max_mismatches:
                    raise
                log.warning("the fetch of %s starts over: %s", self.region.digest[:12], error)
            except (SourceInterrupted, SourceChanged) as error:
                if isinstance(error, SourceChanged):
                    self.region.clear_bytes()
                num_failures += 1
                await self._back_off(num_failures, error)

    async def _back_off(self, num_failures: int, error: Exception) -> None:
        """Capped exponential with full jitter. Raises WeightsUnavailable after the last try."""
        if num_failures >= self._options.max_attempts:
            raise WeightsUnavailable(f"{error} (given up after {num_failures} tries)") from error
        ceiling = min(self._options.backoff_cap_s, self._options.backoff_first_s * 2 ** (num_failures - 1))
        log.info("the fetch of %s has failed at try %d: %s", self.region.digest[:12], num_failures, error)
        self.tally.num_retries += 1
        await asyncio.sleep(self._rng.uniform(0, ceiling))

    async def _attempt(self, started: float) -> RegionInfo | None:
        looks = {peer: asyncio.create_task(self._look(peer)) for peer in self._peers}
        try:
            info, lost = await self._sized(looks)
            _check_size(self._ref, info.num_bytes, redacted(self._ref.uri))
            if info.ranges and not info.num_bytes:
                raise WeightsUnavailable(f"{redacted(self._ref.uri)} is empty")
            self.num_bytes = info.num_bytes
            writer = RegionWriter(self.region, self._ref, info, await self._on_sized(info.num_bytes))
            self.num_bytes_resumed = await asyncio.to_thread(writer.open)
            self._writer = writer
            return await self._filled(writer, looks, lost, started)
        finally:
            for look in looks.values():
                look.cancel()
            await asyncio.gather(*looks.values(), return_exceptions=True)

    async def _filled(
        self, writer: RegionWriter, looks: "Looks", lost: Exception | None, started: float
    ) -> RegionInfo | None:
        # No other node reads a local file: its piece checksums would only delay the start.
        digester = Digester(writer, with_pieces=self._source.scheme != FILE)
        origin = Holder(
            self._source.scheme, self._options.max_parts, source=self._source, digests=self._digests, lost=lost
        )
        joining = [self._joined(peer, look, writer.info) for peer, look in looks.items()]
        transfer = Transfer(
            writer,
            self._link,
            self.tally,
            origin,
            joining,
            self._back_off,
            part_bytes=self._options.part_bytes,
            slow_s=self._options.slow_s,
            clock=self._clock,
        )
        try:
            sha256 = await self._transfer(writer, digester, transfer)
            if sha256 is None:
                self._complete_stage(writer, started)
                return None
            return self._complete(writer, digester, sha256, started)
        except ChecksumMismatch as error:
            is_peers_word = bool(self._sha256_of_peers) and not self._ref.sha256
            if not transfer.from_peers.total and not is_peers_word:
                raise
            self._peers, self._sha256_of_peers = (), ""
            await asyncio.to_thread(self._retract, writer, transfer, is_peers_word=is_peers_word)
            raise PeerMismatch(str(error)) from error
        finally:
            await transfer.close()
            try:
                if self.region.directory.is_dir():
                    writer.save()
            except OSError as error:  # full memory: less will be resumed
                log.warning("the fetch of %s cannot record which bytes have landed: %s", self.region.digest[:12], error)
            writer.close()

    def _retract(self, writer: RegionWriter, transfer: Transfer, *, is_peers_word: bool) -> None:
        """Drop the peers' bytes; where only a peer's checksum differs, also those of an earlier try, whose origin is
        unknown."""
        lost = transfer.from_peers.as_list()
        if is_peers_word and self.num_bytes_resumed:
            lost = [(0, writer.num_bytes)]
        if lost:
            writer.retract(lost)

    def _complete(self, writer: RegionWriter, digester: Digester, sha256: str, started: float) -> RegionInfo:
        """Raises ChecksumMismatch."""
        self.num_bytes = writer.num_bytes
        _check_size(self._ref, writer.num_bytes, redacted(self._ref.uri))
        wanted = self._ref.sha256.lower() or self._sha256_of_peers
        if wanted and sha256 != wanted:
            raise ChecksumMismatch(f"{redacted(self._ref.uri)}: sha256 is {sha256}, expected {wanted}")
        done = self._info(writer, writer.num_bytes, sha256, started)
        if writer.layout is not None and digester.piece_digests:
            self.region.write_piece_digests(writer.layout, digester.piece_digests)
        self.region.complete(done)
        return done

    def _complete_stage(self, writer: RegionWriter, started: float) -> None:
        if self._num_stages > 1:
            info = self._info(writer, writer.landed.total, "", started)
            self.region.complete_stage(info, self._stage, self._num_stages)

    def _info(self, writer: RegionWriter, num_bytes: int, sha256: str, started: float) -> RegionInfo:
        return RegionInfo(
            path=str(writer.path().absolute()),
            num_bytes=num_bytes,
            sha256=sha256,
            source=self._source.scheme,
            seconds=self._clock() - started,
            stage_bytes=self.region.stage_bytes(),
        )

    async def _look(self, peer: Peer) -> PeerFiles | None:
        try:
            async with asyncio.timeout(self._options.peer_ask_s):
                return await peer.look()
        except (SourceInterrupted, TimeoutError) as error:
            log.info(
                "the peer %s cannot say which part of %s it has: %s",
                peer.name,
                self.region.digest[:12],
                error or "no answer in time",
            )
            return None

    async def _sized(self, looks: "Looks") -> tuple[SourceInfo, Exception | None]:
        """Ask the source; while it does not answer, a complete peer, and return the source's error too."""
        try:
            return await self._source.probe(), None
        except SourceInterrupted as error:
            for look in looks.values():
                if (holding := await look) is not None and holding.is_complete:
                    return SourceInfo(files=holding.files, ranges=True), error
            raise

    async def _joined(self, peer: Peer, look: "asyncio.Task[PeerFiles | None]", info: SourceInfo) -> Holder | None:
        """Return a holder, if its bytes are the wanted ones: same checksum, else same validators."""
        holding = await look
        if holding is None or not info.ranges:
            return None
        mine = [(f.path, f.num_bytes) for f in info.files]
        is_same = mine == [(f.path, f.num_bytes) for f in holding.files]
        if not self._ref.sha256:
            is_same = holding.files == info.files and all(f.validator for f in info.files)
        if not is_same:
            log.info(
                "the peer %s has different bytes of %s: the fetch does not use them", peer.name, self.region.digest[:12]
            )
            return None
        self._sha256_of_peers = self._sha256_of_peers or holding.sha256
        landed = holding.landed if 0 in holding.landed else None
        readers = self._options.peer_parts
        return Holder(peer.name, readers, peer=peer, landed=landed, digests=holding.digests)

    async def _transfer(self, writer: RegionWriter, digester: Digester, transfer: Transfer) -> str | None:
        """Return the digest, or None while other bytes are missing."""
        digest = asyncio.create_task(digester.run())
        try:
            if not writer.info.ranges:
                await self._whole(writer)
            else:
                await self._parts(writer, transfer)
            if transfer.wrong:
                raise PiecesWrong(transfer.wrong)
            if writer.num_bytes and writer.landed.prefix_end < writer.num_bytes:
                return None
            return await digest
        finally:
            digester.stop()
            digest.cancel()
            await asyncio.wait([digest])

    async def _whole(self, writer: RegionWriter) -> None:
        """Read one stream from a server without ranges; a cut one restarts."""
        file, position = writer.info.files[0], 0
        self._link.begin(file.num_bytes)
        try:
            coming = not_slower(self._source.read(file, 0, 0), redacted(self._ref.uri), self._options.slow_s)
            async with aclosing(coming) as chunks:
                async for chunk in chunks:
                    writer.write(position, chunk)
                    position += len(chunk)
                    self.tally.num_bytes += len(chunk)
                    await self._link.take(len(chunk), self.tally.priority, self.region.digest)
        finally:
            self._link.end(file.num_bytes - position)
        if not position:
            raise WeightsUnavailable(f"{redacted(self._ref.uri)} is empty")
        if file.num_bytes and position < file.num_bytes:
            raise SourceInterrupted(f"{redacted(self._ref.uri)} ended after {position} of {file.num_bytes} bytes")
        writer.close_size()

    async def _parts(self, writer: RegionWriter, transfer: Transfer) -> None:
        whole = not self._first_byte and not self._last_byte
        if self._num_stages == 1 and not whole:
            await transfer.bring([self._range(writer)])
            return
        order = await self._order(writer, transfer)
        is_directory = writer.layout is not None and writer.layout.is_directory
        if self._num_stages > 1 and not order.num_layers and not is_directory:
            await transfer.bring([self._range(writer)])
            return
        try:
            ranges = await asyncio.to_thread(ranges_of_stage, order, self._stage, self._num_stages)
        except ValueError as error:
            raise WeightsUnavailable(f"{redacted(self._ref.uri)}: {error}") from error
        await transfer.bring([(one.first, one.last) for one in ranges])

    def _range(self, writer: RegionWriter) -> tuple[int, int]:
        return self._first_byte, min(self._last_byte or writer.num_bytes, writer.num_bytes)

    async def _order(self, writer: RegionWriter, transfer: Transfer) -> ReadingOrder:
        """Bring headers and small files; record the order for engines."""
        layout = writer.layout
        assert layout is not None
        small = [(one.first, one.last) for one in offset_order(layout).ranges if one.kind is RangeKind.FILES]
        files = [file for file in layout.files if has_header(file.path) and file.num_bytes]
        wanted = {file.path: min(file.num_bytes, layout.piece_bytes) for file in files}
        headers: dict[str, Header] = {}
        while wanted:
            heads = [(file.start, file.start + wanted[file.path]) for file in files if file.path in wanted]
            await transfer.bring([*small, *heads])
            for file in [file for file in files if file.path in wanted]:
                num_bytes = wanted.pop(file.path)
                content = await asyncio.to_thread(writer.read_all, file.start, num_bytes)
                if len(content) < num_bytes:
                    continue  # a damaged piece was skipped
                try:
                    header = await asyncio.to_thread(read_header, content, file.num_bytes)
                except NeedMore as more:
                    wanted[file.path] = min(file.num_bytes, max(more.num_bytes, 2 * num_bytes))
                    continue
                if header is not None:
                    headers[file.path] = header
        config = next((file for file in layout.files if file.path == "config.json"), None)
        content = writer.read_all(config.start, config.num_bytes) if config else b""
        order = reading_order(layout, headers, content)
        await asyncio.to_thread(self.region.write_order, order)
        return order


Looks = dict[Peer, "asyncio.Task[PeerFiles | None]"]


def _check_size(ref: WeightsRef, num_bytes: int, shown: str) -> None:
    if ref.num_bytes and num_bytes and ref.num_bytes != num_bytes:
        raise ChecksumMismatch(f"{shown}: {num_bytes} bytes, expected {ref.num_bytes}")
