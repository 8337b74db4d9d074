"""The model that a client may have meant by a name that no model has."""

import difflib
from collections.abc import Iterable

LATEST = ":latest"  # the tag that Ollama appends to a name without one
MAX_NAMES = 256  # names compared, so that a wrong name costs little however many models there are
MAX_CHARS = 64
_CUTOFF = 0.6


def nearest(name: str, known: Iterable[str]) -> str:
    """The known name nearest to `name`; "" where none is near. A name that differs only in case, organisation or tag is
    nearest of all."""
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
    """A name without organisation, tag, case and surrounding blanks."""
    return name[-MAX_CHARS * 2 :].strip().rpartition("/")[2].partition(":")[0].casefold()[:MAX_CHARS].strip()
