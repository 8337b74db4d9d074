"""Injected faults, set at the start or while the engine runs (`/admin/config`)."""

import math
from typing import Annotated, Any, Literal

import msgspec

FailureType = Literal[
    "rate_limit", "invalid_api_key", "context_length", "server_error", "invalid_request", "model_not_found"
]
FAILURES: dict[FailureType, tuple[int, str, str]] = {  # status, OpenAI type, code
    "rate_limit": (429, "rate_limit_error", "rate_limit_exceeded"),
    "invalid_api_key": (401, "authentication_error", "invalid_api_key"),
    "context_length": (400, "invalid_request_error", "context_length_exceeded"),
    "server_error": (503, "server_error", "server_error"),
    "invalid_request": (400, "invalid_request_error", "invalid_request"),
    "model_not_found": (404, "invalid_request_error", "model_not_found"),
}


class Faults(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Live behaviour. Times in emulated seconds; -1 keeps the profile's."""

    ttft_s: float = -1.0
    itl_s: float = -1.0
    failure_rate: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.0
    failure_types: tuple[FailureType, ...] = ()  # empty: all
    hang: bool = False  # /health stays well
    hang_health: bool = False
    health_delay_s: float = 0.0
    unhealthy: bool = False
    crash_at_token: int = 0  # after so many more tokens; 0: never
    grow_bytes_per_token: int = 0  # host memory, kept
    startup_failure: str = ""
    sleep_failure: str = ""  # /pause and /sleep answer 500
    wake_failure: str = ""  # likewise
    mode: Literal["random", "echo"] = "random"


def changed(faults: Faults, changes: Any) -> Faults:
    """Raises ValueError naming the unknown or wrong field."""
    if not isinstance(changes, dict):
        raise ValueError("a JSON object is expected")
    if endless := [name for name, value in changes.items() if isinstance(value, float) and not math.isfinite(value)]:
        raise ValueError(f"{endless[0]}: a finite number is expected")
    try:
        return msgspec.convert(msgspec.structs.asdict(faults) | changes, Faults)
    except msgspec.ValidationError as error:
        problem, _, place = str(error).partition(" - at `$.")
        raise ValueError(f"{place.rstrip('`')}: {problem}" if place else problem) from error


def as_json(faults: Faults) -> dict[str, Any]:
    return {**msgspec.structs.asdict(faults), "emulated": True}
