"""Does NATS still store what it is sent? A server whose disk was full answers everything and stores nothing."""

import asyncio
import logging
from collections.abc import Awaitable, Callable

log = logging.getLogger(__name__)

CHECK_EVERY_S = 1.0  # a stream that refused is asked again, until it stores
CHECK_QUIET_S = 5.0  # a stream is asked when nothing has been stored in it for so long, by those who must know
CHECK_HEADER = "Glowplug-Check"  # a message that carries it is no event, and no reader's business
NOT_STORED = "the bus answers and stores no events (a full disk does this)"

Store = Callable[[str], Awaitable[None]]


class Storing:
    """Which streams refuse, and since when others have been quiet.

    `store(stream)` sends a check message there and raises when it is not stored; `answers()` says whether the server
    answers at all: a server that does not is lost, which the connection notices by itself. `watched` streams are asked
    when they are idle, so that a refusal is known before the stream is needed.
    """

    def __init__(
        self,
        store: Store,
        answers: Callable[[], Awaitable[bool]],
        refused: tuple[type[BaseException], ...],
        watched: tuple[str, ...] = (),
        *,
        check_every_s: float = CHECK_EVERY_S,
        quiet_s: float = CHECK_QUIET_S,
    ) -> None:
        self._check_every_s, self._quiet_s = check_every_s, quiet_s
        self._store, self._answers, self._refused = store, answers, refused
        self._stored_at: dict[str, float] = dict.fromkeys(watched, 0.0)
        self._watched = watched
        self._refusals: dict[str, str] = {}

    @property
    def refusal(self) -> str:
        """Why the bus stores no events though it answers, or ""."""
        return next(iter(self._refusals.values()), "")

    def of(self, stream: str) -> str:
        """The same of one stream."""
        return self._refusals.get(stream, "")

    def stored(self, stream: str, now_s: float) -> None:
        """The stream has taken a message."""
        self._stored_at[stream] = now_s
        if self._refusals.pop(stream, ""):
            log.info("%s stores events again", stream)

    async def refused(self, stream: str, error: BaseException) -> None:
        """The stream has not taken a message. A connection that is lost, or a server that stood still for a while, is
        not meant: so a server that answers is asked once more."""
        if stream in self._refusals or not await self._answers():
            return
        try:
            await self._store(stream)
        except self._refused:
            said = NOT_STORED if isinstance(error, TimeoutError) else f"{NOT_STORED}: {error}"
            self._refusals[stream] = said
            log.error("%s: %s", stream, said)

    def reset(self) -> None:
        """Another server, or the same one started again: what the last one refused says nothing of it."""
        self._refusals.clear()

    async def watch(self, connected: Callable[[], bool]) -> None:
        """For ever: ask those that refuse, and those that are watched and quiet."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(self._check_every_s)
            quiet_since = loop.time() - self._quiet_s
            quiet = {stream for stream in self._watched if self._stored_at[stream] < quiet_since}
            for stream in sorted(quiet | self._refusals.keys()):
                if connected():
                    await self._check(stream, loop)

    async def _check(self, stream: str, loop: asyncio.AbstractEventLoop) -> None:
        try:
            await self._store(stream)
        except self._refused as error:
            await self.refused(stream, error)
        else:
            self.stored(stream, loop.time())
