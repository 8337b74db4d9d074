"""Prometheus instruments of the data port, and the service levels of models.

A service level counts requests to which the fleet owed an answer: successes, failures and refusals for lack of capacity
(429, 5xx). Excluded are the client's errors (other 4xx), departed clients (unless they had waited past the TTFT
objective), and the batch class, which waits for idle capacity.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge

from glowplug.controllers.router.controller import RouterController
from glowplug.controllers.router.queue import ModelQueue
from glowplug.domain.model import Model, Slo
from glowplug.events.facts import RequestFinished
from glowplug.telemetry import semconv
from glowplug.telemetry.metrics import SECONDS_BUCKETS, LabelCap, ShellMetrics
from glowplug.telemetry.tally import CountChild, TallyCounter, TallyHistogram, TallyRows, observe_all

OVERHEAD_BUCKETS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.05, 0.1, 1)
TPOT_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2.5)
Rows = Iterable[tuple[tuple[str, ...], float]]
TTFT, TPOT = "ttft", "tpot"
CLIENT_LEFT = 499


@dataclass(slots=True)
class SloCount:
    num: int = 0
    num_missed: int = 0


class SloCounts:
    """Counts by (model_key, level), never removed, since counters only grow."""

    def __init__(self) -> None:
        self.counts: defaultdict[tuple[str, str], SloCount] = defaultdict(SloCount)

    def judge(self, model_key: str, slo: Slo, status: int, *, e2e_s: float, ttft_s: float, tpot_s: float) -> None:
        """Count one ended request. `ttft_s` and `tpot_s` are below 0 where it has none."""
        if slo.ttft_s:
            waited_s = e2e_s if ttft_s < 0 else ttft_s
            if status < 400 or _is_ours(status) or (status == CLIENT_LEFT and waited_s > slo.ttft_s):
                self._take(model_key, TTFT, _is_ours(status) or waited_s > slo.ttft_s)
        if slo.tpot_s and (tpot_s >= 0 or _is_ours(status)) and status != CLIENT_LEFT:
            self._take(model_key, TPOT, _is_ours(status) or tpot_s > slo.tpot_s)

    def expect(self, model_key: str, slo: Slo) -> None:
        """Show a model's levels as 0 before its first request, so that its first miss is an increase."""
        for level, is_set in ((TTFT, slo.ttft_s), (TPOT, slo.tpot_s)):
            if is_set:
                self.counts.setdefault((model_key, level), SloCount())

    def _take(self, model_key: str, level: str, is_missed: bool) -> None:
        count = self.counts[model_key, level]
        count.num += 1
        count.num_missed += is_missed


def _is_ours(status: int) -> bool:
    return status == 429 or status >= 500


class _OfModel:
    __slots__ = ("chunks", "codes", "cold_ttft", "e2e", "hot_ttft", "prompt_tokens", "queue", "response_tokens", "tpot")

    def __init__(self, metrics: "RouterMetrics", model: str) -> None:
        self.codes: dict[int, CountChild] = {}
        self.hot_ttft = metrics.ttft.labels(model, "hot")
        self.cold_ttft = metrics.ttft.labels(model, "cold")
        self.queue = metrics.queue.labels(model)
        self.tpot = metrics.tpot.labels(model)
        self.e2e = metrics.e2e.labels(model)
        self.chunks = metrics.chunks.labels(model)
        self.prompt_tokens = metrics.prompt_tokens.labels(model)
        self.response_tokens = metrics.response_tokens.labels(model)


