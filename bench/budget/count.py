"""Count the work of a piece of code, so that the same code gives the same figures on every machine."""

import gc
import sys
import tracemalloc
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, Final

ROOT: Final = Path(__file__).parents[2]
_OWN: Final = (f"{ROOT / 'libs'}/", f"{ROOT}/")


@dataclass(frozen=True, slots=True)
class Count:
    """`calls` of Python functions, by file; `num_bytes` allocated at once on top of those held before."""

    calls: Counter[str] = field(default_factory=Counter)
    num_bytes: int = 0

    @property
    def num_calls(self) -> int:
        return self.calls.total()


def counted(once: Callable[[], Any]) -> Count:
    """Count a repetition of `once`, after a first call that fills caches. The bytes are the least of three, as caches
    grow now and then."""
    once()
    return Count(calls_of(once), min(bytes_of(once) for _ in range(3)))


def calls_of(once: Callable[[], Any]) -> Counter[str]:
    calls: Counter[str] = Counter()

    def seen(frame: FrameType, event: str, _: Any) -> None:
        if event == "call":
            calls[frame.f_code.co_filename] += 1

    before = sys.getprofile()
    sys.setprofile(seen)
    try:
        once()
    finally:
        sys.setprofile(before)
    calls[calls_of.__code__.co_filename] = 0
    return Counter({_short(name): num for name, num in calls.items() if num})


def bytes_of(once: Callable[[], Any]) -> int:
    gc.collect()
    gc.disable()
    tracemalloc.start()
    try:
        once()  # fills caches, which then count as held before
        before = tracemalloc.get_traced_memory()[0]
        tracemalloc.reset_peak()
        once()
        return tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()
        gc.enable()


def _short(name: str) -> str:
    """The path below the repository; of a library, its last two names."""
    name = name.replace(f"{ROOT}/libs/glowplug/services/", f"{ROOT}/services/")
    for start in _OWN:
        if name.startswith(start) and "site-packages" not in name:
            return name.removeprefix(start)
    return "/".join(Path(name).parts[-2:])
