"""How many bytes weights on other machines are, asked of their source before anything is fetched."""

import asyncio
from collections.abc import Callable
from dataclasses import replace

from glowplug.weights.files import NoAnswer
from glowplug.weights.source import SourceInfo, SourceInterrupted, SourceOptions, redacted
from glowplug.weights.sources import open_source

ASK_S = 4.0  # a source that is there answers within a second or two
Measure = Callable[[str], SourceInfo | None]  # address -> what its source holds; None where it is not asked


def not_asked(_: str) -> SourceInfo | None:
    """Asks nothing."""
    return None


class Remembered:
    """`measure`, which asks no address a second time that has answered."""

    def __init__(self, measure: Measure) -> None:
        self._measure = measure
        self._answers: dict[str, SourceInfo | None] = {}

    def __call__(self, uri: str) -> SourceInfo | None:
        if uri not in self._answers:
            self._answers[uri] = self._measure(uri)
        return self._answers[uri]


def measured(uri: str, options: SourceOptions = SourceOptions(), timeout_s: float = ASK_S) -> SourceInfo:
    """What the source of `uri` holds now. Blocks for about `timeout_s` at most, and runs an event loop of its own: for
    a thread without one. Raises WeightsUnavailable; NoAnswer for what may work the next time."""
    bounded = replace(
        options,
        connect_timeout_s=min(options.connect_timeout_s, timeout_s),
        stall_timeout_s=min(options.stall_timeout_s, timeout_s),
    )
    return asyncio.run(_measured(uri, bounded, timeout_s))


async def _measured(uri: str, options: SourceOptions, timeout_s: float) -> SourceInfo:
    source = open_source(uri, options)
    try:
        async with asyncio.timeout(timeout_s):
            return await source.measure()
    except SourceInterrupted as error:
        raise NoAnswer(0, str(error)) from error
    except TimeoutError as error:
        raise NoAnswer(0, f"{redacted(uri)}: no answer within {timeout_s:g} s") from error
    finally:
        await source.close()
