"""The archive of a backup: a gzipped tar with a manifest that states its format and the digest of every member.

`manifest.json` first, then `models.jsonl` and `cordons.jsonl` (rows as the store holds them, one per line) and
`files/<name>`, the model files. Nothing of it is secret by itself, but an address of weights may carry a password.
"""

import gzip
import hashlib
import io
import json
import os
import re
import tarfile
import tempfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from glowplug import __version__
from glowplug.cli.options import CliError
from glowplug.cli.terminal import in_line
from glowplug.controllers.placer.controller import Cordon
from glowplug.domain.model import Model
from glowplug.events.envelope import SAID, MalformedEvent, from_json, to_json

FORMAT, FORMAT_VERSION = "glowplug-backup", 1
MANIFEST, MODELS, CORDONS, FILES = "manifest.json", "models.jsonl", "cordons.jsonl", "files/"
MAX_BYTES = 256 << 20  # packed or unpacked: a fleet of 10,000 models has 20 MiB
_FILE_NAME = re.compile(r"(?!\.)[^/\\]{1,200}\.ya?ml")  # of a model file: one name, not hidden, printable


class BadArchive(CliError):
    """The file is no backup, or not a whole one, or of a format this version does not know. One line, whatever names
    the file holds."""

    def __init__(self, message: str) -> None:
        super().__init__(in_line(message))


@dataclass(frozen=True, slots=True, kw_only=True)
class Backup:
    """What a fleet cannot make again by itself. `files` by name; `made_at` epoch seconds."""

    made_at: float
    models: Mapping[str, Model] = field(default_factory=dict)
    cordons: tuple[str, ...] = ()  # nodes an operator took out of placement
    files: Mapping[str, str] = field(default_factory=dict)
    made_by: str = __version__  # version of glowplug


@dataclass(frozen=True, slots=True, kw_only=True)
class _Member:
    num_bytes: int
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Manifest:
    """What manifest.json says, of a format that this version knows."""

    format: str
    format_version: int
    made_by: str
    made_at: float
    members: Mapping[str, _Member]


def pack(backup: Backup) -> bytes:
    """The archive; the same backup gives the same bytes."""
    members = {
        MODELS: b"".join(to_json(model) + b"\n" for _, model in sorted(backup.models.items())),
        CORDONS: b"".join(to_json(Cordon(node_id, True)) + b"\n" for node_id in sorted(backup.cordons)),
    } | {f"{FILES}{name}": text.encode() for name, text in sorted(backup.files.items())}
    manifest = {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "made_by": backup.made_by,
        "made_at": backup.made_at,
        "members": {
            name: {"num_bytes": len(raw), "sha256": hashlib.sha256(raw).hexdigest()} for name, raw in members.items()
        },
    }
    buffer = io.BytesIO()
    with gzip.GzipFile(fileobj=buffer, mode="wb", mtime=0) as zipped, tarfile.open(fileobj=zipped, mode="w") as tar:
        for name, raw in ({MANIFEST: json.dumps(manifest, indent=1).encode()} | members).items():
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode, entry.mtime = len(raw), 0o600, int(backup.made_at)
            tar.addfile(entry, io.BytesIO(raw))
    return buffer.getvalue()


