"""Sources by scheme. `open_source` is the one place that reads a weights URI."""

from glowplug.domain import extensions
from glowplug.domain.errors import WeightsUnavailable
from glowplug.weights.source import OBJECTS, Source, SourceOptions, check_reference, redacted, scheme_of
from glowplug.weights.sources import hub, objects
from glowplug.weights.sources.file import FileSource
from glowplug.weights.sources.http import HttpSource
from glowplug.weights.sources.hub import HubSource
from glowplug.weights.sources.objects import ObjectSource
from glowplug.weights.sources.split import SplitSource
from glowplug.weights.split_gguf import NotJoinable, part_names


def open_source(uri: str, options: SourceOptions = SourceOptions()) -> Source:
    """Schemes: file:, a bare path, http:, https:, hf:, s3:, gs:; a split GGUF's first part gives the whole. Opens no
    connection. Raises WeightsUnavailable for a wrong address, or one whose library is not installed."""
    check_reference(uri)
    try:
        parts = part_names(uri)
    except NotJoinable as error:
        raise WeightsUnavailable(f"{redacted(uri)}: {error}", param="weights") from error
    if parts:
        return SplitSource(parts, [_open_one(part, options) for part in parts])
    return _open_one(uri, options)


def _open_one(uri: str, options: SourceOptions) -> Source:
    scheme = scheme_of(uri)
    if scheme in ("", "file"):
        return FileSource(uri, options)
    if scheme in ("http", "https"):
        return HttpSource(uri, options)
    if scheme == "hf":
        return HubSource(uri, options)
    if scheme in OBJECTS:
        return ObjectSource(uri, options)
    made: Source = extensions.load("sources", scheme)(uri, options)
    return made


def load_libraries() -> None:
    """Load them before a first address waits."""
    hub.library()
    objects.library()
