"""Sources of weights: the syntax of their addresses, and their interface.

Offsets and sizes are bytes; ends are exclusive. Sources and deployments check addresses by the same rules.
"""

import asyncio
import re
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Annotated, Final, Protocol
from urllib.parse import SplitResult, quote, unquote, urlsplit, urlunsplit

from glowplug.domain import extensions
from glowplug.domain.bounds import Bounds
from glowplug.domain.errors import WeightsUnavailable
from glowplug.domain.reading import SETTING, Setting
from glowplug.weights.window import WindowOf

UNKNOWN_BYTES = 0
LEAST_BYTES_PER_S: Final = 4096  # of one reader: 14 MB an hour bring no model
SCHEMES = ("file", "http", "https", "hf", "s3", "gs")
OBJECTS = ("s3", "gs")
MAIN = "main"
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):")
_NAME = r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}"
_HUB = re.compile(rf"hf:(?://)?({_NAME}/{_NAME})(?:@([A-Za-z0-9][A-Za-z0-9._/+-]{{0,199}}))?(?::(.{{1,1000}}))?", re.I)

Chunk = bytes | memoryview  # a view is valid until the next request
_PLAIN = "/ !$&'()*+,:;=@[]"  # unescaped in a path: all but %, ? and #


ChunkBytes = Annotated[int, Bounds(least=1 << 12, most=64 << 20), Setting(name="fetch_chunk_bytes", advanced=True)]


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceOptions:
    """Times in seconds, sizes in bytes."""

    chunk_bytes: ChunkBytes = 1 << 20
    connect_timeout_s: float = 10.0
    stall_timeout_s: float = 30.0  # without a byte: interrupted
    redirect_hosts: tuple[str, ...] = ()  # patterns of https hosts allowed as redirect targets
    s3_endpoint: Annotated[str, SETTING] = ""  # of `s3:` weights; empty: the AWS variables', then Amazon's
    hf_endpoint: str = ""  # "": HF_ENDPOINT, then the hub's own
    hf_cache_dir: Path | None = None  # None: HF_HUB_CACHE, then `hub` in HF_HOME
    hf_offline: bool | None = None  # None: HF_HUB_OFFLINE
    hf_token: str | None = field(default=None, repr=False)  # None: HF_TOKEN, then the token's file; "": no token
    window: WindowOf | None = field(default=None, repr=False)  # per connection; None: the kernel's
    hf_falls_back: bool = True  # use the local cache where the hub does not answer


class SourceInterrupted(Exception):
    """A cut connection, a 5xx, a stall: a retry continues after the last byte."""


class SourceSlow(SourceInterrupted):
    """Fewer than LEAST_BYTES_PER_S came: what came counts as nothing."""


