"""The history over REST: from this console's own slots, or from Prometheus where a setting names one."""

from collections.abc import Callable
from typing import Annotated, Any

import httpx
from fastapi import APIRouter, Query
from fastapi.responses import Response

from glowplug.domain.errors import BadRequest
from glowplug.domain.model import model_key
from glowplug.services.console.history import SPANS, History
from glowplug.services.console.prometheus import read_page
from glowplug.services.console.records import json_response

_ANSWERS: dict[int | str, dict[str, Any]] = {400: {"description": "no such metric, span or model name"}}


def routes(history: History, clock: Callable[[], float], prometheus_url: str) -> APIRouter:
    """`clock` gives epoch seconds. `prometheus_url` is "" where the console's own history is shown."""
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
            raise BadRequest(f"span is one of {', '.join(SPANS)}", param="span")
        try:
            key = model_key(model) if model else ""
        except ValueError as error:
            raise BadRequest(str(error), param="model") from error
        if not prometheus_url:
            return json_response(history.page(span, key, names, clock()))
        async with httpx.AsyncClient(trust_env=False) as client:
            return json_response(await read_page(client, prometheus_url, span, key, names, clock()))

    return router
