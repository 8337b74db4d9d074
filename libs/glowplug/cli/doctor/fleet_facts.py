"""Asking a running fleet: every service, its tables, its bus, and whether the files that models name on this machine
are still what they were. Each question is bounded and changes nothing."""

import asyncio
import hashlib
import time
from collections.abc import Iterable, Mapping
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import httpx
from prometheus_client.parser import text_string_to_metric_families

from glowplug import __version__
from glowplug.cli.client import FleetClient
from glowplug.cli.doctor.fleet import FleetFacts, NodeFacts, ServiceFacts
from glowplug.cli.doctor.server_facts import ask_bus, ask_store
from glowplug.domain.hardware import Node
from glowplug.domain.model import Model
from glowplug.telemetry import semconv

ANSWER_S = 4.0
WHOLE_S = 40.0
HASH_S = 10.0
CHUNK_BYTES = 4 << 20
CONTROL = ("autoscaler", "placer", "predictor", "router", "console")
COUNTED = frozenset(
    {
        semconv.STALE_COMMANDS_TOTAL,
        semconv.BUS_MALFORMED_TOTAL,
        semconv.BUS_GIVEN_UP_TOTAL,
        semconv.ROWS_UNREADABLE,
        semconv.TABLE_SYNC_TIMESTAMP_SECONDS,
        semconv.SPANS_DROPPED_TOTAL,
        semconv.REQUESTS_TOTAL,
    }
)


async def gather(fleet: FleetClient, where: str, *, redis_url: str) -> FleetFacts:
    """Ends within WHOLE_S. `redis_url` may be empty: then the tables are not looked at."""
    asker = _Asker(fleet)
    try:
        async with asyncio.timeout(WHOLE_S):
            return await _gather(asker, fleet, where, redis_url)
    finally:
        await asker.http.aclose()


async def _gather(asker: "_Asker", fleet: FleetClient, where: str, redis_url: str) -> FleetFacts:
    state_dir = str(fleet.document.get("state_dir", ""))
    store, bus = await asyncio.gather(ask_store(redis_url, state_dir), ask_bus(fleet.nats_url, state_dir))
    rows = store.nodes or await asker.nodes()
    named = _addresses(fleet, rows)
    services, models, queues, placements, data_port, console = await asyncio.gather(
        asyncio.gather(*(asker.service(*address) for address in named)),
        asker.get("autoscaler", "/v1/models"),
        asker.get("router", "/v1/queue"),
        asker.get("placer", "/v1/placements"),
        asker.data_port(),
        asyncio.gather(asker.get("console", "/api/v1/fleet"), asker.get("console", "/api/v1/traces", limit=1)),
    )
    nodes = await asyncio.gather(*(asker.node(node) for node in rows.values()))
    # Its paths mean something here only when the fleet runs on this machine.
    local = bool(fleet.document)
    weights, num_checked = await asyncio.to_thread(local_weights, store.models.values() if local else ())
    return FleetFacts(
        where=where,
        now_s=time.time(),
        version=__version__,
        expected=CONTROL if local else (),
        processes=tuple(fleet.document.get("processes", ())),
        services=tuple(services),
        store=store,
        bus=bus,
        nodes=dict(zip(rows, nodes, strict=True)),
        models=tuple(models["data"]) if models else None,
        file_errors=models.get("errors", {}) if models else {},
        queues=tuple(queues["data"]) if queues else None,
        placements=tuple(placements["data"]) if placements else (),
        data_port=data_port,
        console_problem=_stale(console[0]),
        num_traces=len(_traces(console[1])) if console[1] is not None else None,
        missing_files=missing_files(store.models.values()) if local else {},
        weights=weights,
        num_weights_checked=num_checked,
    )


def _addresses(fleet: FleetClient, nodes: Mapping[str, Node]) -> list[tuple[str, str, str]]:
    """(name, service, url) of every process that has an address, those of nodes that joined by hand too."""
    found = [(name, name, fleet.urls[name]) for name in CONTROL if name in fleet.urls]
    started: Iterable[Mapping[str, str]] = fleet.document.get("nodes", ())
    urls = {node["node_id"]: (node["agent_url"], node["prefetcher_url"]) for node in started}
    urls |= {node_id: (node.agent_url, node.prefetcher_url) for node_id, node in nodes.items()}
    for node_id, (agent, prefetcher) in sorted(urls.items()):
        found += [(f"agent of {node_id}", "agent", agent)] if agent else []
        found += [(f"prefetcher of {node_id}", "prefetcher", prefetcher)] if prefetcher else []
    return found


def _stale(fleet: Mapping[str, Any] | None) -> str:
    """Why the console's page is stale, in its own words."""
    sources = (fleet or {}).get("sources") or {}
    down = [name for name, source in sources.items() if isinstance(source, dict) and source.get("is_up") is False]
    return f"it does not reach the {' and the '.join(down)}" if down else ""


def _traces(answer: Any) -> list[Any]:
    found = answer.get("traces", answer.get("data", ())) if isinstance(answer, dict) else answer
    return list(found or ())


