"""Usage over REST: `/v1/usage`, and OpenAI's `/v1/organization/usage/completions` and `/v1/organization/costs`.

In OpenAI's routes a project is a tenant, and a key's id its prefix (`gp-<id>`). Costs are at present prices; a model
without a price costs nothing."""

import asyncio
import contextlib
import csv
import io
import logging
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import replace
from datetime import UTC, datetime
from typing import Annotated, Any, Final

from fastapi import APIRouter, Query, Request
from fastapi.responses import Response
from sqlalchemy.exc import SQLAlchemyError

from glowplug.bus.port import Bus
from glowplug.domain.access import prefix_of
from glowplug.domain.errors import BadRequest, NoCapacity
from glowplug.domain.model import model_key
from glowplug.domain.units import parse_seconds
from glowplug.events import Event
from glowplug.events.facts import UsageRecorded
from glowplug.events.subjects import among_facts, facts_of
from glowplug.services.console.metrics import ConsoleMetrics
from glowplug.services.console.records import json_response
from glowplug.services.console.usage_ledger import HOUR_S, SUMS, UsageLedger, UsageQuery
from glowplug.services.console.usage_prices import PriceFile, Prices

# Usage records go from the bus into the ledger, and are acknowledged once committed. Consoles share one reader's name
# and thus the records; several of them need one database.

log = logging.getLogger(__name__)
# Versions up to 0.2 published among all facts; those are read first.
FILTERS: Final = {"usage-ledger": among_facts("usage.recorded"), "usage-records": facts_of("usage.recorded")}
RETRY_S: Final = 1.0
FORGET_EVERY_S: Final = 3600.0
KEPT_DAY_S: Final = 86400.0


class UsageReader:
    def __init__(
        self,
        ledger: UsageLedger,
        metrics: ConsoleMetrics,
        kept_days: float,
        clock: Callable[[], float],
        retry_s: float = RETRY_S,
    ) -> None:
        self._ledger, self._metrics, self._kept_days = ledger, metrics, kept_days
        self._clock, self._retry_s = clock, retry_s
        self.problem = ""

    async def listen(self, bus: Bus) -> None:
        for durable, filter_ in FILTERS.items():
            await bus.subscribe((filter_,), self.take, durable=durable, patient=True)

    async def take(self, event: Event) -> None:
        """Commit a batch, however long the database needs."""
        data = event.data
        assert isinstance(data, UsageRecorded)
        while True:
            try:
                num = await asyncio.to_thread(self._ledger.add, data.records)
            except SQLAlchemyError as error:
                self._failed(error)
                await asyncio.sleep(self._retry_s)
                continue
            if self.problem:
                log.warning("the usage ledger accepts records again")
                self.problem = ""
            self._metrics.usage_records.inc(num)
            self._metrics.usage_repeated.inc(len(data.records) - num)
            return

    async def forget(self) -> None:
        while True:
            try:
                num = await asyncio.to_thread(self._ledger.forget, self._clock() - self._kept_days * KEPT_DAY_S)
                if num:
                    log.info("deleted %d usage records older than %g days; their totals stay", num, self._kept_days)
            except SQLAlchemyError as error:
                self._failed(error)
            await asyncio.sleep(FORGET_EVERY_S)

    def _failed(self, error: SQLAlchemyError) -> None:
        # Later lines hold the statement and its values.
        self._metrics.ledger_failures.inc()
        reason = str(error).splitlines()[0]
        if not self.problem:
            log.error("the usage ledger cannot use its database and tries again: %s", reason)
        self.problem = reason


WIDTHS: Final = {"1m": (60, 60, 1440), "1h": (3600, 24, 168), "1d": (86400, 7, 31)}  # seconds, buckets, most buckets
DAY_S: Final = 86400
MAX_COST_DAYS: Final = 180
BY: Final = {"tenant": "tenant", "key": "key_id", "model": "model_key", "hour": "", "day": ""}
GROUPS: Final = {"project_id": "tenant", "api_key_id": "key_id", "model": "model_key"}
OTHERS: Final = ("user_id", "batch")  # OpenAI's, missing in our records
Texts = Annotated[list[str], Query()]
Row = dict[str, Any]


