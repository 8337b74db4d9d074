"""Facts about a running fleet and the local files of its models.

Each question is bounded and changes nothing; `services.py`, `servers.py` and `rows.py` judge the answers."""

import asyncio
import functools
import hashlib
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from http import HTTPStatus
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import httpx
from prometheus_client.parser import text_string_to_metric_families

from glowplug import __version__
from glowplug.cli.client import FleetClient
from glowplug.cli.doctor.servers import SILENT, BusFacts, StoreFacts, ask_bus, ask_store
from glowplug.domain.model import Model

ANSWER_S = 4.0
WHOLE_S = 40.0
HASH_S = 10.0
CHUNK_BYTES = 4 << 20
NodeUrls = tuple[str, str]  # agent, prefetcher
CONTROL = ("autoscaler", "placer", "predictor", "router", "console")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceFacts:
    """`error`: why its admin port did not answer; `metrics`: summed over labels."""

    name: str  # "placer-1", "agent of node-2"
    service: str
    url: str
    error: str = ""
    ready: bool = False
    reason: str = ""
    version: str = ""
    role: str = ""  # leader | standby | single
    leader: str = ""  # as it knows
    skew_s: float | None = None  # its clock minus ours
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeFacts:
    unavailable: Mapping[str, str] = field(default_factory=dict)  # engine -> reason
    warnings: tuple[str, ...] = ()
    cache_capacity_bytes: int | None = None
    cache_used_bytes: int = 0
    disk_capacity_bytes: int = 0  # 0: no disk tier
    disk_used_bytes: int = 0
    disk_trouble: str = ""  # why writes fail at present


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetFacts:
    """`now_s`: epoch seconds after the store's answer."""

    now_s: float
    version: str
    expected: tuple[str, ...] = ()
    expected_nodes: tuple[str, ...] = ()  # started with the fleet
    processes: tuple[Mapping[str, Any], ...] = ()
    services: tuple[ServiceFacts, ...] = ()
    store: StoreFacts = field(default_factory=StoreFacts)
    bus: BusFacts = field(default_factory=BusFacts)
    nodes: Mapping[str, NodeFacts] = field(default_factory=dict)
    models: tuple[Mapping[str, Any], ...] | None = None  # None: unknown
    file_errors: Mapping[str, str] = field(default_factory=dict)
    queues: tuple[Mapping[str, Any], ...] | None = None
    placements: tuple[Mapping[str, Any], ...] = ()
    data_port: str = ""
    console_problem: str = ""
    num_traces: int | None = None
    missing_files: Mapping[str, str] = field(default_factory=dict)
    weights: Mapping[str, str] = field(default_factory=dict)
    num_weights_checked: int = 0


async def gather(fleet: FleetClient) -> FleetFacts:
    """Takes at most WHOLE_S."""
    async with httpx.AsyncClient(timeout=ANSWER_S, trust_env=False, headers=fleet.headers("")) as http:
        async with asyncio.timeout(WHOLE_S):
            return await _gather(_Asker(fleet, http), fleet)


async def _gather(asker: "_Asker", fleet: FleetClient) -> FleetFacts:
    state_dir = str(fleet.document.get("state_dir", ""))
    store, bus = await asyncio.gather(ask_store(fleet.redis_url, state_dir), ask_bus(fleet.nats_url, state_dir))
    now_s = time.time()
    alive = {node.node_id: (node.agent_url, node.prefetcher_url) for node in store.nodes.values()}
    alive = alive or await asker.nodes()
    services, models, queues, placements, data_port, page, traces = await asyncio.gather(
        asyncio.gather(*(asker.service(*address) for address in _addresses(fleet, alive))),
        asker.get("autoscaler", "/v1/models"),
        asker.get("router", "/v1/queue"),
        asker.get("placer", "/v1/placements"),
        asker.data_port(),
        asker.get("console", "/api/v1/fleet"),
        asker.get("console", "/api/v1/traces", limit=1),
    )
    nodes = await asyncio.gather(*(asker.node(*urls) for urls in alive.values()))
    # Paths are valid only on the fleet's machine.
    of_here = list(store.models.values()) if fleet.document else []
    weights, num_checked = await asyncio.to_thread(local_weights, of_here)
    return FleetFacts(
        now_s=now_s,
        version=__version__,
        expected=CONTROL if fleet.document else (),
        expected_nodes=tuple(node["node_id"] for node in fleet.document.get("nodes", ())),
        processes=tuple(fleet.document.get("processes", ())),
        services=tuple(services),
        store=store,
        bus=bus,
        nodes=dict(zip(alive, nodes, strict=True)),
        models=tuple(models["data"]) if models else None,
        file_errors=models.get("errors", {}) if models else {},
        queues=tuple(queues["data"]) if queues else None,
        placements=tuple(placements["data"]) if placements else (),
        data_port=data_port,
        console_problem=_stale(page),
        num_traces=None if traces is None else len(_traces(traces)),
        missing_files=missing_files(of_here),
        weights=weights,
        num_weights_checked=num_checked,
    )


