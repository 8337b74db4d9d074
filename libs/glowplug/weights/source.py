"""A place that weights come from: how its address is written, and what it gives.

Offsets and sizes are bytes; ends are exclusive. Sources and deployments check addresses by the same rules."""

import re
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Protocol
from urllib.parse import SplitResult, quote, unquote, urlsplit, urlunsplit

from glowplug.domain import extensions
from glowplug.domain.errors import WeightsUnavailable
from glowplug.weights.window import WindowOf

UNKNOWN_BYTES = 0
SCHEMES = ("file", "http", "https", "hf", "s3", "gs")
OBJECTS = ("s3", "gs")  # stores of objects: a key, or a prefix for a directory
MAIN = "main"  # the revision of a repository that an address without one means
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):")
_NAME = r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}"
_HUB = re.compile(rf"hf:(?://)?({_NAME}/{_NAME})(?:@([A-Za-z0-9][A-Za-z0-9._/+-]{{0,199}}))?(?::(.{{1,1000}}))?", re.I)

Chunk = bytes | memoryview  # bytes on their way; a view lasts until the next one is asked for
_PLAIN = "/ !$&'()*+,:;=@[]"  # what needs no escape in a path: all but %, ? and #


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceOptions:
    """How sources talk to the world. Times in seconds, sizes in bytes."""

    chunk_bytes: int = 1 << 20
    connect_timeout_s: float = 10.0
    stall_timeout_s: float = 30.0  # no byte for so long: interrupted
    redirect_hosts: tuple[str, ...] = ()  # patterns of https hosts that another host's redirect may lead to
    s3_endpoint: str = ""  # "": AWS_ENDPOINT_URL_S3, AWS_ENDPOINT_URL, then Amazon's
    hf_endpoint: str = ""  # "": HF_ENDPOINT, then the hub's own
    hf_cache_dir: Path | None = None  # None: HF_HUB_CACHE, then `hub` in HF_HOME
    hf_offline: bool | None = None  # None: HF_HUB_OFFLINE
    hf_token: str | None = field(default=None, repr=False)  # None: HF_TOKEN, then the token's file; "": no token
    window: WindowOf | None = field(default=None, repr=False)  # of each connection; None: as the kernel has it
    hf_falls_back: bool = True  # where the hub does not answer, its cache on this machine does


class SourceInterrupted(Exception):
    """A read that may succeed when repeated: a cut connection, a 5xx, a stall. It goes on from the last byte."""


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
        """file | http | hf | s3 | gs: the label of metrics, facts and spans."""
        ...

    async def probe(self) -> SourceInfo:
        """Sizes and validators. Raises WeightsUnavailable (missing, refused) or SourceInterrupted."""
        ...

    async def measure(self) -> SourceInfo:
        """Sizes, by the question that costs least: what is known before anything is fetched. Raises as `probe`."""
        ...

    def read(self, file: SourceFile, first_byte: int, last_byte: int) -> AsyncGenerator[Chunk, None]:
        """Bytes of `file` in [first_byte, last_byte) in bounded chunks, each of which lasts until the next one is asked
        for; `last_byte` 0 means to the end.

        May end early without an error: the caller counts. Raises WeightsUnavailable, SourceInterrupted,
        SourceChanged.
        """
        ...

    async def close(self) -> None: ...


def checked_relative(path: str) -> str:
    """`path` when it stays below the directory it is joined to. Raises WeightsUnavailable otherwise."""
    pure = PurePosixPath(path)
    if not pure.parts or pure.is_absolute() or ".." in pure.parts or "\\" in path or "\0" in path:
        raise WeightsUnavailable(f"file name {path[:200]!r} leaves its directory")
    return pure.as_posix()


@dataclass(frozen=True, slots=True)
class HubAddress:
    """`hf:org/name[@revision][:file]`: a repository of the Hugging Face hub, or one file of it. `file` may be a pattern
    (`*Q4_K_M.gguf`), and is "" for the weights that the repository holds."""

    repo: str
    revision: str = MAIN
    file: str = ""

    @property
    def uri(self) -> str:
        """The one spelling of this address."""
        revision = "" if self.revision == MAIN else f"@{self.revision}"
        return f"hf:{self.repo}{revision}" + (f":{self.file}" if self.file else "")


