"""Logs of the whole fleet in one list, of processes and of engines by their agents.

Stateless: readers keep a cursor per source, and get every later line once. Lines are sorted by the clocks of several
machines."""

import asyncio
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final
from urllib.parse import urlencode

import msgspec
from fastapi import APIRouter, Request
from fastapi.responses import Response

from glowplug.domain.errors import BadRequest, GlowplugError, Unauthorized
from glowplug.domain.hardware import Node
from glowplug.runtime import log_rest
from glowplug.runtime.identity import ServiceHolder
from glowplug.services.console.records import json_response
from glowplug.services.console.upstream import Upstream, read_answer, read_body
from glowplug.telemetry.log_ring import LogFilter, LogRing

ANSWER_S: Final = 3.0
MAX_ANSWER_BYTES: Final = 4 << 20
MAX_ASKED_BYTES: Final = 256 << 10
AT_ONCE: Final = 32
GONE_S: Final = 60.0  # without a renewed claim, until a process counts as ended
SERVICES: Final = ("router", "autoscaler", "placer", "predictor", "prefetcher", "agent", "console")
ENGINES: Final = "engines"


class LogSource(msgspec.Struct, frozen=True, kw_only=True):
    """`name`: the service id, or "engines of <node>"."""

    name: str
    service: str
    url: str
    node: str = ""
    path: str = log_rest.PATH


