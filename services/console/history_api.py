"""History over REST: from this console's slots, or from Prometheus if a setting names one."""

import asyncio
from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, Any, Final, NamedTuple

import httpx
import msgspec
from fastapi import APIRouter, Query
from fastapi.responses import Response

from glowplug.domain.errors import BadRequest
from glowplug.domain.hardware import GrantOwner
from glowplug.domain.model import model_key
from glowplug.services.console.history import SPANS, ChartSeries, History, HistoryPage, known_metrics
from glowplug.services.console.records import json_response
from glowplug.telemetry import semconv

# The same metrics by range queries to a Prometheus that scrapes the fleet.

ANSWER_S: Final = 10.0
RATE_S: Final = 60  # least window of a rate: four scrapes of 15 s
MOST_LINES: Final = 16
POINTS: Final = 400
_GPU_OWNERS: Final = f'owner!~"{GrantOwner.SLEEPER.value}|{GrantOwner.RESERVATION.value}"'


class PromQuery(NamedTuple):
    """One line, or one for each value of `label`."""

    name: str
    text: str
    label: str = ""


def queries(metric: str, model: str, step_s: int) -> list[PromQuery]:
    """Return PromQL; a rate looks back over one step, or RATE_S if longer."""
    window = f"[{max(step_s, RATE_S)}s]"
    chosen = "{model=" + msgspec.json.encode(model).decode() + "}" if model else ""
    if metric == "tokens":
        counters = {"prompt": semconv.PROMPT_TOKENS_TOTAL, "response": semconv.RESPONSE_TOKENS_TOTAL}
        return [PromQuery(name, f"sum(rate({counter}{chosen}{window}))") for name, counter in counters.items()]
    if metric == "ttft":
        buckets = f"sum by (le) (rate({semconv.REQUEST_TTFT_SECONDS}_bucket{chosen}{window}))"
        return [PromQuery(f"p{share}", f"histogram_quantile({share / 100}, {buckets})") for share in (50, 95, 99)]
    if metric == "queue":
        gauges = {"waiting": semconv.REQUESTS_HELD, "running": semconv.REQUESTS_IN_FLIGHT}
        return [PromQuery(name, f"sum({gauge}{chosen})") for name, gauge in gauges.items()]
    if metric == "gpu":
        reserved = f'owner="{GrantOwner.RESERVATION.value}"'
        return [
            PromQuery("used", f"sum({semconv.GPU_BYTES}{{{_GPU_OWNERS}}})"),
            PromQuery("reserved", f"sum({semconv.GPU_BYTES}{{{reserved}}})"),
            PromQuery("capacity", f"sum({semconv.GPU_TOTAL_BYTES})"),
        ]
    if metric == "starts":
        return [PromQuery("starts", f"sum by (weights) (increase({semconv.STARTS_TOTAL}{chosen}{window}))", "weights")]
    counted = f"rate({semconv.REQUEST_TTFT_SECONDS}_count"
    labels = chosen[1:-1]
    hot = "{" + ", ".join(filter(None, (labels, 'temperature="hot"'))) + "}"
    return [PromQuery("warm", f"sum({counted}{hot}{window})) / sum({counted}{chosen}{window}))")]


async def read_page(
    client: httpx.AsyncClient, url: str, span: str, model: str, metrics: Iterable[str], now_s: float
) -> HistoryPage:
    """Return the page from Prometheus at `url`; its failures are in the page. Raises BadRequest for an unknown
    metric."""
    width_s, num_slots = SPANS[span]
    step_s = max(width_s, -(-width_s * num_slots // POINTS))
    last = int(now_s // step_s) * step_s
    times = list(range(last - (width_s * num_slots // step_s - 1) * step_s, last + 1, step_s))
    wanted = known_metrics(metrics, model)
    asked = [(name, query) for name in wanted for query in queries(name, model, step_s)]
    found: dict[str, list[ChartSeries]] = {name: [] for name in wanted}
    problem = ""
    try:
        answers = await asyncio.gather(*(_range(client, url, query.text, times, step_s) for _, query in asked))
        for (name, query), lines in zip(asked, answers, strict=True):
            found[name] += _series(query, lines, times)
    except httpx.HTTPError as error:
        problem = f"Prometheus does not answer at {url}: {type(error).__name__}"
    except (msgspec.MsgspecError, KeyError, TypeError, ValueError) as error:
        problem = f"Prometheus answered with something that is not a range of values: {error}"
    return HistoryPage(
        now=now_s,
        span=span,
        model=model,
        step_s=step_s,
        source="prometheus",
        emulated=False,
        times=times,
        metrics=found,
        problem=problem,
    )


async def _range(client: httpx.AsyncClient, url: str, text: str, times: list[int], step_s: int) -> list[dict[str, Any]]:
    asked: Mapping[str, str] = {"query": text, "start": str(times[0]), "end": str(times[-1]), "step": str(step_s)}
    answer = await client.get(f"{url.rstrip('/')}/api/v1/query_range", params=dict(asked), timeout=ANSWER_S)
    if answer.status_code != 200:
        raise ValueError(f"status {answer.status_code}")
    lines: list[dict[str, Any]] = msgspec.json.decode(answer.content)["data"]["result"]
    return lines[:MOST_LINES]


def _series(query: PromQuery, lines: list[dict[str, Any]], times: list[int]) -> list[ChartSeries]:
    found = []
    for line in lines:
        values = {int(float(at)): float(value) for at, value in line["values"]}
        known = [values.get(at) for at in times]
        name = line["metric"].get(query.label, query.name) if query.label else query.name
        found.append(ChartSeries(name, [None if v is None or v != v else v for v in known]))
    return found or [ChartSeries(query.name, [None] * len(times))]


_ANSWERS: dict[int | str, dict[str, Any]] = {400: {"description": "no such metric, span or model name"}}


def routes(history: History, clock: Callable[[], float], prometheus_url: str) -> APIRouter:
    router = APIRouter(prefix="/v1", tags=["history"])

    @router.get("/history", responses=_ANSWERS)
    async def over_time(
        metric: Annotated[list[str], Query(max_length=16)] = [],  # noqa: B006 - FastAPI copies it
        span: str = "1h",
        model: Annotated[str, Query(max_length=256)] = "",
    ) -> Response:
        """Figures over the last `1h`, `24h` or `7d`, of the fleet or of one model. `metric`: tokens (a second, counted
        when a request ends), ttft (seconds), queue (requests), gpu (bytes, of the fleet), starts (in each slot), hits
        (share of requests that found a warm instance); all by default. A value is null where nothing was measured."""
        names = [part for value in metric for part in value.split(",") if part]
        if span not in SPANS:
            raise BadRequest(f"span: {span[:32]!r} is not one of {', '.join(SPANS)}", param="span")
        try:
            key = model_key(model) if model else ""
        except ValueError as error:
            raise BadRequest(str(error), param="model") from error
        if not prometheus_url:
            return json_response(history.page(span, key, names, clock()))
        async with httpx.AsyncClient(trust_env=False) as client:
            return json_response(await read_page(client, prometheus_url, span, key, names, clock()))

    return router
