"""Prometheus instruments of the prefetcher; names in telemetry/semconv.py."""

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram

from glowplug.telemetry import semconv
from glowplug.telemetry.metrics import SECONDS_BUCKETS


class PrefetcherMetrics:
    """What moved, how fast, what stayed."""

    def __init__(self, registry: CollectorRegistry = REGISTRY) -> None:
        self.fetched_bytes = Counter(
            semconv.FETCHED_BYTES_TOTAL, "Bytes that came over the link", ["source"], registry=registry
        )
        self.fetch_s = Histogram(
            semconv.FETCH_SECONDS, "Time of whole fetches", ["source"], registry=registry, buckets=SECONDS_BUCKETS
        )
        self.failures = Counter(semconv.FETCH_FAILURES_TOTAL, "Fetches that failed", ["code"], registry=registry)
        self.retries = Counter(
            semconv.FETCH_RETRIES_TOTAL, "Reads that were tried again", ["source"], registry=registry
        )
        self.hits = Counter(semconv.CACHE_HITS_TOTAL, "Fetches answered from host memory", registry=registry)
        self.misses = Counter(semconv.CACHE_MISSES_TOTAL, "Fetches that had to read a source", registry=registry)
        self.evictions = Counter(semconv.CACHE_EVICTIONS_TOTAL, "Weights evicted for room", registry=registry)
        self.cache_bytes = Gauge(semconv.CACHE_BYTES, "Host memory taken by weights", registry=registry)
        self.capacity_bytes = Gauge(semconv.CACHE_CAPACITY_BYTES, "Host memory weights may take", registry=registry)
        self.in_flight = Gauge(semconv.FETCHES_IN_FLIGHT, "Fetches queued or running", registry=registry)
        self.link_bytes = Gauge(semconv.LINK_BYTES_IN_FLIGHT, "Bytes asked for and not landed", registry=registry)
