"""What is made to go wrong, changed while the engine runs (`/admin/config`) or given at its start.

A superset of llm-d-inference-sim's options; its names are accepted too.
"""

import math
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

FAILURES = {  # failure type -> status, OpenAI type, code
    "rate_limit": (429, "rate_limit_error", "rate_limit_exceeded"),
    "invalid_api_key": (401, "authentication_error", "invalid_api_key"),
    "context_length": (400, "invalid_request_error", "context_length_exceeded"),
    "server_error": (503, "server_error", "server_error"),
    "invalid_request": (400, "invalid_request_error", "invalid_request"),
    "model_not_found": (404, "invalid_request_error", "model_not_found"),
}

_SIM_NAMES = {  # llm-d-inference-sim name -> ours, factor (its times are milliseconds, its rates per cent)
    "time-to-first-token": ("ttft_s", 1e-3),
    "inter-token-latency": ("itl_s", 1e-3),
    "failure-injection-rate": ("failure_rate", 1e-2),
    "failure-types": ("failure_types", None),
    "time-factor-under-load": ("time_factor_under_load", None),
    "mode": ("mode", None),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Faults:
    """Live behaviour. Times in emulated seconds; -1 keeps what the profile says."""

    ttft_s: float = -1.0
    itl_s: float = -1.0
    jitter: float = 0.0  # standard deviation of a step's time, as a part of it
    time_factor_under_load: float = 1.0  # a full batch takes this many times longer
    failure_rate: float = 0.0  # 0..1 of requests answered with an error
    failure_types: tuple[str, ...] = ()  # drawn from these; empty: all
    hang: bool = False  # accepts requests and makes no token; /health stays well
    hang_health: bool = False  # /health never answers
    health_delay_s: float = 0.0
    unhealthy: bool = False  # /health says 503
    crash_at_token: int = 0  # the process dies after so many tokens from now; 0: never
    grow_bytes_per_token: int = 0  # of host memory, taken with each token and kept
    startup_delay_s: float = 0.0
    startup_failure: str = ""  # not ready, for this reason
    sleep_failure: str = ""  # /pause and /sleep say 500, for this reason
    wake_failure: str = ""  # so does /wake_up
    mode: str = "random"  # random | echo


def changed(faults: Faults, changes: Any) -> Faults:
    """`faults` with these changes. Raises ValueError naming the field that is unknown or of the wrong kind."""
    if not isinstance(changes, dict):
        raise ValueError("a JSON object is expected")
    kinds = {field.name: type(getattr(Faults(), field.name)) for field in fields(Faults)}
    values: dict[str, Any] = {}
    for given, value in changes.items():
        name, factor = _SIM_NAMES.get(given, (given, None))
        if name not in kinds:
            raise ValueError(f"{given}: unknown option")
        values[name] = _checked(given, kinds[name], value, factor)
    result = replace(faults, **values)
    if unknown := set(result.failure_types) - set(FAILURES):
        raise ValueError(f"failure_types: {sorted(unknown)[0]} is not one of {', '.join(FAILURES)}")
    if not 0.0 <= result.failure_rate <= 1.0:
        raise ValueError("failure_rate: between 0 and 1")
    if result.mode not in ("random", "echo"):
        raise ValueError("mode: random or echo")
    return result


def _checked(name: str, kind: type, value: Any, factor: float | None) -> Any:
    if kind is float and isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
        return float(value) * (factor or 1.0)
    if kind is tuple and isinstance(value, list | tuple) and all(isinstance(item, str) for item in value):
        return tuple(value)
    if kind in (bool, str, int) and type(value) is kind:
        return value
    raise ValueError(f"{name}: {kind.__name__} expected")


def as_json(faults: Faults) -> dict[str, Any]:
    return {**asdict(faults), "emulated": True}
