"""Sources by scheme. `open_source` is the one place that reads a weights URI."""

from urllib.parse import urlsplit

from glowplug.domain.errors import WeightsUnavailable
from glowplug.weights.source import Source, SourceOptions, redacted
from glowplug.weights.sources.file import FileSource
from glowplug.weights.sources.http import HttpSource
from glowplug.weights.sources.s3 import S3Source


def open_source(uri: str, options: SourceOptions = SourceOptions()) -> Source:
    """The source of `uri` (file:, a bare path, http:, https:, s3:). Opens no connection.

    Raises WeightsUnavailable for a scheme nobody reads, or one whose library is not installed.
    """
    scheme = urlsplit(uri).scheme.lower()
    if scheme in ("", "file"):
        return FileSource(uri, options)
    if scheme in ("http", "https"):
        return HttpSource(uri, options)
    if scheme == "s3":
        return S3Source(uri, options)
    raise WeightsUnavailable(f"no source reads {scheme}: addresses ({redacted(uri)})", param="weights.uri")
