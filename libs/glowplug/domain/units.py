"""Parse and show sizes and durations."""

import re
from functools import lru_cache
from typing import Final

DAY_S: Final = 86_400.0
_NUMBER = re.compile(r"\s*(-?[0-9]+(?:\.[0-9]+)?)\s*([a-z]*)\s*", re.IGNORECASE)
_BYTES = {"": 1, "b": 1} | {
    f"{letter}{suffix}": base**power
    for power, letter in enumerate("kmgtp", start=1)
    for suffix, base in (("", 1024), ("b", 1000), ("ib", 1024), ("i", 1024))
}
_SECONDS = {"": 1.0, "ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": DAY_S, "w": 7 * DAY_S}


def parse_bytes(text: str) -> int:
    """Parse a size: '1GiB' -> 1073741824, '1.5GB' -> 1500000000, '512' -> 512; 'G' means GiB. Raises ValueError."""
    match = _NUMBER.fullmatch(text)
    if match is None or match[2].lower() not in _BYTES or match[1].startswith("-"):
        raise ValueError(f"not a size in bytes: {text!r} (try 512MiB, 1GiB, 24GB)")
    return int(float(match[1]) * _BYTES[match[2].lower()])


def parse_seconds(text: str) -> float:
    """Parse a duration: '5m' -> 300.0, '2w' -> 1209600.0, '250ms' -> 0.25, '-1' -> -1.0. Raises ValueError."""
    match = _NUMBER.fullmatch(text)
    if match is None or match[2].lower() not in _SECONDS:
        raise ValueError(f"not a duration: {text!r} (try 30s, 5m, 1h, 30d)")
    return float(match[1]) * _SECONDS[match[2].lower()]


@lru_cache(maxsize=4096)
def show_bytes(num_bytes: float) -> str:
    """'512 MiB', '1.5 GiB', '17 B'."""
    for unit, step in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if num_bytes >= step:
            return f"{num_bytes / step:.1f} {unit}" if num_bytes < 10 * step else f"{num_bytes / step:.0f} {unit}"
    return f"{num_bytes:.0f} B"
