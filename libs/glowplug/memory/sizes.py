"""Byte sizes as people write them."""

import re

_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([kmgtp]?i?b?)\s*", re.IGNORECASE)
_UNITS = {"": 1, "b": 1} | {
    f"{letter}{suffix}": base**power
    for power, letter in enumerate("kmgtp", start=1)
    for suffix, base in (("", 1024), ("b", 1000), ("ib", 1024), ("i", 1024))
}


def parse_bytes(text: str) -> int:
    """'1GiB' -> 1073741824, '1.5GB' -> 1500000000, '512' -> 512; 'G' means GiB. Raises ValueError."""
    match = _SIZE.fullmatch(text)
    unit = match.group(2).lower() if match else ""
    if match is None or unit not in _UNITS:
        raise ValueError(f"not a size in bytes: {text!r} (try 512MiB, 1GiB, 24GB)")
    return int(float(match.group(1)) * _UNITS[unit])
