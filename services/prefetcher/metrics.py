"""Prometheus instruments of the prefetcher, labelled by node; names in telemetry/semconv.py."""

from functools import partial

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram

from glowplug.telemetry import semconv
from glowplug.telemetry.metrics import SECONDS_BUCKETS


class PrefetcherMetrics:
    def __init__(self, node_id: str, registry: CollectorRegistry = REGISTRY) -> None:
        def gauge(name: str, doc: str) -> Gauge:
            return Gauge(name, doc, ["node"], registry=registry).labels(node_id)

        def counter(name: str, doc: str) -> Counter:
            return Counter(name, doc, ["node"], registry=registry).labels(node_id)

        def counters(name: str, doc: str, label: str) -> "partial[Counter]":
            return partial(Counter(name, doc, ["node", label], registry=registry).labels, node_id)

        self.fetched_bytes = counters(semconv.FETCHED_BYTES_TOTAL, "Bytes fetched, by source", "source")
        self.fetch_s = Histogram(
            semconv.FETCH_SECONDS, "Time of whole fetches", ["source"], registry=registry, buckets=SECONDS_BUCKETS
        )
        self.failures = counters(semconv.FETCH_FAILURES_TOTAL, "Fetches that failed", "code")
        self.retries = counters(semconv.FETCH_RETRIES_TOTAL, "Reads that were retried", "source")
        self.hits = counter(semconv.CACHE_HITS_TOTAL, "Fetches answered from host memory")
        self.misses = counter(semconv.CACHE_MISSES_TOTAL, "Fetches that host memory could not answer")
        self.evictions = counter(semconv.CACHE_EVICTIONS_TOTAL, "Weights evicted from host memory for others")
        self.wrong_pieces = counters(semconv.WRONG_PIECES_TOTAL, "Pieces that differed from their checksum", "source")
        self.peer_served_bytes = counter(semconv.PEER_SERVED_BYTES_TOTAL, "Bytes that other nodes read here")
        self.link_bytes_per_s = gauge(semconv.LINK_BYTES_PER_S, "Rate of the link, declared or measured; 0: not known")
        self.disk_written_bytes = counter(semconv.DISK_WRITTEN_BYTES_TOTAL, "Bytes of copies written to disk")
        self.disk_evictions = counter(semconv.DISK_EVICTIONS_TOTAL, "Copies that left the disk for others")
        self.disk_failures = counters(semconv.DISK_FAILURES_TOTAL, "Copies that failed", "code")
        self.disk_bytes = gauge(semconv.DISK_BYTES, "Disk bytes used by copies of weights")
        self.disk_capacity_bytes = gauge(semconv.DISK_CAPACITY_BYTES, "Disk bytes that copies may use; 0: no disk tier")
        self.cache_bytes = gauge(semconv.CACHE_BYTES, "Host memory used by weights")
        self.capacity_bytes = gauge(semconv.CACHE_CAPACITY_BYTES, "Host memory that weights may use")
        self.in_flight = gauge(semconv.FETCHES_IN_FLIGHT, "Fetches queued or running")
        self.link_bytes = gauge(semconv.LINK_BYTES_IN_FLIGHT, "Bytes requested and not yet arrived")
