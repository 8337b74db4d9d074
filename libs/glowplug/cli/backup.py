"""`glowplug backup` and `restore`: the state that a fleet cannot rebuild, in one file.

A gzipped tar: `manifest.json` with format and digests, `models.jsonl`, `cordons.jsonl`, `tenants.jsonl` and
`keys.jsonl` (rows of the store) and `files/<name>`, the model files. It holds digests of keys and no secrets, but an
address of weights may carry a password."""

import gzip
import hashlib
import io
import json
import os
import re
import tarfile
import tempfile
import time
import zlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Annotated, Any

import msgspec
import typer
from redis.exceptions import RedisError, ResponseError

from glowplug import __version__
from glowplug.cli.client import FleetClient, connect, segment
from glowplug.cli.options import StateDirOption
from glowplug.cli.terminal import CliError, age, in_line, say
from glowplug.controllers.operator import CORDONS, Cordon
from glowplug.domain.access import KEYS, TENANTS, ApiKey, Tenant, prefix_of
from glowplug.domain.declared import OF_KUBERNETES
from glowplug.domain.model import Model
from glowplug.events.envelope import SAID, MalformedEvent, from_json, to_json
from glowplug.runtime.model_files import OF_BASE, ModelFile
from glowplug.state.address import connect_sync
from glowplug.state.keys import PREFIX
from glowplug.state.redis_store import table_row
from glowplug.state.rows import read_rows, shown

FORMAT, FORMAT_VERSION = "glowplug-backup", 2  # format 1 has neither tenants nor keys
MANIFEST, MODELS, CORDON_LINES, FILES = "manifest.json", "models.jsonl", "cordons.jsonl", "files/"
TENANT_LINES, KEY_LINES = "tenants.jsonl", "keys.jsonl"
MAX_BYTES = 256 << 20  # packed or unpacked; a fleet of 10,000 models has 20 MiB
_FILE_NAME = re.compile(r"(?!\.)[^/\\]{1,200}\.ya?ml")
_BY_VERB = ("pinned",)  # and `kept_at`, which is never declared
_OF_TENANT = ("limits", "model_limits", "priority", "weight")
_OF_KEY = ("tenant", "name", "models", "surfaces", "limits", "priority", "expires_at")
ANSWER_S = 5.0
IN_FORCE_S = 30.0  # the autoscaler reads its files every second
POLL_S = 0.2


class BadArchive(CliError):
    """Damaged, no backup, or of an unknown format. The message is one line, whatever the names in the file."""

    def __init__(self, message: str) -> None:
        super().__init__(in_line(message))


@dataclass(frozen=True, slots=True, kw_only=True)
class Backup:
    """`files` by name; `made_at` epoch seconds."""

    made_at: float
    models: Mapping[str, Model] = field(default_factory=dict)
    cordons: tuple[str, ...] = ()
    files: Mapping[str, str] = field(default_factory=dict)
    tenants: Mapping[str, Tenant] = field(default_factory=dict)
    keys: Mapping[str, ApiKey] = field(default_factory=dict)
    made_by: str = __version__


@dataclass(frozen=True, slots=True, kw_only=True)
class _Member:
    num_bytes: int
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Manifest:
    format: str
    format_version: int
    made_by: str
    made_at: float
    members: Mapping[str, _Member]


