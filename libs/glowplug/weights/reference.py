"""How an address of weights is written. Sources and deployments are checked by the same rules; nothing is opened."""

import re
from pathlib import Path, PurePosixPath
from urllib.parse import SplitResult, quote, unquote, urlsplit

from glowplug.domain.errors import WeightsUnavailable
from glowplug.weights.source import redacted

SCHEMES = ("file", "http", "https", "s3")
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):")

_PLAIN = "/ !$&'()*+,:;=@[]"  # what needs no escape in a path: all but %, ? and #


def scheme_of(uri: str) -> str:
    """The scheme in lower case; '' for a bare path. A path with a colon in its first part begins with ./ or file:."""
    found = _SCHEME.match(uri)
    return found[1].lower() if found else ""


def check_reference(uri: str) -> SplitResult:
    """The parts of an address that a source can be asked for. Raises WeightsUnavailable saying what is allowed."""
    scheme = scheme_of(uri)
    if scheme and scheme not in SCHEMES:
        allowed = ", ".join(f"{known}:" for known in SCHEMES)
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
    if scheme == "s3" and not (parts.netloc and unquote(parts.path).lstrip("/")):
        raise _wrong(f"{redacted(uri)}: an s3 address is s3://bucket/key, or s3://bucket/prefix/ for a directory")
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
    """Whether the source of a remote address gives several files; None for a path, which must be looked at."""
    scheme = scheme_of(uri)
    if scheme in ("http", "https"):
        return False
    return urlsplit(uri).path.endswith("/") if scheme == "s3" else None


def suffix(uri: str) -> str:
    """The ending of the last name in the address, in lower case: '.gguf'."""
    return PurePosixPath(unquote(urlsplit(uri).path)).suffix.lower()


def _wrong(message: str) -> WeightsUnavailable:
    return WeightsUnavailable(message, param="weights.uri")