def hub_address(uri: str) -> HubAddress:
    """The parts of an hf: address; hf://org/name is the same. Raises WeightsUnavailable."""
    found = _HUB.fullmatch(uri)
    if not found or ".." in f"{found[1]} {found[2]}":
        raise _wrong(
            f"{redacted(uri)[:200]}: an address of the hub is hf:org/name, hf:org/name@revision or hf:org/name:file"
        )
    return HubAddress(found[1], found[2] or MAIN, checked_relative(found[3]) if found[3] else "")


def redacted(uri: str) -> str:
    """`uri` without user, password and query (which may hold a signature), fit for logs, facts and spans."""
    parts = urlsplit(uri)
    has_query = scheme_of(uri) != "hf" and (parts.query or parts.fragment)
    if "@" not in parts.netloc and not has_query:
        return uri  # as it was written: urlunsplit would make file:/a of it file:///a
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))


def scheme_of(uri: str) -> str:
    """The scheme in lower case; '' for a bare path. A path with a colon in its first part begins with ./ or file:."""
    found = _SCHEME.match(uri)
    return found[1].lower() if found else ""


def is_read(scheme: str) -> bool:
    """Whether a source is installed for a scheme: ours, or an entry point of `glowplug.sources`, a class made with
    (uri, options)."""
    return scheme in SCHEMES or scheme in extensions.names("sources")


def check_reference(uri: str) -> SplitResult:
    """The parts of an address that a source can be asked for. Raises WeightsUnavailable saying what is allowed."""
    scheme = scheme_of(uri)
    if scheme and not is_read(scheme):
        allowed = ", ".join(f"{known}:" for known in (*SCHEMES, *extensions.names("sources")))
        raise _wrong(f"no source reads {scheme}: addresses ({redacted(uri)}); allowed are a path, {allowed}")
    if any(ord(char) < 32 or ord(char) == 127 for char in uri):
        raise _wrong("the address holds a control character")
    try:
        parts = urlsplit(uri)
        port_is_wrong = parts.netloc and parts.port == 0
    except ValueError as error:
        raise _wrong(f"the address cannot be read: {error}") from error
    if scheme == "file" and (parts.netloc not in ("", "localhost") or not parts.path):
        raise _wrong(f"{uri}: a file address names a path and no host (file:///path)")
    if scheme in ("http", "https") and (not parts.hostname or port_is_wrong or " " in uri):
        raise _wrong(f"{redacted(uri)}: a web address is {scheme}://host/path")
    if scheme in ("http", "https") and parts.path in ("", "/") and not parts.query:
        raise _wrong(f"{redacted(uri)}: a web address names a file ({scheme}://host/path)")
    if scheme in OBJECTS and not (parts.netloc and unquote(parts.path).lstrip("/")):
        form = f"{scheme}://bucket/key, or {scheme}://bucket/prefix/ for a directory"
        raise _wrong(f"{redacted(uri)}: the address of an object is {form}")
    if scheme == "hf":
        hub_address(uri)
    return parts


def file_uri(path: Path) -> str:
    """The address of a path, whatever its name holds."""
    return f"file:{quote(str(path), safe=_PLAIN)}"


def local_path(uri: str) -> Path | None:
    """The path of a file: address or a bare path; None for an address on another machine."""
    scheme = scheme_of(uri)
    if scheme:
        return Path(unquote(urlsplit(uri).path)) if scheme == "file" else None
    return Path(uri)


def is_directory(uri: str) -> bool | None:
    """Whether the source of a remote address gives several files; None for a path or a repository, which must be looked
    at."""
    scheme = scheme_of(uri)
    if scheme in ("http", "https"):
        return False
    if scheme == "hf":
        file = hub_address(uri).file
        return {".safetensors": True, ".gguf": False}.get(suffix(uri)) if not file or is_pattern(file) else False
    return urlsplit(uri).path.endswith("/") if scheme in OBJECTS else None


def is_pattern(file: str) -> bool:
    """Whether the file of a hub address stands for those that match it."""
    return any(char in file for char in "*?[")


def suffix(uri: str) -> str:
    """The ending of the last name in the address, in lower case: '.gguf'; '' for a whole repository."""
    path = hub_address(uri).file if scheme_of(uri) == "hf" else unquote(urlsplit(uri).path)
    return PurePosixPath(path).suffix.lower()


def _wrong(message: str) -> WeightsUnavailable:
    return WeightsUnavailable(message, param="weights.uri")
