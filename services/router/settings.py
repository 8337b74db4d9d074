"""Settings of the router, and every bound of its data port, in seconds and bytes."""

from dataclasses import dataclass

from pydantic import Field

from glowplug.controllers.router.params import RouterParams
from glowplug.policies.routing.port import BalancerParams
from glowplug.runtime.settings import ServiceSettings, advanced
from glowplug.services.router.tracing import Sampler


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Every bound of the data port, in one place; RouterSettings fills in those that are settings."""

    header_bytes: int = 32 * 1024  # request line and headers; likewise framing and trailers of a chunked body: 431
    num_headers: int = 128  # header lines of a request; likewise its trailer lines: 431
    chunk_overhead: int = 16  # framing bytes per byte of a chunked body, beyond header_bytes; a chunk of one byte has 5
    body_bytes: int = 10 * 1024 * 1024  # 413
    buffered_bytes: int = 512 * 1024 * 1024  # request bodies held by the whole process: 503
    num_connections: int = 10_000  # 503 and closed
    num_pipelined: int = 32  # requests waiting on one connection before its reads pause
    header_s: float = 10.0  # from a request's first byte to its last header: 408
    body_s: float = 60.0  # from the last header to the last byte of the body: 408
    idle_s: float = 75.0  # keep-alive between requests
    linger_s: float = 2.0  # reading on after the last answer, so that the client receives it
    stall_s: float = 120.0  # a client that does not read its answer
    write_buffer_bytes: int = 64 * 1024  # to a client, before its engine is paused
    connect_s: float = 2.0  # to an engine
    engine_silence_s: float = 300.0  # an engine that sends nothing at all
    deserted_silence_s: float = 5.0  # likewise in mid-stream, once the engine's node has left
    engine_idle_s: float = 4.0  # pooled connection; below the 5 s at which engines close theirs
    num_pooled: int = 256  # idle connections per instance
    keepalive_after_s: float = 2.0  # until a held stream gets headers and its first comment
    keepalive_every_s: float = 2.0
    engine_error_bytes: int = 64 * 1024  # kept of an engine's error answer
    engine_head_bytes: int = 256 * 1024  # of an engine's answer before its body, interim answers included
    client_keep_alive_s: float = 0.0  # the longest `keep_alive` that a client gets; 0: only the operator decides
    event_bytes: int = 256 * 1024  # of an unfinished SSE event, before it is passed on in parts


DEFAULT = Limits()


class RouterSettings(ServiceSettings):
    data_port: int = Field(0, ge=0, le=65535)  # 0 lets the kernel choose
    reuse_port: bool = False  # several router processes share the port (SO_REUSEPORT)
    drain_delay_s: float = Field(0.0, ge=0)  # after SIGTERM: not ready, but serving, so that balancers notice
    tick_s: float = advanced(0.25, gt=0)
    policy_routing: str = "union"
    policy_fairness: str = "vtc"  # among tenants that wait for one model
    length_model: str = advanced("")  # file; empty: the one included; none: none
    routing_hold_overloaded: bool = advanced(False)  # policy preserve_load_aware
    max_body_bytes: int = Field(DEFAULT.body_bytes, ge=1024)
    engine_secret: str = ""  # keys of engines are made from it; set it on routers first
    strict_fields: bool = advanced(False)  # unknown field: 400
    client_keep_alive_s: float = Field(DEFAULT.client_keep_alive_s, ge=0)  # most of Ollama's `keep_alive`; 0: ignored
    console_url: str = ""  # the console's address for people, shown at / of the data port
    max_connections: int = Field(DEFAULT.num_connections, ge=1)
    client_idle_s: float = advanced(DEFAULT.idle_s, gt=0)
    engine_silence_s: float = advanced(DEFAULT.engine_silence_s, gt=0)
    bus_grace_s: float = advanced(5.0, ge=0)  # until held requests are refused without a bus
    max_continuations: int = Field(3, ge=0)  # times a stream may go on after losing its engine; 0: never
    continue_within_s: float = advanced(60.0, gt=0)  # longest wait of such a stream
    move_within_s: float = advanced(5.0, ge=0)  # of a stream that leaves a draining instance
    late_ratio: float = Field(1.2, ge=0)  # estimated wait over the time left from which the answer is 429; 0: never
    trace_ratio: float = Field(1.0, ge=0, le=1)  # share of requests without a trace of their own that are traced
    trace_per_s: float = Field(20.0, ge=0)  # most of these
    requests_kept: int = advanced(500, ge=0)  # finished ones, for /v1/requests
    files_url: str = ""  # where files of batches are kept: file:///folder, s3://bucket/prefix; empty: no batches
    files_max_bytes: int = Field(200 << 20, ge=1024)  # of one file
    files_tenant_bytes: int = Field(10 << 30, ge=0)  # of all files of a tenant; 0: no bound
    files_kept_s: float = Field(30 * 86_400.0, ge=0)  # until files and ended batches are removed; 0: never
    batch_max_lines: int = Field(50_000, ge=1)  # requests of one batch
    batch_lines_at_once: int = Field(64, ge=1)  # most requests of all batches sent at once
    batch_lease_s: float = advanced(6.0, ge=1)  # after this long without the router that runs batches, another does
    usage_dir: str = advanced("")  # of usage records not stored yet, and requests it is at; empty: the state directory
    usage_spool_bytes: int = Field(256 << 20, ge=0)  # usage records kept while the bus is away; 0: no records are made

    @property
    def usage_slots(self) -> int:
        """The requests that the router can be at in one moment."""
        return self.max_connections + self.batch_lines_at_once + 1

    def limits(self) -> Limits:
        return self.filled(
            Limits,
            body_bytes=self.max_body_bytes,
            num_connections=self.max_connections,
            idle_s=self.client_idle_s,
        )

    def params(self) -> RouterParams:
        return self.filled(
            RouterParams,
            router_id=self.service_id or "router-1",
            policy=self.policy_routing,
            fairness=self.policy_fairness,
            balancer=BalancerParams(hold_overloaded=self.routing_hold_overloaded),
        )

    def sampler(self) -> Sampler:
        return Sampler(self.trace_ratio, self.trace_per_s)
