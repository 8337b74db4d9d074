"""A place that weights come from. Offsets and sizes are bytes; ends are exclusive."""

from collections.abc import AsyncGenerator
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Protocol
from urllib.parse import urlsplit, urlunsplit

from glowplug.domain.errors import WeightsUnavailable

UNKNOWN_BYTES = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceOptions:
    """How sources talk to the world. Times in seconds, sizes in bytes."""

    chunk_bytes: int = 1 << 20
    connect_timeout_s: float = 10.0
    stall_timeout_s: float = 30.0  # no byte for so long: interrupted
    redirect_hosts: tuple[str, ...] = ()  # patterns of https hosts that another host's redirect may lead to
    s3_endpoint: str = ""  # "": AWS_ENDPOINT_URL_S3, AWS_ENDPOINT_URL, then Amazon's
    s3_region: str = ""  # "": AWS_REGION, AWS_DEFAULT_REGION


class SourceInterrupted(Exception):
    """It may work the next time: a cut connection, a 5xx, a stall. Retried from the last byte that landed."""


class SourceChanged(Exception):
    """The object is not the one the first bytes came from. What has landed is worthless."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceFile:
    """One file of a source. `path` is relative, with forward slashes; "" for a source that is one file."""

    path: str
    num_bytes: int
    validator: str = ""  # ETag, Last-Modified or mtime: equal means equal bytes; "" when there is none


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceInfo:
    """What a source holds. `num_bytes` is UNKNOWN_BYTES when the server does not say before the end."""

    files: tuple[SourceFile, ...]
    ranges: bool  # can be read from the middle, and by several readers at once

    @property
    def is_directory(self) -> bool:
        return any(f.path for f in self.files)

    @property
    def num_bytes(self) -> int:
        return sum(f.num_bytes for f in self.files)


class Source(Protocol):
    """Reads one address. Stateless between calls, so that any part can be retried."""

    @property
    def scheme(self) -> str:
        """file | http | s3: the label of metrics, facts and spans."""
        ...

    async def probe(self) -> SourceInfo:
        """Sizes and validators. Raises WeightsUnavailable (missing, refused) or SourceInterrupted."""
        ...

    def read(self, file: SourceFile, first_byte: int, last_byte: int) -> AsyncGenerator[bytes, None]:
        """Bytes of `file` in [first_byte, last_byte) in bounded chunks; `last_byte` 0 means to the end.

        May end early without an error: the caller counts. Raises WeightsUnavailable, SourceInterrupted,
        SourceChanged.
        """
        ...

    async def close(self) -> None: ...


def checked_relative(path: str) -> str:
    """`path` when it stays below the directory it is joined to. Raises WeightsUnavailable otherwise."""
    pure = PurePosixPath(path)
    if not path or pure.is_absolute() or ".." in pure.parts or "\\" in path or "\0" in path:
        raise WeightsUnavailable(f"file name {path[:200]!r} leaves its directory")
    return pure.as_posix()


def redacted(uri: str) -> str:
    """`uri` without user, password and query (which may hold a signature), fit for logs, facts and spans."""
    parts = urlsplit(uri)
    if "@" not in parts.netloc and not parts.query and not parts.fragment:
        return uri  # as it was written: urlunsplit would make file:/a of it file:///a
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))