class LogQuery(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`cursors` by source; none: the newest lines. `words`: all must match, `ids`: one."""

    cursors: dict[str, str] = {}
    service: str = ""
    node: str = ""
    level: str = ""
    words: list[str] = []
    ids: list[str] = []
    limit: int = 500


class LogLine(msgspec.Struct, frozen=True, kw_only=True):
    at: float
    level: str
    text: str
    fields: dict[str, str] = {}
    source: str = ""
    service: str = ""
    node: str = ""


class SourceRow(msgspec.Struct, frozen=True, kw_only=True):
    """`num_lost`: lines dropped unread."""

    name: str
    service: str
    node: str
    num_lost: int = 0
    problem: str = ""


class LogPage(msgspec.Struct, frozen=True, kw_only=True):
    lines: list[LogLine]
    cursors: dict[str, str]
    sources: list[SourceRow]


class _Answer(msgspec.Struct, kw_only=True):
    lines: list[LogLine]
    cursor: str
    num_lost: int = 0


class LogSources:
    """Sources of logs: processes by their claims to a service id, agents and engines by their nodes."""

    def __init__(self) -> None:
        self.processes: Mapping[str, ServiceHolder] = {}

    def find(self, nodes_now: Callable[[], Iterable[Node]], clock: Callable[[], float]) -> list[LogSource]:
        nodes, now_s = list(nodes_now()), clock()
        found = [
            LogSource(name=service_id, service=service_of(service_id), url=holder.url.rstrip("/"))
            for service_id, holder in self.processes.items()
            if holder.seen_at > now_s - GONE_S
        ]
        prefetchers = {node.prefetcher_url.rstrip("/"): node.node_id for node in nodes if node.prefetcher_url}
        found = [msgspec.structs.replace(one, node=prefetchers.get(one.url, "")) for one in found]
        for node in nodes:
            url = node.agent_url.rstrip("/")
            found.append(LogSource(name=f"agent-{node.node_id}", service="agent", url=url, node=node.node_id))
            path = f"{log_rest.PATH}/{ENGINES}"
            name = f"engines of {node.node_id}"
            found.append(LogSource(name=name, service=ENGINES, url=url, node=node.node_id, path=path))
        return sorted((one for one in found if one.url.startswith(("http://", "https://"))), key=lambda one: one.name)


def service_of(service_id: str) -> str:
    return next((one for one in SERVICES if service_id == one or service_id.startswith(f"{one}-")), service_id)


def is_wanted(source: LogSource, asked: LogQuery) -> bool:
    return asked.service in ("", source.service, source.name) and asked.node in ("", source.node)


class LogReader:
    """Ask the sources with the reader's token. `own`: this console's log; `may_read_own`: whether a token opens it."""

    def __init__(
        self,
        upstream: Upstream,
        own: LogRing,
        own_id: str,
        may_read_own: Callable[[str], bool],
        answer_s: float = ANSWER_S,
    ) -> None:
        self._upstream, self._own, self._answer_s = upstream, own, answer_s
        self._console = LogSource(name=own_id, service="console", url="")
        self._may_read_own = may_read_own
        self._slots = asyncio.Semaphore(AT_ONCE)

    async def read(self, sources: Iterable[LogSource], asked: LogQuery, token: str) -> LogPage:
        """Raises Unauthorized if every answering source wants another token."""
        wanted = [one for one in (*sources, self._console) if is_wanted(one, asked)]
        answers = await asyncio.gather(*(self._one(one, asked, token) for one in wanted))
        if (refused := [one for one in answers if isinstance(one, Unauthorized)]) and not any(
            isinstance(one, _Answer) for one in answers
        ):
            raise refused[0]
        lines: list[LogLine] = []
        cursors, rows = dict(asked.cursors), []
        for source, answer in zip(wanted, answers, strict=True):
            row = SourceRow(name=source.name, service=source.service, node=source.node)
            if isinstance(answer, _Answer):
                cursors[source.name] = answer.cursor
                row = msgspec.structs.replace(row, num_lost=answer.num_lost)
                named = {"source": source.name, "service": source.service, "node": source.node}
                lines += [msgspec.structs.replace(line, **named) for line in answer.lines]
            else:
                row = msgspec.structs.replace(row, problem=answer.message)
            rows.append(row)
        lines.sort(key=lambda line: line.at)
        is_first = not asked.cursors
        return LogPage(lines=lines[-asked.limit :] if is_first else lines, cursors=cursors, sources=rows)

    async def _one(self, source: LogSource, asked: LogQuery, token: str) -> _Answer | GlowplugError:
        after = asked.cursors.get(source.name, "")
        if not source.url:
            return self._read_own(after, asked, token)
        query = [("after", after), ("level", asked.level), ("limit", str(asked.limit))]
        query += [("contains", word) for word in asked.words] + [("id", one) for one in asked.ids]
        headers = {"authorization": token} if token else {}
        path = f"{source.path}?{urlencode([(name, value) for name, value in query if value])}"
        async with self._slots:
            try:
                answer = await self._upstream.open(
                    source.name, "GET", path, headers=headers, silence_s=self._answer_s, base=source.url
                )
                body = await read_answer(answer, MAX_ANSWER_BYTES)
                if answer.status_code in (401, 403):
                    return Unauthorized("the admin token is missing or wrong")
                if answer.status_code != 200:
                    return GlowplugError(f"{source.name} answered {answer.status_code}")
                return msgspec.json.decode(body, type=_Answer)
            except GlowplugError as error:
                return error
            except msgspec.MsgspecError as error:
                return GlowplugError(f"{source.name} answered with something that is not a log: {error}")

    def _read_own(self, after: str, asked: LogQuery, token: str) -> _Answer | GlowplugError:
        if not self._may_read_own(token):
            return Unauthorized("the admin token is missing or wrong")
        page = self._own.read(after, LogFilter(asked.level, tuple(asked.words), tuple(asked.ids)), asked.limit)
        return msgspec.convert(log_rest.page_row(page), _Answer)


def routes(reader: LogReader, find: Callable[[], list[LogSource]]) -> APIRouter:
    router = APIRouter(prefix="/api/v1", tags=["logs"])

    @router.post("/logs", response_class=Response, responses={401: {"description": "the admin token is missing"}})
    async def logs(request: Request) -> Response:
        """The newest lines of the fleet's logs, or those after the `cursors` of an earlier answer: `service`, `node`,
        `level`, `words` (each of them), `ids` (one of them), `limit` of each log. The admin token is passed on."""
        asked = read_asked(await read_body(request, MAX_ASKED_BYTES))
        page = await reader.read(find(), asked, request.headers.get("authorization", ""))
        return json_response(page)

    return router


def read_asked(body: bytes) -> LogQuery:
    """Raises BadRequest."""
    try:
        asked = msgspec.json.decode(body or b"{}", type=LogQuery)
    except msgspec.MsgspecError as error:
        raise BadRequest(str(error)) from error
    texts: list[tuple[str, int, Any]] = [
        ("words", 8, asked.words),
        ("ids", 8, asked.ids),
        ("cursors", 5000, asked.cursors),
    ]
    for name, most, given in texts:
        if len(given) > most or any(len(one) > 300 for one in given):
            raise BadRequest(f"{name}: at most {most}, each of at most 300 characters", param=name)
    if not 1 <= asked.limit <= 2000:
        raise BadRequest(f"limit: {asked.limit} is not from 1 to 2000", param="limit")
    return asked