class Usage:
    """Raises NoCapacity (503) if the database is down."""

    def __init__(self, ledger: UsageLedger, prices: PriceFile, clock: Callable[[], float]) -> None:
        self._ledger, self._prices, self.clock = ledger, prices, clock

    async def sums(self, question: UsageQuery) -> tuple[list[Row], str]:
        """Return rows by `question.by` with their `cost`, and the currency. The cost is None if no model of a row has a
        price."""
        asked = replace(question, by=(*question.by, *({"model_key"} - set(question.by))))

        def read() -> tuple[list[Row], Prices]:
            return self._ledger.sums(asked), self._prices.read()

        try:
            rows, prices = await asyncio.to_thread(read)
        except SQLAlchemyError as error:
            raise NoCapacity("the database of the usage ledger does not answer", retry_after_s=1) from error
        found: dict[tuple[Any, ...], Row] = {}
        for row in rows:
            key = (row["bucket"], *(row[name] for name in question.by))
            cost = prices.cost(row)
            if (whole := found.get(key)) is None:
                found[key] = {name: row[name] for name in ("bucket", *question.by, *SUMS)} | {"cost": cost}
                continue
            for name in SUMS:
                if row[name] is not None:
                    whole[name] = (whole[name] or 0) + row[name]
            whole["cost"] = cost if whole["cost"] is None else whole["cost"] + (cost or 0.0)
        return list(found.values()), prices.currency


def routes(usage: Usage) -> APIRouter:
    router = APIRouter(prefix="/v1", tags=["usage"])
    _plain_route(router, usage)
    _completions_route(router, usage)
    _costs_route(router, usage)
    return router