class RouterMetrics:
    """The instruments of one data port. Label values are bounded: models by LabelCap, codes by the HTTP statuses."""

    def __init__(
        self,
        registry: CollectorRegistry = REGISTRY,
        *,
        controller: RouterController | None = None,
        shell: ShellMetrics | None = None,
    ) -> None:
        """`controller`: the queues' owner; `shell`: every service's count of published events."""

        def histogram(
            name: str, doc: str, *labels: str, buckets: tuple[float, ...] = SECONDS_BUCKETS
        ) -> TallyHistogram:
            return TallyHistogram(name, doc, labels, buckets, registry)

        def counter(name: str, doc: str, *labels: str) -> TallyCounter:
            return TallyCounter(name, doc, labels, registry)

        self.requests = counter(semconv.REQUESTS_TOTAL, "Requests ended", "model", "code")
        self.ttft = histogram(semconv.REQUEST_TTFT_SECONDS, "Arrival to first byte", "model", "temperature")
        self.queue = histogram(semconv.REQUEST_QUEUE_SECONDS, "Arrival to dispatch", "model")
        self.tpot = histogram(
            semconv.REQUEST_TPOT_SECONDS, "Seconds per token after the first", "model", buckets=TPOT_BUCKETS
        )
        self.e2e = histogram(semconv.REQUEST_E2E_SECONDS, "Arrival to last byte", "model")
        self.chunks = counter(semconv.RESPONSE_CHUNKS_TOTAL, "SSE events passed on", "model")
        self.prompt_tokens = counter(semconv.PROMPT_TOKENS_TOTAL, "Prompt tokens read", "model")
        self.response_tokens = counter(semconv.RESPONSE_TOKENS_TOTAL, "Tokens answered", "model")
        self._overhead = histogram(
            semconv.ROUTER_OVERHEAD_SECONDS, "Time in the router, queue excluded", buckets=OVERHEAD_BUCKETS
        ).labels()
        self.retries = Counter(semconv.UPSTREAM_RETRIES_TOTAL, "Engines lost before a first byte", registry=registry)
        self._continuations = Counter(
            semconv.STREAM_CONTINUATIONS_TOTAL,
            "Streams that lost their engine, by whether another continued them",
            ["reason", "outcome"],
            registry=registry,
        )
        self.connections = Gauge(semconv.CONNECTIONS, "Client connections open", registry=registry)
        self.dropped = Counter(semconv.TELEMETRY_DROPPED_TOTAL, "Telemetry that the bus refused", registry=registry)
        self._refused = Counter(
            semconv.REQUESTS_REFUSED_TOTAL, "Requests refused before a model was known", ["code"], registry=registry
        )
        self._tenant_requests = counter(semconv.TENANT_REQUESTS_TOTAL, "Requests with a usage record", "tenant")
        self._tenant_tokens = counter(semconv.TENANT_TOKENS_TOTAL, "Tokens of usage records", "tenant", "kind")
        self.usage_lost = Counter(semconv.USAGE_LOST_TOTAL, "Usage records lost", registry=registry)
        self.spool_bytes = Gauge(semconv.USAGE_SPOOL_BYTES, "Usage records not stored yet", registry=registry)
        self.cap = LabelCap()
        self._tenant_cap = LabelCap(semconv.MAX_TENANTS)
        self._tenants: dict[str, tuple[CountChild, CountChild, CountChild]] = {}  # at most MAX_TENANTS + 1
        self.models: dict[str, _OfModel] = {}
        self.slo = SloCounts()
        self._controller = controller
        self._events = shell.published if shell is not None else None
        self._published: dict[str, Counter] = {}
        self._read_at_each_scrape(registry)

    def _read_at_each_scrape(self, registry: CollectorRegistry) -> None:
        """Rows computed at each scrape are current, and lack removed models."""

        def levels(name: str, doc: str, figure: Callable[[SloCount], float]) -> None:
            def rows() -> Rows:
                for model in self._controller.fleet.models.values() if self._controller else ():
                    self.slo.expect(model.key, model.slo)
                return self._summed((labels, figure(count)) for labels, count in self.slo.counts.items())

            TallyRows(name, doc, ["model", "level"], rows, registry=registry)

        def queues(name: str, doc: str, figure: Callable[[ModelQueue], float]) -> None:
            def rows() -> Rows:
                queues = self._controller.queues if self._controller else {}
                return self._summed(((key,), figure(queue)) for key, queue in queues.items())

            TallyRows(name, doc, ["model"], rows, kind="gauge", registry=registry)

        levels(semconv.SLO_REQUESTS_TOTAL, "Requests of models that set this level", lambda count: count.num)
        levels(semconv.SLO_MISSED_TOTAL, "Of these, the missed", lambda count: count.num_missed)
        queues(semconv.REQUESTS_IN_FLIGHT, "Requests at engines", lambda queue: queue.num_running)
        queues(semconv.REQUESTS_HELD, "Requests held", lambda queue: len(queue.waiting))

        def blocks() -> Rows:
            tracked = self._controller.balances.num_blocks() if self._controller else {}
            return self._summed(((key,), num) for key, num in tracked.items())

        doc = "Blocks of prompts tracked for routing by prefix, about 0.4 KB each"
        TallyRows(semconv.ROUTER_PREFIX_BLOCKS, doc, ["model"], blocks, kind="gauge", registry=registry)

    def published(self, event_type: str) -> None:
        if self._events is None:
            return
        child = self._published.get(event_type)
        if child is None:
            child = self._published[event_type] = self._events.labels("router", event_type)
        child.inc()

    def refused(self, status: int) -> None:
        self._refused.labels(str(status)).inc()

    def used(self, tenant: str, prompt_tokens: int, response_tokens: int) -> None:
        found = self._tenants.get(tenant)
        if found is None:
            found = self._of_tenant(self._tenant_cap(tenant))
        requests, prompt, response = found
        requests.value += 1
        prompt.value += prompt_tokens
        response.value += response_tokens

    def _of_tenant(self, name: str) -> tuple[CountChild, CountChild, CountChild]:
        if name not in self._tenants:
            tokens = self._tenant_tokens
            prompt, response = tokens.labels(name, "prompt"), tokens.labels(name, "response")
            self._tenants[name] = self._tenant_requests.labels(name), prompt, response
        return self._tenants[name]

    def continued(self, reason: str, outcome: str) -> None:
        """Count one stream that lost or had to leave its engine. `outcome`: "continued", "refused" (no other engine can
        continue it), "failed" (none did), "stayed" (another was asked and did not begin) or "client_left"."""
        self._continuations.labels(reason, outcome).inc()

    def finished(
        self,
        model: Model,
        fact: RequestFinished,
        *,
        begun: bool,
        queue_s: float,
        router_s: float,
        num_events: int,
        has_levels: bool = True,
    ) -> None:
        """Count one ended request. `queue_s`: 0 if never dispatched; `num_events`: a stream's SSE events; `has_levels`:
        it counts in the service levels."""
        key, status = model.key, fact.status
        mine = self.models.get(key)
        if mine is None:
            mine = self.models[key] = _OfModel(self, self.cap(key))
        code = mine.codes.get(status)
        if code is None:
            code = mine.codes[status] = self.requests.labels(self.cap(key), str(status))
        code.value += 1
        e2e_s, ttft_s, tpot_s = fact.e2e_s, -1.0, -1.0
        observed = [(mine.queue, queue_s), (mine.e2e, e2e_s)]
        if begun:
            ttft_s = fact.ttft_s
            observed += (mine.cold_ttft if fact.cold else mine.hot_ttft, ttft_s), (self._overhead, router_s)
            mine.prompt_tokens.value += fact.prompt_tokens if fact.tokens_exact else 0
            mine.response_tokens.value += fact.response_tokens
            if num_events:
                mine.chunks.value += num_events
                if fact.response_tokens > 1:
                    tpot_s = (e2e_s - ttft_s) / (fact.response_tokens - 1)
                    observed.append((mine.tpot, tpot_s))
        observe_all(observed)
        if has_levels and (model.slo.ttft_s or model.slo.tpot_s):
            self.slo.judge(key, model.slo, status, e2e_s=e2e_s, ttft_s=ttft_s, tpot_s=tpot_s)

    def _summed(self, rows: Iterator[tuple[tuple[str, ...], float]]) -> Rows:
        """Sum the models past the label cap. A row's first label is its model."""
        summed: dict[tuple[str, ...], float] = {}
        for (key, *others), value in rows:
            labels = (self.cap(key), *others)
            summed[labels] = summed.get(labels, 0) + value
        return summed.items()