def _addresses(fleet: FleetClient, nodes: Mapping[str, NodeUrls]) -> list[tuple[str, str, str]]:
    found = [(name, name, fleet.urls[name]) for name in CONTROL if name in fleet.urls]
    started = {n["node_id"]: (n["agent_url"], n["prefetcher_url"]) for n in fleet.document.get("nodes", ())}
    for node_id, urls in sorted({**started, **nodes}.items()):
        kinds = zip(("agent", "prefetcher"), urls, strict=True)
        found += [(f"{service} of {node_id}", service, url) for service, url in kinds if url]
    return found


def _stale(fleet: Mapping[str, Any] | None) -> str:
    sources = (fleet or {}).get("sources") or {}
    down = [name for name, source in sources.items() if isinstance(source, dict) and source.get("is_up") is False]
    return f"it does not reach the {' and the '.join(down)}" if down else ""


def _traces(answer: Any) -> list[Any]:
    found = answer.get("traces", answer.get("data", ())) if isinstance(answer, dict) else answer
    return list(found or ())


class _Asker:
    def __init__(self, fleet: FleetClient, http: httpx.AsyncClient) -> None:
        self.fleet = fleet
        self.http = http

    async def get(self, service: str, path: str, **params: Any) -> Any:
        url = self.fleet.urls.get(service, "")
        return await self._json(f"{url}{path}", self.fleet.headers(service), **params) if url else None

    async def _json(self, url: str, headers: Mapping[str, str] | None = None, **params: Any) -> Any:
        try:
            response = await self.http.get(url, params=params, headers=headers)
            return response.json() if response.is_success else None
        except (httpx.HTTPError, httpx.InvalidURL, ValueError):
            return None

    async def nodes(self) -> dict[str, NodeUrls]:
        rows = (await self.get("placer", "/v1/nodes") or {}).get("data") or []
        return {row["node_id"]: (row["agent_url"], row["prefetcher_url"]) for row in rows}

    async def service(self, name: str, service: str, url: str) -> ServiceFacts:
        try:
            sent = time.time()
            live = await self.http.get(f"{url}/health")
            took_s = time.time() - sent
            ready = await self.http.get(f"{url}/ready")
            about, state = live.json(), ready.json()
        except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
            return ServiceFacts(name=name, service=service, url=url, error=_words(error))
        return ServiceFacts(
            name=name,
            service=service,
            url=url,
            ready=ready.status_code == httpx.codes.OK,
            reason=str(state.get("reason", "")),
            version=str(about.get("version", "")),
            role=str(about.get("role", "")),
            leader=str(about.get("leader", "")),
            skew_s=_skew(live.headers.get("date", ""), sent, took_s),
            metrics=await self._metrics(url),
        )

    async def _metrics(self, url: str) -> dict[str, float]:
        try:
            families = list(text_string_to_metric_families((await self.http.get(f"{url}/metrics")).text))
        except (httpx.HTTPError, ValueError):
            return {}
        sums: dict[str, float] = {}
        for sample in (sample for family in families for sample in family.samples):
            sums[sample.name] = sums.get(sample.name, 0.0) + sample.value
        return sums

    async def node(self, agent_url: str, prefetcher_url: str) -> NodeFacts:
        engines, gpus, cache, tiers = await asyncio.gather(
            self._json(f"{agent_url}/v1/engines"),
            self._json(f"{agent_url}/v1/gpus"),
            self._json(f"{prefetcher_url}/v1/cache"),
            self._json(f"{prefetcher_url}/v1/tiers"),
        )
        found = [tier for tier in (tiers or {}).get("tiers") or [] if tier["tier"] == "disk"]
        disk: dict[str, Any] = found[0] if found else {}
        rows = [row for row in (engines or {}).get("data") or [] if "engine" in row and row.get("unavailable")]
        return NodeFacts(
            unavailable={row["engine"]: row["unavailable"] for row in rows},
            warnings=tuple((gpus or {}).get("warnings") or ()),
            cache_capacity_bytes=cache["capacity_bytes"] if cache else None,
            cache_used_bytes=cache["used_bytes"] if cache else 0,
            disk_capacity_bytes=disk.get("capacity_bytes", 0),
            disk_used_bytes=disk.get("used_bytes", 0),
            disk_trouble=disk.get("reason", ""),
        )

    async def data_port(self) -> str:
        """Return "" or the problem."""
        url = self.fleet.urls.get("data")
        if not url:
            return ""
        try:
            response = await self.http.get(f"{url}/v1/models", headers=self.fleet.data_headers())
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            return f"{url} does not answer: {_words(error)}"
        asks_for_a_key = response.status_code == HTTPStatus.UNAUTHORIZED and not self.fleet.api_key
        return "" if response.is_success or asks_for_a_key else f"{url}/v1/models answers {response.status_code}"