def _plain_route(router: APIRouter, usage: Usage) -> None:
    @router.get("/usage", responses={200: {"content": {"text/csv": {}}}})
    async def plain(
        request: Request,
        by: Texts = ["tenant", "model"],  # noqa: B006 - FastAPI copies it
        since: str = "7d",
        until: str = "",
        models: Texts = [],  # noqa: B006
        tenants: Texts = [],  # noqa: B006
        format: str = "",
    ) -> Response:
        """Sums of requests, tokens, held seconds, GPU-seconds (null: unknown) and cost by tenant, model, key, hour and
        day (of UTC), over whole hours, or by day alone over whole days. `since` and `until`: seconds since the epoch,
        a date, or so long ago (`90m`, `24h`, `7d`). As CSV with `format=csv` or `Accept: text/csv`."""
        names = _known("by", _listed(by), BY)
        now_s = usage.clock()
        width_s = HOUR_S if "hour" in names or "day" not in names else DAY_S
        start = _moment("since", since, now_s) // width_s * width_s
        end = -(-(_moment("until", until, now_s) if until else int(now_s) + 1) // width_s) * width_s
        if start >= end:
            raise BadRequest("`since` is not before `until`", param="since")
        question = UsageQuery(
            start=start,
            end=end,
            by=tuple(BY[name] for name in names if BY[name]),
            width_s=width_s if {"hour", "day"} & set(names) else 0,
            models=_keys_of(models),
            tenants=_listed(tenants),
        )
        rows, currency = await usage.sums(question)
        data = [_plain_row(row, names) for row in rows]
        if format == "csv" or (not format and "text/csv" in request.headers.get("accept", "")):
            return Response(_csv([*names, *SUMS, "cost"], data), media_type="text/csv; charset=utf-8")
        page = {"object": "list", "since": start, "until": end, "by": names, "currency": currency, "data": data}
        return json_response(page)


def _completions_route(router: APIRouter, usage: Usage) -> None:
    @router.get("/organization/usage/completions")
    async def completions(
        request: Request,
        start_time: Annotated[int, Query(ge=0)],
        end_time: Annotated[int | None, Query(ge=0)] = None,
        bucket_width: str = "1d",
        limit: Annotated[int | None, Query(ge=1)] = None,
        page: str = "",
    ) -> Response:
        """Token usage in buckets, as OpenAI's organization usage API answers it. `group_by`: model, project_id (the
        tenant), api_key_id; `models`, `project_ids` and `api_key_ids` choose."""
        if bucket_width not in WIDTHS:
            raise BadRequest(f"bucket_width: expected one of {', '.join(WIDTHS)}", param="bucket_width")
        width_s, usual, most = WIDTHS[bucket_width]
        question, last = _buckets(usage.clock(), start_time, end_time, width_s, min(limit or usual, most), page)
        groups = _known("group_by", _given(request, "group_by"), {**GROUPS, **dict.fromkeys(OTHERS, "")})
        question = replace(
            question,
            by=tuple(GROUPS[name] for name in groups if name in GROUPS),
            models=_keys_of(_given(request, "models")),
            tenants=_given(request, "project_ids"),
            keys=tuple(key.removeprefix("gp-") for key in _given(request, "api_key_ids")),
        )
        rows, _ = await usage.sums(question)
        return json_response(_page(question, last, rows, _completions_result))


def _costs_route(router: APIRouter, usage: Usage) -> None:
    @router.get("/organization/costs")
    async def costs(
        request: Request,
        start_time: Annotated[int, Query(ge=0)],
        end_time: Annotated[int | None, Query(ge=0)] = None,
        bucket_width: str = "1d",
        limit: Annotated[int, Query(ge=1, le=MAX_COST_DAYS)] = 7,
        page: str = "",
    ) -> Response:
        """Costs by the day, as OpenAI's API answers them. `group_by`: project_id (the tenant), line_item (the
        model)."""
        if bucket_width != "1d":
            raise BadRequest("bucket_width: expected 1d, the only width of costs", param="bucket_width")
        question, last = _buckets(usage.clock(), start_time, end_time, WIDTHS["1d"][0], limit, page)
        fields = {"project_id": "tenant", "line_item": "model_key"}
        groups = _known("group_by", _given(request, "group_by"), fields)
        question = replace(question, by=tuple(fields[name] for name in groups), tenants=_given(request, "project_ids"))
        rows, currency = await usage.sums(question)

        def result(row: Row) -> Row:
            return {
                "object": "organization.costs.result",
                "amount": {"value": row["cost"] or 0.0, "currency": currency},
                "line_item": row.get("model_key"),
                "project_id": row.get("tenant"),
            }

        return json_response(_page(question, last, rows, result))


def _buckets(now_s: float, start: int, end: int | None, width_s: int, limit: int, page: str) -> tuple[UsageQuery, int]:
    """Return the question for one page, and the end of the last page. A page's name is its first second; buckets are
    whole minutes, hours or days of UTC."""
    if page and not page.isdecimal():
        raise BadRequest("page is the `next_page` of an answer", param="page")
    first = int(page or start) // width_s * width_s
    last = -(-(int(now_s) + 1 if end is None else end) // width_s) * width_s
    if first >= last:
        raise BadRequest("start_time is not before end_time", param="start_time")
    return UsageQuery(start=first, end=min(last, first + limit * width_s), width_s=width_s), last


def _page(question: UsageQuery, last: int, rows: Iterable[Row], result: Callable[[Row], Row]) -> Row:
    results: defaultdict[int, list[Row]] = defaultdict(list)
    for row in rows:
        results[row["bucket"]].append(result(row))
    buckets = [
        {"object": "bucket", "start_time": at, "end_time": at + question.width_s, "results": results[at]}
        for at in range(question.start, question.end, question.width_s)
    ]
    has_more = question.end < last
    return {
        "object": "page",
        "data": buckets,
        "has_more": has_more,
        "next_page": str(question.end) if has_more else None,
    }


def _completions_result(row: Row) -> Row:
    key_id = row.get("key_id")
    return {
        "object": "organization.usage.completions.result",
        "input_tokens": row["prompt_tokens"],
        "output_tokens": row["response_tokens"],
        "input_cached_tokens": row["cached_tokens"],
        "input_audio_tokens": 0,
        "output_audio_tokens": 0,
        "num_model_requests": row["num_requests"],
        "project_id": row.get("tenant"),
        "user_id": None,
        "api_key_id": prefix_of(key_id) if key_id else key_id,
        "model": row.get("model_key"),
        "batch": None,
    }


def _plain_row(row: Row, names: Iterable[str]) -> Row:
    moment = datetime.fromtimestamp(row["bucket"], UTC)
    key: dict[str, Any] = {"hour": moment.strftime("%Y-%m-%dT%H:00Z"), "day": moment.strftime("%Y-%m-%d")}
    key |= {name: row.get(field) for name, field in BY.items() if field}
    if key["key"]:
        key["key"] = prefix_of(key["key"])
    return {name: key[name] for name in names} | {name: row[name] for name in (*SUMS, "cost")}


def _csv(columns: list[str], rows: Iterable[Row]) -> str:
    out = io.StringIO()
    writer = csv.DictWriter(out, columns, lineterminator="\r\n")
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()


def _given(request: Request, name: str) -> tuple[str, ...]:
    """Repeated as `name` or `name[]`."""
    return _listed([*request.query_params.getlist(name), *request.query_params.getlist(f"{name}[]")])


def _listed(values: Iterable[str]) -> tuple[str, ...]:
    return tuple(part.strip() for value in values for part in value.split(",") if part.strip())


def _known(param: str, names: Iterable[str], known: Iterable[str]) -> list[str]:
    found = list(dict.fromkeys(names))
    if unknown := [name for name in found if name not in known]:
        raise BadRequest(f"{param}: {unknown[0][:80]!r} is not one of {', '.join(known)}", param=param)
    return found


def _keys_of(models: Iterable[str]) -> tuple[str, ...]:
    try:
        return tuple(model_key(name) for name in _listed(models))
    except ValueError as error:
        raise BadRequest(str(error), param="models") from error


def _moment(param: str, text: str, now_s: float) -> int:
    if text.isdecimal() and len(text) < 12:
        return int(text)
    try:
        if text[-1:].isalpha() and not text.startswith("-"):
            with contextlib.suppress(ValueError):
                return max(0, int(now_s - parse_seconds(text)))
        moment = datetime.fromisoformat(text)
        return max(0, int((moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()))
    except (ValueError, OverflowError) as error:
        raise BadRequest(f"{param}: {text[:32]!r} is not epoch seconds, a date or an age (7d)", param=param) from error
