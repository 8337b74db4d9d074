"""Settings of the router, and every bound of its data port. Seconds and bytes."""

from dataclasses import dataclass

from pydantic import Field

from glowplug.controllers.router.params import RouterParams
from glowplug.policies.routing.port import BalancerParams
from glowplug.runtime.settings import ServiceSettings
from services.router.tracing import Sampler


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Every bound of the data port, in one place; RouterSettings fills it from the environment."""

    header_bytes: int = 32 * 1024  # request line and headers; again, the framing and trailers of a chunked body: 431
    num_headers: int = 128  # header lines of a request, and again its trailer lines: 431
    chunk_overhead: int = 16  # framing bytes per byte of a chunked body, beyond header_bytes; a chunk of one byte has 5
    body_bytes: int = 10 * 1024 * 1024  # 413
    buffered_bytes: int = 512 * 1024 * 1024  # request bodies held by the whole process: 503
    num_connections: int = 10_000  # 503 and closed
    num_pipelined: int = 32  # requests waiting on one connection before its reads pause
    header_s: float = 10.0  # from a request's first byte to its last header: 408
    body_s: float = 60.0  # from the last header to the last byte of the body: 408
    idle_s: float = 75.0  # keep-alive between requests
    linger_s: float = 2.0  # reading on after a last answer, so that the client sees it
    stall_s: float = 120.0  # a client that reads nothing
    write_buffer_bytes: int = 64 * 1024  # to a client, before its engine is paused
    connect_s: float = 2.0  # to an engine
    engine_silence_s: float = 300.0  # an engine that sends nothing at all
    deserted_silence_s: float = 5.0  # likewise in mid-stream, once its node is said to have left
    engine_idle_s: float = 4.0  # pooled connection; below the 5 s at which engines close theirs
    num_pooled: int = 256  # idle connections per instance
    keepalive_after_s: float = 2.0  # held stream: headers and the first comment
    keepalive_every_s: float = 2.0
    engine_error_bytes: int = 64 * 1024  # of an engine's error kept for an error event inside a stream
    engine_head_bytes: int = 256 * 1024  # of an engine's answer before its body, interim answers included
    event_bytes: int = 256 * 1024  # an unfinished SSE event kept back, before it is passed on in parts


DEFAULT = Limits()


class RouterSettings(ServiceSettings):
    data_port: int = Field(0, ge=0, le=65535)  # 0 lets the kernel choose
    reuse_port: bool = False  # several router processes on one data port (SO_REUSEPORT)
    drain_delay_s: float = Field(0.0, ge=0)  # after SIGTERM not ready and served as before: balancers notice
    tick_s: float = Field(0.25, gt=0)
    policy_routing: str = "union"  # see docs/policies.md
    length_model: str = ""  # a file that says how long answers will be; empty: the one that comes with it; none: none
    routing_hold_overloaded: bool = False  # preserve_load_aware: wait while every KV cache is about to be full
    max_header_bytes: int = Field(DEFAULT.header_bytes, ge=1024)
    max_body_bytes: int = Field(DEFAULT.body_bytes, ge=1024)
    max_buffered_bytes: int = Field(DEFAULT.buffered_bytes, ge=1024)
    engine_secret: str = ""  # the agents': makes the keys that engines ask for (set it on routers first)
    passed_fields: str = ""  # comma-separated: fields of a request that go to engines unchecked (n_probs, grammar, ...)
    max_connections: int = Field(DEFAULT.num_connections, ge=1)
    header_timeout_s: float = Field(DEFAULT.header_s, gt=0)
    body_timeout_s: float = Field(DEFAULT.body_s, gt=0)
    client_idle_s: float = Field(DEFAULT.idle_s, gt=0)
    client_stall_s: float = Field(DEFAULT.stall_s, gt=0)
    engine_connect_s: float = Field(DEFAULT.connect_s, gt=0)
    engine_silence_s: float = Field(DEFAULT.engine_silence_s, gt=0)
    keepalive_after_s: float = Field(DEFAULT.keepalive_after_s, ge=0)
    keepalive_every_s: float = Field(DEFAULT.keepalive_every_s, gt=0)
    waiting_every_s: float = Field(0.5, gt=0)
    quarantine_s: float = Field(1.0, ge=0)
    failure_memory_s: float = Field(5.0, ge=0)
    bus_grace_s: float = Field(5.0, ge=0)  # how long held requests wait for a bus that stores nothing
    max_continuations: int = Field(3, ge=0)  # engines that may go on with one stream after others were lost; 0: none
    continue_within_s: float = Field(60.0, gt=0)  # how long such a stream may wait for an instance
    move_within_s: float = Field(5.0, ge=0)  # how long one waits that leaves what drains, and then stays; 0: none
    default_start_s: float = Field(5.0, gt=0)  # a start of an engine of which nothing is known
    late_ratio: float = Field(1.2, ge=0)  # a wait estimated at so many times what may still be waited: 429; 0: never
    trace_ratio: float = Field(1.0, ge=0, le=1)  # of requests that bring no trace of their own
    trace_per_s: float = Field(20.0, ge=0)  # at most
    requests_kept: int = Field(500, ge=0)  # finished ones, for /v1/requests
    outbox_limit: int = Field(10_000, ge=1)  # events waiting for the bus
    load_every_s: float = Field(0.5, gt=0)
    load_soonest_s: float = Field(0.2, gt=0)  # changes closer together are one report
    requests_every_s: float = Field(0.5, gt=0)  # report of the requests held and under way, while there are any
    requests_reported: int = Field(100, ge=0, le=10_000)  # the oldest, in one report; 0 reports none

    @property
    def passed(self) -> tuple[str, ...]:
        return tuple(name.strip() for name in self.passed_fields.split(",") if name.strip())

    def limits(self) -> Limits:
        return Limits(
            header_bytes=self.max_header_bytes,
            body_bytes=self.max_body_bytes,
            buffered_bytes=self.max_buffered_bytes,
            num_connections=self.max_connections,
            header_s=self.header_timeout_s,
            body_s=self.body_timeout_s,
            idle_s=self.client_idle_s,
            stall_s=self.client_stall_s,
            connect_s=self.engine_connect_s,
            engine_silence_s=self.engine_silence_s,
            keepalive_after_s=self.keepalive_after_s,
            keepalive_every_s=self.keepalive_every_s,
        )

    def params(self) -> RouterParams:
        return RouterParams(
            router_id=self.service_id or "router-1",
            policy=self.policy_routing,
            waiting_every_s=self.waiting_every_s,
            quarantine_s=self.quarantine_s,
            failure_memory_s=self.failure_memory_s,
            bus_grace_s=self.bus_grace_s,
            default_start_s=self.default_start_s,
            max_continuations=self.max_continuations,
            continue_within_s=self.continue_within_s,
            move_within_s=self.move_within_s,
            late_ratio=self.late_ratio,
            balancer=BalancerParams(hold_overloaded=self.routing_hold_overloaded),
        )

    def sampler(self) -> Sampler:
        return Sampler(self.trace_ratio, self.trace_per_s)