def pack(backup: Backup) -> bytes:
    """Return the archive, byte for byte the same for the same backup."""
    members = {
        MODELS: b"".join(to_json(model) + b"\n" for _, model in sorted(backup.models.items())),
        CORDON_LINES: b"".join(to_json(Cordon(node_id, True)) + b"\n" for node_id in sorted(backup.cordons)),
        TENANT_LINES: b"".join(to_json(tenant) + b"\n" for _, tenant in sorted(backup.tenants.items())),
        KEY_LINES: b"".join(to_json(key) + b"\n" for _, key in sorted(backup.keys.items())),
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
    """Write atomically, readable by the owner only. Raises CliError."""
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
    """Read a backup; nothing is unpacked to disk. Raises BadArchive with the fault."""
    raw = _packed(path)
    try:
        members = _members(raw)
        manifest = _manifest(members.pop(MANIFEST, b""))
    except BadArchive as error:
        raise BadArchive(f"{path}: {error}") from error
    except (*_NO_TAR, OSError) as error:
        said = str(error)[:SAID] or type(error).__name__
        raise BadArchive(f"{path} is not a backup of `glowplug backup`, or is cut short: {said}") from error
    _check_members(path, manifest.members, members)
    return _decoded(path, manifest, members)


# Errors of a damaged gzip or tar: their own, and those of numbers and names in the headers.
_NO_TAR = (tarfile.TarError, gzip.BadGzipFile, zlib.error, EOFError, ValueError, ArithmeticError, LookupError)


def _packed(path: Path) -> bytes:
    try:
        if not path.is_file():
            raise BadArchive(f"{path} is not a file")
        with path.open("rb") as file:
            raw = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise CliError(f"cannot read {path}: {error.strerror}") from error
    if len(raw) > MAX_BYTES:
        raise BadArchive(f"{path} has more than {MAX_BYTES >> 20} MiB: it is not a backup of `glowplug backup`")
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
            # A sparse file claims any size, whatever the archive holds.
            if not entry.isreg() or entry.issparse() or path.is_absolute() or ".." in path.parts:
                raise BadArchive(f"member {entry.name[:SAID]!r} is not one that `glowplug backup` writes")
            if entry.name in found:
                raise BadArchive(f"member {entry.name[:SAID]!r} appears twice")
            file = tar.extractfile(entry)
            found[entry.name] = file.read(len(plain)) if file else b""
    return found


def _manifest(raw: bytes) -> _Manifest:
    """Raises BadArchive. Of a newer format only the version is read."""
    try:
        stated = from_json(raw, dict[str, Any], max_bytes=MAX_BYTES)
        if (name := stated.get("format")) != FORMAT and name is not None:
            raise BadArchive(f"its manifest has another format, {str(name)[:SAID]!r}")
        version = stated.get("format_version")
        if name == FORMAT and isinstance(version, int) and version > FORMAT_VERSION:
            raise _newer(version, stated.get("made_by"))
        manifest = from_json(raw, _Manifest, max_bytes=MAX_BYTES)
        if manifest.format_version > FORMAT_VERSION:
            raise _newer(manifest.format_version, manifest.made_by)
        return manifest
    except MalformedEvent as error:
        says = f"it is not a backup of `glowplug backup`: it has no readable manifest ({error})"
        raise BadArchive(says) from error


def _newer(version: int, made_by: object) -> BadArchive:
    return BadArchive(
        f"it has format {version}, made by glowplug {str(made_by)[:SAID]}; "
        f"this one reads up to format {FORMAT_VERSION}: use a newer glowplug"
    )


def _check_members(path: Path, stated: Mapping[str, _Member], members: Mapping[str, bytes]) -> None:
    if missing := sorted(set(stated) - set(members)):
        raise BadArchive(f"{path} is incomplete: {missing[0]} is missing")
    if unknown := sorted(set(members) - set(stated)):
        raise BadArchive(f"{path} was changed: its manifest does not name {unknown[0]}")
    for name, raw in members.items():
        if hashlib.sha256(raw).hexdigest() != stated[name].sha256:
            raise BadArchive(f"{path} is corrupt: {name} does not match its manifest")


def _decoded(path: Path, manifest: _Manifest, members: Mapping[str, bytes]) -> Backup:
    try:
        models = [from_json(line, Model) for line in members[MODELS].splitlines()]
        cordons = [from_json(line, Cordon) for line in members[CORDON_LINES].splitlines()]
        tenants = [from_json(line, Tenant) for line in members.get(TENANT_LINES, b"").splitlines()]
        keys = [from_json(line, ApiKey) for line in members.get(KEY_LINES, b"").splitlines()]
        files = {name.removeprefix(FILES): raw.decode() for name, raw in members.items() if name.startswith(FILES)}
    except (MalformedEvent, LookupError, UnicodeDecodeError) as error:
        raise BadArchive(f"{path} holds rows this version cannot read: {error}") from error
    bad = [name for name in files if not name.isprintable() or not _FILE_NAME.fullmatch(name)]
    if bad:
        raise BadArchive(f"{path}: {bad[0][:SAID]!r} is not the name of a model file")
    return Backup(
        made_at=manifest.made_at,
        models={model.key: model for model in models},
        cordons=tuple(cordon.node_id for cordon in cordons if cordon.cordoned),
        files=files,
        tenants={tenant.name: tenant for tenant in tenants},
        keys={key.key_id: key for key in keys},
        made_by=manifest.made_by,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RestorePlan:
    """The steps of a restore. `conflicts` differ from the backup: without --replace nothing is done."""

    files: Mapping[str, str]
    deploy: tuple[Mapping[str, Any], ...]  # bodies of PUT /v1/models/{name}
    verbs: tuple[tuple[str, str], ...]  # (verb, model name): pin, "pin --at asleep", unpin, drain, load
    cordons: tuple[str, ...]
    unchanged: tuple[str, ...]
    conflicts: tuple[str, ...]
    tenants: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # bodies of PUT /v1/tenants/{name}
    keys: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # bodies of PUT /v1/keys/{key_id}
    lacking: tuple[str, ...] = ()  # missing here and in the backup

    @property
    def is_nothing(self) -> bool:
        return not (self.files or self.deploy or self.verbs or self.cordons or self.tenants or self.keys)


@dataclass(frozen=True, slots=True, kw_only=True)
class AccessShown:
    tenants: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    keys: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


def body(model: Model | Mapping[str, Any]) -> dict[str, Any]:
    """Return the body of PUT /v1/models for a row of the store or of REST."""
    row: dict[str, Any] = dict(msgspec.to_builtins(model)) if isinstance(model, Model) else dict(model)
    shown = {name: row[name] for name in ModelFile.model_fields if name in row}
    shown["aliases"] = list(shown["aliases"])
    if row.get("base"):
        shown = {name: value for name, value in shown.items() if name not in OF_BASE} | {"adapter": row["weights"]}
    return shown


def plan(
    backup: Backup,
    models: Mapping[str, Mapping[str, Any]],
    files: Mapping[str, str] | None,
    draining: frozenset[str],
    access: AccessShown | None = None,
) -> RestorePlan:
    """Plan a restore.

    `models`: rows of the autoscaler by key; `files`: of its folder (None: not on this machine); `draining`: nodes."""
    write = {name: text for name, text in sorted(backup.files.items()) if files is not None and files.get(name) != text}
    conflicts = [f"model file {name} exists with different content" for name in write if name in (files or {})]
    deploy: list[dict[str, Any]] = []
    verbs: list[tuple[str, str]] = []
    unchanged: list[str] = []
    for key, model in sorted(backup.models.items()):
        row, wanted = models.get(key), body(model)
        from_file = Path(model.source).name in write  # the autoscaler reads the file once written
        same = row is not None and _declared(body(row)) == _declared(wanted)
        if row is not None and not same:
            conflicts.append(f"model {model.name} exists with a different declaration")
        if not same and not from_file:
            deploy.append(wanted)
        found = _verbs(model, row)
        verbs += found
        if same and not found:
            unchanged.append(model.name)
    tenants, keys, differing, lacking = _access(backup, access or AccessShown())
    return RestorePlan(
        files=write,
        deploy=tuple(sorted(deploy, key=lambda one: "adapter" in one)),  # after their bases
        verbs=tuple(verbs),
        cordons=tuple(node_id for node_id in backup.cordons if node_id not in draining),
        unchanged=tuple(unchanged),
        conflicts=(*conflicts, *differing),
        tenants=tenants,
        keys=keys,
        lacking=lacking,
    )


def _access(
    backup: Backup, shown: AccessShown
) -> tuple[dict[str, dict[str, Any]], dict[str, dict[str, Any]], list[str], tuple[str, ...]]:
    """Return bodies of tenants and of keys, conflicts, and files to be put in place by hand: their rows change only
    there."""
    tenants: dict[str, dict[str, Any]] = {}
    keys: dict[str, dict[str, Any]] = {}
    conflicts: list[str] = []
    lacking: set[str] = set()
    for name, tenant in sorted(backup.tenants.items()):
        row, wanted = shown.tenants.get(name), _picked(msgspec.to_builtins(tenant), _OF_TENANT)
        if row is not None and _picked(row, _OF_TENANT) == wanted:
            continue
        if tenant.source and not source_of(tenant):
            lacking.add(Path(tenant.source).name)
            continue
        conflicts += [f"tenant {name} exists with a different declaration"] if row is not None else []
        tenants[name] = wanted
    for key_id, key in sorted(backup.keys.items()):
        row, whole = shown.keys.get(key_id), dict(msgspec.to_builtins(key))
        is_over = row is not None and bool(row["revoked_at"])
        same = row is not None and _picked(row, _OF_KEY) == _picked(whole, _OF_KEY) and not key.revoked_at
        if is_over or same:
            continue
        if key.source:
            lacking.add(Path(key.source).name)
            continue
        conflicts += [f"key {key.prefix} exists with a different declaration"] if row is not None else []
        keys[key_id] = _picked(whole, (*_OF_KEY, "sha256", "created_at", "revoked_at"))
    return tenants, keys, conflicts, tuple(sorted(lacking))


def source_of(row: Model | Tenant) -> dict[str, str]:
    return {"source": row.source} if row.source.startswith(OF_KUBERNETES) else {}


def _picked(row: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    return {name: list(row[name]) if isinstance(row[name], tuple) else row[name] for name in names}


def _declared(shown: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in shown.items() if name not in _BY_VERB}


def _verbs(model: Model, row: Mapping[str, Any] | None) -> list[tuple[str, str]]:
    now = row or {"pinned": False, "suspended": False}
    found = []
    if (model.pinned, model.kept_at.value) != (bool(now["pinned"]), now.get("kept_at", "")):
        found.append((f"pin --at {model.kept_at}" if model.kept_at else "pin" if model.pinned else "unpin", model.name))
    if model.suspended and not now["suspended"]:
        found.append(("drain", model.name))
    return found


def backup(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="The file to write, such as models.tar.gz.", dir_okay=False)
    ],
    force: Annotated[bool, typer.Option("--force", help="Overwrite the file if it exists.")] = False,
    state_dir: StateDirOption = None,
) -> None:
    """Save the models, model files, pins, drains, tenants and keys of a running fleet in one file, without weights and
    tokens; of a key the digest is saved."""
    if file.exists() and not force:
        raise CliError(f"{file} exists already: choose another name, or overwrite it with --force")
    fleet = connect(state_dir)
    taken, left_out = _taken(fleet)
    write(file, pack(taken))
    for line in left_out:
        say(f"left out: {line}", err=True)
    say(f"{file}: {_counted(taken)}")


def restore(
    file: Annotated[Path, typer.Argument(metavar="FILE", exists=True, dir_okay=False)],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show the changes.")] = False,
    replace: Annotated[bool, typer.Option("--replace", help="Overwrite rows that differ from the backup.")] = False,
    state_dir: StateDirOption = None,
) -> None:
    """Restore the models, model files, pins, drains, tenants and keys of a backup. Where any of them differs in the
    fleet, nothing is done without --replace."""
    kept = read(file)
    fleet = connect(state_dir)
    files = _model_files(fleet)
    rows = {row["key"]: row for row in fleet.models()}
    nodes = fleet.nodes()
    draining = frozenset(node["node_id"] for node in nodes if node["draining"])
    todo = plan(kept, rows, files, draining, _access_shown(fleet) if kept.tenants or kept.keys else None)
    say(f"{file}: {_counted(kept)}, made {age(time.time() - kept.made_at)} ago by glowplug {kept.made_by}")
    if todo.conflicts and not replace:
        for line in todo.conflicts:
            say(f"  {line}", err=True)
        raise CliError(
            "nothing was restored, because the fleet differs from the backup as listed: --replace overwrites it"
        )
    for line in _steps(todo):
        say(f"  {line}")
    if not dry_run:
        _carry_out(fleet, todo, kept, frozenset(node["node_id"] for node in nodes))


def _taken(fleet: FleetClient) -> tuple[Backup, list[str]]:
    if not fleet.redis_url:
        raise CliError("the address of the store (Valkey or Redis) is not known: set GLOWPLUG_REDIS_URL")
    kinds: dict[str, type[Any]] = {"models": Model, CORDONS: Cordon, TENANTS: Tenant, KEYS: ApiKey}
    try:
        with connect_sync(fleet.redis_url, socket_timeout=ANSWER_S, socket_connect_timeout=ANSWER_S) as client:
            pipe = client.pipeline(transaction=True)
            for table in kinds:
                pipe.hgetall(f"{PREFIX}:{table}")
            tables = dict(zip(kinds, pipe.execute(), strict=True))
    except ResponseError as error:
        raise CliError(f"the store does not hold the tables of a fleet: {error}") from error
    except (RedisError, OSError, ValueError) as error:
        raise CliError(f"the store does not answer: {error}") from error
    rows: dict[str, dict[str, Any]] = {}
    left_out: list[str] = []
    for table, kind in kinds.items():
        raw = dict(table_row(key, row) for key, row in tables[table].items())
        rows[table], bad = read_rows(table, raw, kind)
        left_out += [f"{table}/{shown(key)}: {problem}" for key, problem in bad.items()]
    taken = Backup(
        made_at=time.time(),
        models=rows["models"],
        cordons=tuple(cordon.node_id for cordon in rows[CORDONS].values() if cordon.cordoned),
        files=_model_files(fleet) or {},
        tenants=rows[TENANTS],
        keys=rows[KEYS],
    )
    return taken, left_out


def _access_shown(fleet: FleetClient) -> AccessShown:
    return AccessShown(
        tenants={row["name"]: row for row in fleet.rows("autoscaler", "/v1/tenants")},
        keys={row["key_id"]: row for row in fleet.rows("autoscaler", "/v1/keys")},
    )


def _model_files(fleet: FleetClient) -> dict[str, str] | None:
    if not fleet.document:
        return None
    folder = Path(fleet.document["models_dir"])
    try:
        return {
            path.name: path.read_text("utf-8") for path in sorted(folder.iterdir()) if path.suffix in (".yaml", ".yml")
        }
    except (OSError, UnicodeDecodeError) as error:
        raise CliError(f"cannot read the model files of {folder}: {error}") from error


def _counted(kept: Backup) -> str:
    access = f", {len(kept.tenants)} tenant(s), {len(kept.keys)} key(s)" if kept.tenants or kept.keys else ""
    return f"{len(kept.models)} model(s), {len(kept.files)} model file(s), {len(kept.cordons)} drained node(s){access}"


def _steps(todo: RestorePlan) -> list[str]:
    lines = [f"tenant {name}" for name in todo.tenants]
    lines += [f"key {prefix_of(key_id)} of tenant {body['tenant']}" for key_id, body in todo.keys.items()]
    lines += [f"file {name}" for name in todo.files]
    lines += [f"deploy {body['name']}" for body in todo.deploy]
    lines += [f"{verb} {name}" for verb, name in todo.verbs]
    lines += [f"drain node {node_id}" for node_id in todo.cordons]
    if todo.unchanged:
        lines.append(f"unchanged: {', '.join(todo.unchanged)}")
    lines += [f"not restored: put {file} into GLOWPLUG_ACCESS_DIR of this fleet" for file in todo.lacking]
    return lines if not todo.is_nothing else [*lines, "nothing to do"]


def _carry_out(fleet: FleetClient, todo: RestorePlan, kept: Backup, nodes: frozenset[str]) -> None:
    """Carry out the plan; every step can be repeated.

    Tenants and keys first, so that no model opens to more people than before; then files, models, operators' verbs,
    nodes."""
    sources = {model.name: source_of(model) for model in kept.models.values()}
    for name, body in todo.tenants.items():
        source = source_of(kept.tenants[name])
        fleet.call("PUT", "autoscaler", f"/v1/tenants/{segment(name)}", json=dict(body), params=source)
    for key_id, body in todo.keys.items():
        fleet.call("PUT", "autoscaler", f"/v1/keys/{segment(key_id)}", json=dict(body))
    for name, text in todo.files.items():
        write(Path(fleet.document["models_dir"]) / name, text.encode())
    for body in todo.deploy:
        name = body["name"]
        fleet.call("PUT", "autoscaler", f"/v1/models/{segment(name)}", json=dict(body), params=sources[name])
    _wait(fleet, frozenset(kept.models))
    for verb, name in todo.verbs:
        verb, _, at = verb.partition(" --at ")
        fleet.call("POST", "autoscaler", f"/v1/models/{segment(name)}/{verb}", **({"json": {"at": at}} if at else {}))
    for node_id in todo.cordons:
        if node_id in nodes:
            fleet.call("POST", "placer", f"/v1/nodes/{segment(node_id)}/drain")
        else:
            say(f"  node {node_id} was drained in the backup; it is not in this fleet, so it is left out", err=True)
    say("restored")


def _wait(fleet: FleetClient, keys: frozenset[str]) -> None:
    """Raises CliError with the missing models and the autoscaler's reason."""
    deadline = time.monotonic() + IN_FORCE_S
    while True:
        answer: dict[str, Any] = fleet.get("autoscaler", "/v1/models")
        missing = sorted(keys - {row["key"] for row in answer["data"]})
        if not missing:
            return
        if time.monotonic() > deadline:
            why = next(iter(answer.get("errors", {}).values()), "no reason given: glowplug logs autoscaler-1")
            raise CliError(f"{', '.join(missing)} could not be deployed again: {why}")
        time.sleep(POLL_S)
