"""What one request used: who asked which model, and its tokens and seconds; no text of it."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageRecord:
    """One request that an engine took, or whose client left while it was held. Times are epoch seconds. Prompt tokens
    include those that the engine had cached."""

    record_id: str  # made by the router, one a request; the request id may be the client's and come twice
    request_id: str
    tenant: str  # "" where the data port asks for no key
    key_id: str
    model_key: str
    path: str  # of the data port
    arrived_at: float
    finished_at: float
    prompt_tokens: int
    cached_tokens: int  # 0 where the engine does not say
    response_tokens: int
    tokens_exact: bool  # counted by the engine; else estimated by the router
    held_s: float  # in the queue, a start that it waited for included
    cold: bool
    instance_id: str
    status: int
    error_code: str = ""
    emulated: bool = False
    gpu_s: float = 0.0  # GPU memory: of the start or wake that was for it, and its share of each moment it was served
    gpu_known: bool = False  # whether the router knew the bytes that `gpu_s` takes