class _Asker:
    """GETs that answer None instead of failing: `service` reports once what is wrong with it."""

    def __init__(self, fleet: FleetClient) -> None:
        self.fleet = fleet
        self.http = httpx.AsyncClient(timeout=ANSWER_S, trust_env=False, headers=fleet.headers(""))

    async def get(self, service: str, path: str, **params: Any) -> Any:
        """Decoded JSON, None when there is no address, no answer or an error."""
        url = self.fleet.urls.get(service, "")
        return await self._json(f"{url}{path}", self.fleet.headers(service), **params) if url else None

    async def _json(self, url: str, headers: Mapping[str, str] | None = None, **params: Any) -> Any:
        try:
            response = await self.http.get(url, params=params, headers=headers)
            return response.json() if response.is_success else None
        except (httpx.HTTPError, httpx.InvalidURL, ValueError):
            return None

    async def nodes(self) -> dict[str, Node]:
        """Living nodes as the placer tells them, for a fleet whose store has no address here."""
        answer = await self.get("placer", "/v1/nodes")
        rows = (answer or {}).get("data") or []
        rows = list(rows.values()) if isinstance(rows, dict) else rows
        return {
            row["node_id"]: Node(
                node_id=row["node_id"],
                gpus=(),
                engines=tuple(row["engines"]),
                agent_url=row["agent_url"],
                prefetcher_url=row["prefetcher_url"],
                heartbeat_at=row["heartbeat_at"],
            )
            for row in rows
        }

    async def service(self, name: str, service: str, url: str) -> ServiceFacts:
        """Alive, ready, of which version, with which clock."""
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
        sums: dict[str, float] = {}
        try:
            text = (await self.http.get(f"{url}/metrics")).text
            for family in text_string_to_metric_families(text):
                for sample in family.samples:
                    if sample.name in COUNTED:
                        sums[sample.name] = sums.get(sample.name, 0.0) + sample.value
        except (httpx.HTTPError, ValueError):
            return {}
        return sums

    async def node(self, node: Node) -> NodeFacts:
        """What the agent says of engines and hardware, and the prefetcher of its free memory."""
        engines, gpus, cache = await asyncio.gather(
            self._json(f"{node.agent_url}/v1/engines"),
            self._json(f"{node.agent_url}/v1/gpus"),
            self._json(f"{node.prefetcher_url}/v1/cache"),
        )
        rows = (engines or {}).get("data") or []
        return NodeFacts(
            unavailable={
                row["engine"]: row["unavailable"] for row in rows if row.get("unavailable") and "engine" in row
            },
            warnings=tuple((gpus or {}).get("warnings") or ()),
            cache_capacity_bytes=cache["capacity_bytes"] if cache else None,
            cache_used_bytes=cache["used_bytes"] if cache else 0,
        )

    async def data_port(self) -> str:
        """ "" when the OpenAI API lists its models, else why not."""
        url = self.fleet.urls.get("data")
        if not url:
            return ""
        try:
            response = await self.http.get(f"{url}/v1/models", headers=self.fleet.data_headers())
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            return f"{url} does not answer: {_words(error)}"
        return "" if response.is_success else f"{url}/v1/models answers {response.status_code}"


def _skew(date: str, sent: float, took_s: float) -> float | None:
    """Its clock minus ours: a Date header is cut to whole seconds, and was written while we waited."""
    try:
        date_s = parsedate_to_datetime(date).timestamp()
    except (TypeError, ValueError):
        return None
    low, high = date_s - (sent + took_s), date_s + 1 - sent
    return 0.0 if low <= 0 <= high else low if low > 0 else high


def _words(error: Exception) -> str:
    """What an error says; httpx's timeouts say nothing."""
    return str(error) or {"ReadTimeout": "it took the connection and said nothing"}.get(
        type(error).__name__, type(error).__name__
    )


def missing_files(models: Iterable[Model]) -> dict[str, str]:
    """Model file -> why it is not there, of models that came from files."""
    sources = {model.source for model in models if Path(model.source).is_absolute()}
    return {source: "is gone, its model stays deployed" for source in sorted(sources) if not Path(source).exists()}


def local_weights(models: Iterable[Model]) -> tuple[dict[str, str], int]:
    """(model name -> what is wrong with its weights, how many were looked at). Only files of this machine; checksums
    are compared for HASH_S altogether, what is left after that by its size alone."""
    problems: dict[str, str] = {}
    seen: dict[tuple[Path, str, int], str] = {}
    deadline = time.monotonic() + HASH_S
    num = 0
    for model in models:
        path = _path(model.weights.uri)
        if path is None:
            continue
        num += 1
        key = (path, model.weights.sha256, model.weights.num_bytes)
        if key not in seen:
            seen[key] = _problem(*key, deadline)
        if seen[key]:
            problems[model.name] = seen[key]
    return problems, num


def _path(uri: str) -> Path | None:
    parts = urlsplit(uri)
    if not uri or parts.scheme not in ("", "file"):
        return None
    return Path(unquote(parts.path) if parts.scheme else uri)


def _problem(path: Path, sha256: str, num_bytes: int, deadline: float) -> str:
    """ "" when nothing is wrong with one file or directory."""
    try:
        if path.is_dir():
            return "" if any(path.iterdir()) else f"{path} is empty"
        size = path.stat().st_size
        if num_bytes and size != num_bytes:
            return f"{path} has {size} bytes and should have {num_bytes}"
        found = _sha256(path, deadline) if sha256 else ""
    except OSError as error:
        return f"{path}: {error.strerror}"
    return f"{path} is not what its sha256 says" if found and found != sha256.lower() else ""


def _sha256(path: Path, deadline: float) -> str:
    """Hex, "" when time is up."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            if time.monotonic() > deadline:
                return ""
            digest.update(chunk)
    return digest.hexdigest()
