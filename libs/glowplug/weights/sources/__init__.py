"""Sources by scheme. `open_source` is the one place that reads a weights URI."""

from glowplug.weights.source import Source, SourceOptions, check_reference, scheme_of
from glowplug.weights.sources.file import FileSource
from glowplug.weights.sources.http import HttpSource
from glowplug.weights.sources.s3 import S3Source


def open_source(uri: str, options: SourceOptions = SourceOptions()) -> Source:
    """The source of `uri` (file:, a bare path, http:, https:, s3:). Opens no connection.

    Raises WeightsUnavailable for an address that is wrong, or one whose library is not installed.
    """
    check_reference(uri)
    scheme = scheme_of(uri)
    if scheme in ("", "file"):
        return FileSource(uri, options)
    if scheme in ("http", "https"):
        return HttpSource(uri, options)
    assert scheme == "s3", scheme  # SCHEMES has no other
    return S3Source(uri, options)
