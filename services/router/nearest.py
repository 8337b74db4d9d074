"""Suggest the model that an unknown name probably means."""

import difflib
from collections.abc import Iterable

LATEST = ":latest"  # Ollama's default tag
MAX_NAMES = 256  # bounds the cost of a wrong name
MAX_CHARS = 64
_CUTOFF = 0.6


def nearest(name: str, known: Iterable[str]) -> str:
    """Return the known name nearest to `name`, or "". A difference only in case, organisation or tag is nearest."""
    by_short: dict[str, str] = {}
    for one in known:
        by_short.setdefault(_short(one), one)
        if len(by_short) == MAX_NAMES:
            break
    wanted = _short(name)
    if wanted in by_short:
        return by_short[wanted]
    found = difflib.get_close_matches(wanted, by_short, n=1, cutoff=_CUTOFF)
    return by_short[found[0]] if found else ""


def _short(name: str) -> str:
    return name[-MAX_CHARS * 2 :].strip().rpartition("/")[2].partition(":")[0].casefold()[:MAX_CHARS].strip()
