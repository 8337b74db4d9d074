"""Ask a source for the sizes of its weights, before any fetch."""

import asyncio
from collections.abc import Callable
from dataclasses import replace

from glowplug.weights.files import NoAnswer
from glowplug.weights.source import SourceInfo, SourceInterrupted, SourceOptions, redacted
from glowplug.weights.sources import open_source

ASK_S = 4.0
Measure = Callable[[str], SourceInfo | None]  # address -> its source's content; None where not asked


def not_asked(_: str) -> SourceInfo | None:
    return None


class Remembered:
    def __init__(self, measure: Measure) -> None:
        self._measure = measure
        self._answers: dict[str, SourceInfo | None] = {}

    def __call__(self, uri: str) -> SourceInfo | None:
        if uri not in self._answers:
            self._answers[uri] = self._measure(uri)
        return self._answers[uri]


def measured(uri: str, options: SourceOptions = SourceOptions(), timeout_s: float = ASK_S) -> SourceInfo:
    """Block for about `timeout_s` at most, in an event loop of its own. Raises WeightsUnavailable; NoAnswer where a
    retry may help."""
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
