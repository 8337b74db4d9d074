"""Settings of the router, and every bound of its data port, in seconds and bytes."""

from dataclasses import dataclass, field, replace
from typing import Annotated

from glowplug.controllers.router.params import RouterParams
from glowplug.domain.bounds import Bounds, Count, Positive, Share
from glowplug.domain.reading import ADVANCED, CONSTANT, SETTING
from glowplug.policies.systems import UNION
from glowplug.runtime.settings import EngineSecret, Port, ServiceSettings, a_policy
from glowplug.services.router.tracing import Sampler


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Every bound of the data port, in one place."""

    header_bytes: int = 32 * 1024  # request line and headers; likewise framing and trailers of a chunked body: 431
    num_headers: int = 128  # header lines of a request; likewise its trailer lines: 431
    chunk_overhead: int = 16  # framing bytes per byte of a chunked body, beyond header_bytes; a chunk of one byte has 5
    max_body_bytes: Annotated[int, Bounds(least=1024), SETTING] = 10 * 1024 * 1024  # 413
    buffered_bytes: int = 512 * 1024 * 1024  # request bodies held by the whole process: 503
    max_connections: Annotated[Count, SETTING] = 10_000  # 503 and closed
    num_pipelined: int = 32  # requests waiting on one connection before its reads pause
    header_s: float = 10.0  # from a request's first byte to its last header: 408
    body_s: float = 60.0  # from the last header to the last byte of the body: 408
    client_idle_s: Annotated[Positive, ADVANCED] = 75.0  # keep-alive between requests
    linger_s: float = 2.0  # reading on after the last answer, so that the client receives it
    stall_s: float = 120.0  # a client that does not read its answer
    write_buffer_bytes: int = 2 << 20  # to a client, before its engine, which others may wait for, is paused
    write_buffers_bytes: int = 256 << 20  # to all clients; beyond, each has crowded_buffer_bytes
    crowded_buffer_bytes: int = 64 * 1024
    connect_s: float = 2.0  # to an engine
    engine_silence_s: Annotated[Positive, ADVANCED] = 300.0  # an engine that sends nothing at all
    deserted_silence_s: float = 5.0  # likewise in mid-stream, once the engine's node has left
    engine_idle_s: float = 4.0  # pooled connection; below the 5 s at which engines close theirs
    num_pooled: int = 256  # idle connections per instance
    keepalive_after_s: float = 2.0  # until a held stream gets headers and its first comment
    keepalive_every_s: float = 2.0
    engine_error_bytes: int = 64 * 1024  # kept of an engine's error answer
    engine_head_bytes: int = 256 * 1024  # of an engine's answer before its body, interim answers included
    client_keep_alive_s: Annotated[float, SETTING] = 0.0  # most of Ollama's `keep_alive`; 0: ignored
    event_bytes: int = 256 * 1024  # of an unfinished SSE event, before it is passed on in parts


@dataclass(kw_only=True)
class RouterSettings(EngineSecret, ServiceSettings):
    data_port: Port = 0  # 0 lets the kernel choose
    reuse_port: bool = False  # several router processes share the port (SO_REUSEPORT)
    drain_delay_s: float = 0.0  # after SIGTERM: not ready, but serving, so that balancers notice
    tick_s: Annotated[Positive, CONSTANT] = 0.25
    policy_routing: Annotated[str, a_policy("routing")] = UNION.policies["routing"]
    policy_fairness: Annotated[str, a_policy("fairness")] = UNION.policies["fairness"]  # among waiting tenants
    length_model: Annotated[str, ADVANCED] = ""  # file; empty: the one included; none: none
    strict_fields: Annotated[bool, ADVANCED] = False  # unknown field: 400
    console_url: str = ""  # the console's address for people, shown at / of the data port
    trace_ratio: Share = 1.0  # share of requests without a trace of their own that are traced
    trace_per_s: float = 20.0  # most of these
    requests_kept: Annotated[int, CONSTANT] = 500  # finished ones, for /v1/requests
    files_url: str = ""  # where files of batches are kept: file:///folder, s3://bucket/prefix; empty: no batches
    files_max_bytes: Annotated[int, Bounds(least=1024)] = 200 << 20  # of one file
    files_tenant_bytes: int = 10 << 30  # of all files of a tenant; 0: no bound
    files_kept_s: float = 30 * 86_400.0  # until files and ended batches are removed; 0: never
    batch_max_lines: Count = 50_000  # requests of one batch
    batch_lines_at_once: Count = 64  # most requests of all batches sent at once
    usage_dir: Annotated[str, ADVANCED] = ""  # of usage records not stored yet; empty: the state directory
    usage_spool_bytes: int = 256 << 20  # usage records kept while the bus is away; 0: no records are made

    params: RouterParams = field(default_factory=RouterParams)
    limits: Limits = field(default_factory=Limits)

    @property
    def usage_slots(self) -> int:
        """The requests that the router can be at in one moment."""
        return self.limits.max_connections + self.batch_lines_at_once + 1

    def controller_params(self) -> RouterParams:
        router_id = self.service_id or "router-1"
        return replace(self.params, router_id=router_id, policy=self.policy_routing, fairness=self.policy_fairness)

    def sampler(self) -> Sampler:
        return Sampler(self.trace_ratio, self.trace_per_s)
