"""Record a request's use of a model, without its text."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageRecord:
    """A request taken by an engine, or whose client left in the queue. Epoch seconds. Prompt tokens include cached
    ones."""

    record_id: str  # from the router; request ids, from clients, may repeat
    request_id: str
    tenant: str  # "": data port without keys
    key_id: str
    model_key: str
    path: str  # on the data port
    arrived_at: float
    finished_at: float
    prompt_tokens: int
    cached_tokens: int  # 0: unknown
    response_tokens: int
    tokens_exact: bool  # by the engine, else estimated
    held_s: float  # queued, including a start
    cold: bool
    instance_id: str
    status: int
    error_code: str = ""
    emulated: bool = False
    gpu_s: float = 0.0  # GPU memory: its start or wake, and its share while served
    gpu_known: bool = False  # whether the bytes behind `gpu_s` are known
