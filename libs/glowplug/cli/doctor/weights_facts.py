"""Are the files a fleet of this machine names still there, and still what they were? Reads bounded amounts."""

import hashlib
import time
from collections.abc import Iterable
from pathlib import Path
from urllib.parse import unquote, urlsplit

from glowplug.domain.model import Model

HASH_S = 10.0
CHUNK_BYTES = 4 << 20


def missing_files(models: Iterable[Model]) -> dict[str, str]:
    """Model file -> why it is not there, of models that came from files."""
    sources = {model.source for model in models if Path(model.source).is_absolute()}
    return {source: "is gone, its model stays deployed" for source in sorted(sources) if not Path(source).exists()}


def local_weights(models: Iterable[Model]) -> tuple[dict[str, str], int]:
    """(model name -> what is wrong with its weights, how many were looked at). Only files of this machine; checksums
    are compared for HASH_S altogether, what is left after that by its size alone."""
    problems: dict[str, str] = {}
    seen: dict[tuple[Path, str, int], str] = {}
    deadline = time.monotonic() + HASH_S
    num = 0
    for model in models:
        path = _path(model.weights.uri)
        if path is None:
            continue
        num += 1
        key = (path, model.weights.sha256, model.weights.num_bytes)
        if key not in seen:
            seen[key] = _problem(*key, deadline)
        if seen[key]:
            problems[model.name] = seen[key]
    return problems, num


def _path(uri: str) -> Path | None:
    parts = urlsplit(uri)
    if not uri or parts.scheme not in ("", "file"):
        return None
    return Path(unquote(parts.path) if parts.scheme else uri)


def _problem(path: Path, sha256: str, num_bytes: int, deadline: float) -> str:
    """ "" when nothing is wrong with one file or directory."""
    try:
        if path.is_dir():
            return "" if any(path.iterdir()) else f"{path} is empty"
        size = path.stat().st_size
        if num_bytes and size != num_bytes:
            return f"{path} has {size} bytes and should have {num_bytes}"
        found = _sha256(path, deadline) if sha256 else ""
    except OSError as error:
        return f"{path}: {error.strerror}"
    return f"{path} is not what its sha256 says" if found and found != sha256.lower() else ""


def _sha256(path: Path, deadline: float) -> str:
    """Hex, "" when time is up."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            if time.monotonic() > deadline:
                return ""
            digest.update(chunk)
    return digest.hexdigest()