class SourceChanged(Exception):
    """The object has changed: landed bytes are worthless."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceFile:
    """`path` is relative; "" for a source that is one file."""

    path: str
    num_bytes: int
    validator: str = ""  # ETag, Last-Modified or mtime: equal means equal bytes; "" for none


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceInfo:
    """`num_bytes` is UNKNOWN_BYTES when the server does not state it."""

    files: tuple[SourceFile, ...]
    ranges: bool  # readable from the middle, and by parallel readers

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
        """Raises WeightsUnavailable (missing, refused) or SourceInterrupted."""
        ...

    async def measure(self) -> SourceInfo:
        """Sizes by the cheapest request. Raises as `probe`."""
        ...

    def read(self, file: SourceFile, first_byte: int, last_byte: int) -> AsyncGenerator[Chunk, None]:
        """Yield [first_byte, last_byte) in bounded chunks, each valid until the next request; `last_byte` 0 means to
        the end.

        May end early without an error: the caller counts. Raises WeightsUnavailable, SourceInterrupted, SourceChanged.
        """
        ...

    async def close(self) -> None: ...


async def not_slower(chunks: AsyncGenerator[Chunk, None], name: str, over_s: float) -> AsyncGenerator[Chunk, None]:
    """Pass chunks on. Raises SourceSlow after `over_s` of waiting for too few bytes; the reader's own time does not
    count."""
    loop = asyncio.get_running_loop()
    waited_s, num_bytes = 0.0, 0
    async with aclosing(chunks):
        while True:
            began_at = loop.time()
            try:
                async with asyncio.timeout(over_s):
                    chunk = await anext(chunks, b"")
            except TimeoutError as error:
                raise SourceSlow(f"{name} sent {num_bytes} bytes in {waited_s + over_s:.0f} s") from error
            if not chunk:
                return
            waited_s, num_bytes = waited_s + loop.time() - began_at, num_bytes + len(chunk)
            if waited_s >= over_s:
                if num_bytes < LEAST_BYTES_PER_S * waited_s:
                    raise SourceSlow(f"{name} sent {num_bytes} bytes in {waited_s:.0f} s")
                waited_s, num_bytes = 0.0, 0
            yield chunk


def checked_relative(path: str) -> str:
    """Raises WeightsUnavailable where `path` leaves its directory."""
    pure = PurePosixPath(path)
    if not pure.parts or pure.is_absolute() or ".." in pure.parts or "\\" in path or "\0" in path:
        raise WeightsUnavailable(f"file name {path[:200]!r} points outside its directory")
    return pure.as_posix()


@dataclass(frozen=True, slots=True)
class HubAddress:
    """`hf:org/name[@revision][:file]`. `file` may be a pattern (`*Q4_K_M.gguf`), and is "" for the repository's
    weights."""

    repo: str
    revision: str = MAIN
    file: str = ""

    @property
    def uri(self) -> str:
        revision = "" if self.revision == MAIN else f"@{self.revision}"
        return f"hf:{self.repo}{revision}" + (f":{self.file}" if self.file else "")


def hub_address(uri: str) -> HubAddress:
    """Parse an hf: address (hf://org/name is the same). Raises WeightsUnavailable."""
    found = _HUB.fullmatch(uri)
    if not found or ".." in f"{found[1]} {found[2]}":
        raise _wrong(
            f"{redacted(uri)[:200]}: an address of the hub is hf:org/name, hf:org/name@revision or hf:org/name:file"
        )
    return HubAddress(found[1], found[2] or MAIN, checked_relative(found[3]) if found[3] else "")


def redacted(uri: str) -> str:
    """Strip user, password and query (which may hold a signature), fit for logs, facts and spans."""
    parts = urlsplit(uri)
    has_query = scheme_of(uri) != "hf" and (parts.query or parts.fragment)
    if "@" not in parts.netloc and not has_query:
        return uri  # urlunsplit would turn file:/a into file:///a
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))


def scheme_of(uri: str) -> str:
    """Return '' for a bare path. A path with a colon in its first part begins with ./ or file:."""
    found = _SCHEME.match(uri)
    return found[1].lower() if found else ""


def is_read(scheme: str) -> bool:
    """Include entry points of `glowplug.sources`, classes called with (uri, options)."""
    return scheme in SCHEMES or scheme in extensions.names("sources")


def check_reference(uri: str) -> SplitResult:
    """Raises WeightsUnavailable with the allowed forms."""
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
    return f"file:{quote(str(path), safe=_PLAIN)}"


def local_path(uri: str) -> Path | None:
    """Return None for a remote address."""
    scheme = scheme_of(uri)
    if scheme:
        return Path(unquote(urlsplit(uri).path)) if scheme == "file" else None
    return Path(uri)


def is_directory(uri: str) -> bool | None:
    """Return None for a path or a repository, which needs a look."""
    scheme = scheme_of(uri)
    if scheme in ("http", "https"):
        return False
    if scheme == "hf":
        file = hub_address(uri).file
        return {".safetensors": True, ".gguf": False}.get(suffix(uri)) if not file or is_pattern(file) else False
    return urlsplit(uri).path.endswith("/") if scheme in OBJECTS else None


def is_pattern(file: str) -> bool:
    return any(char in file for char in "*?[")


def suffix(uri: str) -> str:
    """Lower case: '.gguf'; '' for a whole repository."""
    path = hub_address(uri).file if scheme_of(uri) == "hf" else unquote(urlsplit(uri).path)
    return PurePosixPath(path).suffix.lower()


def _wrong(message: str) -> WeightsUnavailable:
    return WeightsUnavailable(message, param="weights.uri")
