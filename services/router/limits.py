"""Every bound of the data port, in one place. Seconds and bytes; `settings.py` fills it from the environment."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
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
    engine_idle_s: float = 4.0  # pooled connection; below the 5 s at which engines close theirs
    num_pooled: int = 256  # idle connections per instance
    keepalive_after_s: float = 2.0  # held stream: headers and the first comment
    keepalive_every_s: float = 2.0
    engine_error_bytes: int = 64 * 1024  # of an engine's error kept to be told inside a stream
    engine_head_bytes: int = 256 * 1024  # of an engine's answer before its body, interim answers included
    event_bytes: int = 256 * 1024  # an unfinished SSE event kept back, before it is passed on in parts