def _skew(date: str, sent: float, took_s: float) -> float | None:
    """Return its clock minus ours; a Date header has whole seconds."""
    try:
        date_s = parsedate_to_datetime(date).timestamp()
    except (TypeError, ValueError):
        return None
    low, high = date_s - (sent + took_s), date_s + 1 - sent
    return 0.0 if low <= 0 <= high else low if low > 0 else high


def _words(error: Exception) -> str:
    return str(error) or (SILENT if isinstance(error, httpx.ReadTimeout) else type(error).__name__)


def missing_files(models: Iterable[Model]) -> dict[str, str]:
    sources = {model.source for model in models if Path(model.source).is_absolute()}
    return {source: "is gone, its model stays deployed" for source in sorted(sources) if not Path(source).exists()}


def local_weights(models: Iterable[Model]) -> tuple[dict[str, str], int]:
    """Return (model name -> problem, number checked) for local files. Checksums within HASH_S in all, sizes after
    that."""
    problem = functools.cache(functools.partial(_problem, deadline=time.monotonic() + HASH_S))
    local = [(model, path) for model in models if (path := _path(model.weights.uri))]
    found = {model.name: problem(path, model.weights.sha256, model.weights.num_bytes) for model, path in local}
    return {name: says for name, says in found.items() if says}, len(local)


def _path(uri: str) -> Path | None:
    parts = urlsplit(uri)
    if not uri or parts.scheme not in ("", "file"):
        return None
    return Path(unquote(parts.path) if parts.scheme else uri)


def _problem(path: Path, sha256: str, num_bytes: int, deadline: float) -> str:
    try:
        if path.is_dir():
            return "" if any(path.iterdir()) else f"{path} is empty"
        size = path.stat().st_size
        if num_bytes and size != num_bytes:
            return f"{path} has {size} bytes and should have {num_bytes}"
        found = _sha256(path, deadline) if sha256 else ""
    except OSError as error:
        return f"{path}: {error.strerror}"
    return f"{path} does not match its sha256" if found and found != sha256.lower() else ""


def _sha256(path: Path, deadline: float) -> str:
    """Return hex, "" when time is up."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            if time.monotonic() > deadline:
                return ""
            digest.update(chunk)
    return digest.hexdigest()
