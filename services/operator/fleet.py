"""The operator's client of the fleet: REST of autoscaler, placer and one router."""

import asyncio
from collections import defaultdict
from functools import partial
from typing import Any, Final
from urllib.parse import quote

import httpx
import msgspec

from glowplug.controllers.resources.messages import Answered, DeclaredRow, OperatorView, Resource, ResourceKind
from glowplug.domain.decision import DecisionRecord
from glowplug.domain.instance import Instance
from glowplug.domain.model import OnCold
from glowplug.runtime.clock import now_s
from glowplug.runtime.rest import ACTOR_HEADER

TIMEOUT_S: Final = 10.0
DECISIONS: Final = 500
NOT_FOUND: Final = 404


class FleetRest:
    def __init__(self, *, autoscaler: str, placer: str, router: str, token: str) -> None:
        self._autoscaler, self._placer, self._router = autoscaler, placer, router
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._client = httpx.AsyncClient(headers=headers, timeout=TIMEOUT_S, trust_env=False)

    async def close(self) -> None:
        await self._client.aclose()

    async def look(self) -> OperatorView:
        """Raises httpx.HTTPError, or ValueError for an answer of another version."""
        taken_at = now_s()
        models, tenants, instances, decisions, etas = await asyncio.gather(
            self._rows(f"{self._autoscaler}/v1/models"),
            self._rows(f"{self._autoscaler}/v1/tenants"),
            self._rows(f"{self._placer}/v1/instances", gone="true"),
            self._rows(f"{self._placer}/v1/decisions", limit=str(DECISIONS)),
            self._etas(),
        )
        of_model: dict[str, list[Instance]] = defaultdict(list)
        for one in msgspec.convert(instances, list[Instance], strict=False):
            of_model[one.model_key].append(one)
        return OperatorView(
            taken_at=taken_at,
            rows={
                ResourceKind.MODEL: {one["key"]: model_row(one) for one in models},
                ResourceKind.TENANT: {one["name"]: tenant_row(one) for one in tenants},
            },
            instances={key: tuple(rows) for key, rows in of_model.items()},
            decisions=tuple(msgspec.convert(decisions, list[DecisionRecord], strict=False)),
            etas=etas,
        )

    async def declare(self, resource: Resource) -> Answered:
        path, params = f"{self._place(resource.kind)}/{_segment(resource.fleet_name)}", {"source": resource.source}
        return await self._change(resource, "PUT", path, params=params, json=resource.body)

    async def withdraw(self, resource: Resource, key: str) -> Answered:
        """Remove a row; a missing one counts as removed."""
        path, params = f"{self._place(resource.kind)}/{_segment(key)}", {"source": resource.source}
        answered = await self._change(resource, "DELETE", path, params=params)
        if answered.status == NOT_FOUND:
            return Answered(uid=resource.uid, generation=resource.generation)
        return answered

    async def _change(self, resource: Resource, method: str, path: str, **given: Any) -> Answered:
        about = partial(Answered, uid=resource.uid, generation=resource.generation)
        actor = {ACTOR_HEADER: f"the operator, for {resource.source}"}
        try:
            answer = await self._client.request(method, f"{self._autoscaler}{path}", headers=actor, **given)
        except httpx.HTTPError as error:
            return about(status=0, message=f"the autoscaler does not answer: {type(error).__name__}")
        if not answer.is_error:
            return about()
        try:
            message = str(answer.json()["error"]["message"])
        except (ValueError, KeyError, TypeError):
            message = f"the autoscaler answered {answer.status_code}"
        return about(status=answer.status_code, message=message)

    async def _rows(self, url: str, **params: str) -> list[dict[str, Any]]:
        answer = await self._client.get(url, params=params)
        answer.raise_for_status()
        found: list[dict[str, Any]] = answer.json()["data"]
        return found

    async def _etas(self) -> dict[str, float]:
        """Return a router's estimates, or none: they are not worth losing the rest."""
        try:
            rows = await self._rows(f"{self._router}/v1/queue") if self._router else []
        except (httpx.HTTPError, ValueError, KeyError):
            return {}
        return {row["model_key"]: float(row["eta_s"]) for row in rows}

    @staticmethod
    def _place(kind: ResourceKind) -> str:
        return "/v1/models" if kind is ResourceKind.MODEL else "/v1/tenants"


def model_row(shown: dict[str, Any]) -> DeclaredRow:
    return DeclaredRow(
        key=shown["key"],
        source=shown["source"],
        state=shown["state"],
        last_failure=shown["last_failure"],
        refuses_cold=shown["on_cold"] == OnCold.REFUSE,
        keeps_one=bool(shown["min_instances"] or shown["pinned"]),
    )


def tenant_row(shown: dict[str, Any]) -> DeclaredRow:
    return DeclaredRow(key=shown["name"], source=shown["source"], num_keys=shown["num_keys"])


def _segment(text: str) -> str:
    return quote(text, safe="/")
