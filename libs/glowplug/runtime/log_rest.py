"""Serve logs over REST: recent lines, filtered, followed by cursor."""

from typing import Annotated, Any, Final, Literal

from fastapi import APIRouter, Depends, Query
from pydantic import Field

from glowplug.telemetry.log_ring import LogFilter, LogRing, Page

PATH: Final = "/logs"
MOST_WAIT_S: Final = 25.0  # within proxies' patience
Word = Annotated[str, Field(max_length=200)]
Level = Literal["", "debug", "info", "warning", "error", "critical"]


def routes(ring: LogRing, allowed: Any, path: str = PATH) -> APIRouter:
    """`allowed`: dependency for readers of logs."""
    router = APIRouter(tags=["logs"], dependencies=[Depends(allowed)])

    @router.get(path)
    async def logs(
        after: Annotated[str, Query(max_length=64)] = "",
        level: Level = "",
        contains: Annotated[list[Word], Query(max_length=8)] = [],  # noqa: B006 - pydantic copies it
        id: Annotated[list[Word], Query(max_length=8)] = [],  # noqa: B006
        limit: Annotated[int, Query(ge=1, le=2000)] = 500,
        wait_s: Annotated[float, Query(ge=0, le=MOST_WAIT_S)] = 0.0,
    ) -> dict[str, Any]:
        """The newest lines of this process that fit, or, `after` a cursor, the oldest that came since; `wait_s` waits
        for one. `contains`: each of these words, in any case; `id`: one of these ids. `cursor` goes on from there;
        `num_lost` lines were dropped unread."""
        wanted = LogFilter(level, tuple(filter(None, contains)), tuple(filter(None, id)))
        if after and wait_s:
            await ring.wait(after, wait_s)
        return page_row(ring.read(after, wanted, limit))

    return router


def page_row(page: Page) -> dict[str, Any]:
    lines = [{"at": line.at, "level": line.level, "text": line.text, "fields": line.fields} for line in page.lines]
    return {"lines": lines, "cursor": page.cursor, "num_lost": page.num_lost}