def write(path: Path, raw: bytes) -> None:
    """Whole or not at all, readable by its owner only. Raises CliError."""
    try:
        fd, temporary = tempfile.mkstemp(dir=path.absolute().parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(fd, "wb") as file:
                file.write(raw)
                file.flush()
                os.fsync(file.fileno())
            Path(temporary).replace(path)
        except OSError:
            Path(temporary).unlink(missing_ok=True)
            raise
    except OSError as error:
        raise CliError(f"cannot write {path}: {error.strerror}") from error


def read(path: Path) -> Backup:
    """The backup in a file. Raises BadArchive saying what is wrong with it; nothing is unpacked to disk."""
    raw = _packed(path)
    try:
        members = _members(raw)
        manifest = _manifest(members.pop(MANIFEST, b""))
    except BadArchive as error:
        raise BadArchive(f"{path}: {error}") from error
    except (*_NO_TAR, OSError) as error:
        said = str(error)[:SAID] or type(error).__name__
        raise BadArchive(f"{path} is no backup of `glowplug backup`, or is cut short: {said}") from error
    _check_members(path, manifest.members, members)
    return _decoded(path, manifest, members)


# What reading a damaged gzip or tar raises: beside their own errors those of the numbers and names in their headers.
_NO_TAR = (tarfile.TarError, gzip.BadGzipFile, zlib.error, EOFError, ValueError, ArithmeticError, LookupError)


def _packed(path: Path) -> bytes:
    """The file as it is, of a bounded size. Raises CliError."""
    try:
        if not path.is_file():
            raise BadArchive(f"{path} is no file")
        with path.open("rb") as file:
            raw = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise CliError(f"cannot read {path}: {error.strerror}") from error
    if len(raw) > MAX_BYTES:
        raise BadArchive(f"{path} has more than {MAX_BYTES >> 20} MiB: it is no backup of `glowplug backup`")
    return raw


def _members(raw: bytes) -> dict[str, bytes]:
    found: dict[str, bytes] = {}
    with gzip.GzipFile(fileobj=io.BytesIO(raw)) as zipped:
        plain = zipped.read(MAX_BYTES + 1)
    if len(plain) > MAX_BYTES:
        raise BadArchive(f"it unpacks to more than {MAX_BYTES >> 20} MiB")
    with tarfile.open(fileobj=io.BytesIO(plain), mode="r:") as tar:
        for entry in tar:
            path = PurePosixPath(entry.name)
            # A sparse file is as large as it says, whatever the archive holds of it.
            if not entry.isreg() or entry.issparse() or path.is_absolute() or ".." in path.parts:
                raise BadArchive(f"member {entry.name[:SAID]!r} is not one that `glowplug backup` writes")
            if entry.name in found:
                raise BadArchive(f"member {entry.name[:SAID]!r} is there twice")
            file = tar.extractfile(entry)
            found[entry.name] = file.read(len(plain)) if file else b""
    return found


def _manifest(raw: bytes) -> _Manifest:
    """Raises BadArchive. What a newer format says beside its version is not looked at."""
    try:
        told = from_json(raw, dict[str, Any], max_bytes=MAX_BYTES)
        if (name := told.get("format")) != FORMAT and name is not None:
            raise BadArchive(f"its manifest names another format, {str(name)[:SAID]!r}")
        version = told.get("format_version")
        if name == FORMAT and isinstance(version, int) and version > FORMAT_VERSION:
            raise _newer(version, told.get("made_by"))
        manifest = from_json(raw, _Manifest, max_bytes=MAX_BYTES)
        if manifest.format_version > FORMAT_VERSION:  # a number as text is one too
            raise _newer(manifest.format_version, manifest.made_by)
        return manifest
    except MalformedEvent as error:
        says = f"it is no backup of `glowplug backup`: it has no manifest that can be read ({error})"
        raise BadArchive(says) from error


def _newer(version: int, made_by: object) -> BadArchive:
    return BadArchive(
        f"it has format {version}, made by glowplug {str(made_by)[:SAID]}; "
        f"this one reads up to format {FORMAT_VERSION}: use a newer glowplug"
    )


def _check_members(path: Path, told: Mapping[str, _Member], members: Mapping[str, bytes]) -> None:
    if missing := sorted(set(told) - set(members)):
        raise BadArchive(f"{path} is not whole: {missing[0]} is missing")
    if unknown := sorted(set(members) - set(told)):
        raise BadArchive(f"{path} was changed: its manifest does not name {unknown[0]}")
    for name, raw in members.items():
        if hashlib.sha256(raw).hexdigest() != told[name].sha256:
            raise BadArchive(f"{path} is corrupt: {name} is not what its manifest says")


def _decoded(path: Path, manifest: _Manifest, members: Mapping[str, bytes]) -> Backup:
    try:
        models = [from_json(line, Model) for line in members[MODELS].splitlines()]
        cordons = [from_json(line, Cordon) for line in members[CORDONS].splitlines()]
        files = {name.removeprefix(FILES): raw.decode() for name, raw in members.items() if name.startswith(FILES)}
    except (MalformedEvent, LookupError, UnicodeDecodeError) as error:
        raise BadArchive(f"{path} holds rows this version cannot read: {error}") from error
    bad = [name for name in files if not name.isprintable() or not _FILE_NAME.fullmatch(name)]
    if bad:
        raise BadArchive(f"{path}: {bad[0][:SAID]!r} is no name of a model file")
    return Backup(
        made_at=manifest.made_at,
        models={model.key: model for model in models},
        cordons=tuple(cordon.node_id for cordon in cordons if cordon.cordoned),
        files=files,
        made_by=manifest.made_by,
    )
