"""The price list of a GPU, as the placer reckons it: what each holder of its memory is worth there, and who goes next.

The console keeps nothing of it.
"""

from collections.abc import Callable
from typing import Annotated
from urllib.parse import quote

import msgspec
from fastapi import APIRouter, Path
from fastapi.responses import Response

from glowplug.controllers.placer.price_list import GpuPrices
from glowplug.domain.errors import GlowplugError, NotFound
from services.console.records import FRESH_S, KEPT, Newest, json_response
from services.console.upstream import Upstream, read_once


class PricePage(msgspec.Struct, frozen=True, kw_only=True):
    """One GPU at `now` (epoch seconds). `problem`: why the placer could not be asked; then there are no prices."""

    now: float
    gpu_id: str
    prices: GpuPrices | None = None
    problem: str = ""


class Prices:
    """Asks the placer, at most once in `FRESH_S` for each GPU."""

    def __init__(self, upstream: Upstream, clock: Callable[[], float]) -> None:
        self._upstream, self._clock = upstream, clock
        self._known: Newest[str, PricePage] = Newest(KEPT)

    async def of(self, gpu_id: str) -> PricePage:
        """Raises NotFound for a GPU that the placer does not know; of what else it does the page says what it is."""
        known = self._known.get(gpu_id)
        if known is not None and 0 <= self._clock() - known.now < FRESH_S:
            return known
        prices, problem = None, ""
        try:
            status, body = await read_once(self._upstream, "placer", f"/v1/gpus/{quote(gpu_id)}/worth")
            if status == 200:
                prices = msgspec.json.decode(body, type=GpuPrices)
            elif status != 404:
                problem = f"the placer answered {status}"
        except GlowplugError as error:
            problem = str(error)
        except msgspec.MsgspecError as error:
            problem = f"the placer said something else than prices: {error}"
        if prices is None and not problem:
            raise NotFound(f"no GPU {gpu_id!r}", param="gpu")
        page = PricePage(now=self._clock(), gpu_id=gpu_id, prices=prices, problem=problem)
        self._known.put(gpu_id, page)
        return page


def routes(prices: Prices) -> APIRouter:
    router = APIRouter(prefix="/api/v1", tags=["fleet"])

    @router.get("/gpus/{gpu_id:path}/worth", responses={404: {"description": "no such GPU"}})
    async def one(gpu_id: Annotated[str, Path(min_length=1, max_length=256)]) -> Response:
        """What each holder of a GPU's memory is worth there now, those that go first before the others."""
        return json_response(await prices.of(gpu_id))

    return router
