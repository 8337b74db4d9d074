"""Backup archives and planned restores."""

import gzip
import io
import json
import os
import tarfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from glowplug.cli.backup import (
    FORMAT_VERSION,
    MANIFEST,
    MAX_BYTES,
    MODELS,
    AccessShown,
    Backup,
    BadArchive,
    RestorePlan,
    body,
    pack,
    plan,
    read,
    source_of,
    write,
)
from glowplug.cli.terminal import CliError
from glowplug.domain.access import AccessLimits, ApiKey, Tenant, digest_of
from glowplug.domain.model import Model
from glowplug.runtime.model_files import ModelFile
from tests.fleet_builder import a_model
from tests.strategies import values

FILE = "name: m\nengine: emulated\nweights_bytes: 100MiB\n"
M = a_model("m", source="/somewhere/m.yaml", pinned=True)
API = a_model("api", source="api", suspended=True)
LAB = Tenant(name="lab", limits=AccessLimits(concurrent=4), model_limits={"big/*": AccessLimits(queued=1)}, revision=3)
CI = ApiKey(
    key_id="abcdefgh", tenant="lab", name="ci", sha256=digest_of("gp-abcdefgh-x"), models=("m",), created_at=5.0
)
KEPT = Backup(
    made_at=1_800_000_000.0, models={"m": M, "api": API}, cordons=("node-2",), files={"m.yaml": FILE},
    tenants={"lab": LAB}, keys={"abcdefgh": CI},
)  # fmt: skip
PACKED = pack(KEPT)
with tarfile.open(fileobj=io.BytesIO(PACKED), mode="r:gz") as packed:
    MEMBERS = {entry.name: (packed.extractfile(entry) or io.BytesIO()).read() for entry in packed}
UNREADABLE = "no readable manifest"
SPARSE = {"GNU.sparse.major": "1", "GNU.sparse.minor": "0", "GNU.sparse.realsize": str(1 << 50)}


def shown(model: Model, **fields: Any) -> dict[str, Any]:
    return {**msgspec.to_builtins(model), "state": "cold", "instances": [], **fields}


def test_what_was_packed_is_read(tmp_path: Path) -> None:
    write(tmp_path / "b.tar.gz", pack(KEPT))
    assert read(tmp_path / "b.tar.gz") == KEPT
    assert (tmp_path / "b.tar.gz").stat().st_mode & 0o777 == 0o600
    assert pack(KEPT) == pack(KEPT)
    assert [path.name for path in tmp_path.iterdir()] == ["b.tar.gz"]


@given(st.lists(values(Model), max_size=3))
def test_any_models_come_back(tmp_path_factory: pytest.TempPathFactory, models: list[Model]) -> None:
    file = tmp_path_factory.mktemp("b") / "b.tar.gz"
    kept = Backup(made_at=1.0, models={model.key: model for model in models})
    write(file, pack(kept))
    assert read(file).models == kept.models


def repacked(changes: Mapping[str, bytes | None]) -> bytes:
    """The archive with changed members; None omits one."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        for name, raw in (MEMBERS | changes).items():
            if raw is not None:
                entry = tarfile.TarInfo(name)
                entry.size = len(raw)
                tar.addfile(entry, io.BytesIO(raw))
    return buffer.getvalue()


def stating(**fields: Any) -> bytes:
    return repacked({MANIFEST: json.dumps(json.loads(MEMBERS[MANIFEST]) | fields).encode()})


def tarred(**fields: Any) -> bytes:
    """A one-member tar with these header fields and no bytes."""
    entry = tarfile.TarInfo(MANIFEST)
    for name, value in fields.items():
        setattr(entry, name, value)
    return gzip.compress(entry.tobuf(tarfile.PAX_FORMAT) + bytes(1024))


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (b"", "is not a backup"),
        (b"PK\x03\x04 something else", "is not a backup"),
        (gzip.compress(b"not a tar", mtime=0), "is not a backup"),
        (PACKED[:-40], "cut short"),
        (PACKED[:200], "cut short"),
        (repacked({MANIFEST: None}), "no readable manifest"),
        (repacked({MODELS: None}), "models.jsonl is missing"),
        (repacked({MODELS: b"{}\n"}), "models.jsonl does not match its manifest"),
        (repacked({"extra": b""}), "does not name extra"),
        (repacked({"../up": b""}), "'../up'"),
        (stating(format="other"), "another format, 'other'"),
        (stating(format_version=FORMAT_VERSION + 1, made_by="9.0"), "made by glowplug 9.0"),
        (tarred(type=tarfile.SYMTYPE, linkname="/etc/passwd"), "is not one that"),
        (stating(members=[]), UNREADABLE),
        (stating(members={"models.jsonl": 5}), UNREADABLE),
        (stating(members={"models.jsonl": {"num_bytes": 1, "sha256": None}}), UNREADABLE),
        (stating(made_at="soon"), UNREADABLE),
        (stating(made_at="nan"), UNREADABLE),
        (stating(made_at=None), UNREADABLE),
        (stating(made_by=["x"]), UNREADABLE),
        (stating(format_version=str(FORMAT_VERSION + 1)), "made by glowplug"),
        (stating(format_version=10**30), UNREADABLE),
        (stating(format_version=10**9, made_by="\x1b[2J\n"), "made by glowplug \\x1b[2J\\n"),
        (repacked({MANIFEST: b"[]"}), UNREADABLE),
        (repacked({MANIFEST: b"\xff\xfe"}), UNREADABLE),
        (repacked({MANIFEST: b'{"a":' * 5000}), UNREADABLE),
        (repacked({MANIFEST: b'{"format_version":' + b"9" * 5000 + b"}"}), UNREADABLE),
        (repacked({"\x1b]0;x\x07\n": b""}), "does not name \\x1b]0;x\\x07\\n"),
        (tarred(size=1 << 40), "is not a backup"),
        (tarred(type=tarfile.LNKTYPE, linkname="/etc/passwd"), "is not one that"),
        (tarred(type=tarfile.FIFOTYPE), "is not one that"),
        (tarred(name="/etc/passwd"), "is not one that"),
        (tarred(pax_headers=SPARSE), "is "),
        (tarred(pax_headers={"size": "9" * 5000}), "is "),
    ],
)
def test_a_foreign_or_corrupt_archive_says_what_is_wrong(raw: bytes, words: str, tmp_path: Path) -> None:
    file = tmp_path / "b.tar.gz"
    file.write_bytes(raw)
    with pytest.raises(BadArchive) as error:
        read(file)
    assert words in str(error.value) and str(file) in str(error.value)
    assert "\n" not in str(error.value)


def test_an_archive_that_unpacks_to_more_than_its_bound_is_refused(tmp_path: Path) -> None:
    (tmp_path / "b.tar.gz").write_bytes(gzip.compress(bytes(MAX_BYTES + 1), 1))
    with pytest.raises(BadArchive, match="unpacks to more than"):
        read(tmp_path / "b.tar.gz")


@pytest.mark.parametrize("name", ["a b.yaml", "modèle.yml"])
def test_a_model_file_of_any_printable_name_comes_back(name: str, tmp_path: Path) -> None:
    write(tmp_path / "b.tar.gz", pack(replace(KEPT, files={name: FILE})))
    assert read(tmp_path / "b.tar.gz").files == {name: FILE}


@pytest.mark.parametrize(
    "name", ["../m.yaml", "a/m.yaml", ".yaml", ".m.yaml", "m.txt", "m\x1b.yaml", "m\n.yaml", "\u202em.yaml"]
)
def test_what_is_no_name_of_a_model_file_is_refused(name: str, tmp_path: Path) -> None:
    write(tmp_path / "b.tar.gz", pack(replace(KEPT, files={name: FILE})))
    with pytest.raises(BadArchive) as error:
        read(tmp_path / "b.tar.gz")
    assert str(error.value).isprintable()


def test_what_is_no_file_is_not_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    for path in (tmp_path / "fifo", Path("/dev/zero"), tmp_path):
        with pytest.raises(BadArchive, match="is not a file"):
            read(path)


@given(at=st.integers(0, 4000), num=st.integers(0, 40), instead=st.binary(max_size=40))
def test_a_damaged_archive_inside_a_sound_gzip_is_refused_or_whole(
    tmp_path_factory: pytest.TempPathFactory, at: int, num: int, instead: bytes
) -> None:
    plain, file = gzip.decompress(PACKED), tmp_path_factory.getbasetemp() / "damaged.tar.gz"
    file.write_bytes(gzip.compress(plain[:at] + instead + plain[at + num :], 1))
    try:
        assert read(file) == KEPT
    except BadArchive as error:
        assert "\n" not in str(error)


def test_every_flipped_byte_is_seen_or_harmless(tmp_path: Path) -> None:
    raw, file = bytearray(pack(KEPT)), tmp_path / "b.tar.gz"
    seen = 0
    for at in range(10, len(raw), 7):
        file.write_bytes(bytes(raw[:at]) + bytes([raw[at] ^ 0x55]) + bytes(raw[at + 1 :]))
        try:
            assert read(file) == KEPT
        except BadArchive:
            seen += 1
    assert seen > 50


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(CliError, match="cannot write"):
        write(tmp_path / "no" / "b.tar.gz", b"")


def test_an_empty_fleet_gets_everything() -> None:
    todo = plan(KEPT, {}, {}, frozenset())
    assert dict(todo.files) == {"m.yaml": FILE}
    assert [b["name"] for b in todo.deploy] == ["api"]
    assert set(todo.verbs) == {("pin", "m"), ("drain", "api")}
    assert todo.cordons == ("node-2",)
    assert not todo.conflicts


def test_a_fleet_elsewhere_gets_its_models_over_rest() -> None:
    todo = plan(KEPT, {}, None, frozenset())
    assert not todo.files
    assert {b["name"] for b in todo.deploy} == {"m", "api"}


def test_what_is_there_already_is_left_alone() -> None:
    rows = {"m": shown(M, revision=7), "api": shown(API)}
    todo = plan(KEPT, rows, {"m.yaml": FILE}, frozenset({"node-2"}))
    assert not (todo.files or todo.deploy or todo.verbs or todo.cordons or todo.conflicts)
    assert set(todo.unchanged) == {"m", "api"}


def test_a_model_that_was_undeployed_comes_back_though_its_file_is_there() -> None:
    todo = plan(KEPT, {"api": shown(API)}, {"m.yaml": FILE}, frozenset({"node-2"}))
    assert not todo.files
    assert [b["name"] for b in todo.deploy] == ["m"]


def test_what_differs_is_a_conflict() -> None:
    rows = {"api": shown(replace(API, kv_bytes=5))}
    todo = plan(KEPT, rows, {"m.yaml": "name: other\n"}, frozenset())
    assert todo.conflicts == (
        "model file m.yaml exists with different content",
        "model api exists with a different declaration",
    )


def test_pins_and_drains_are_brought_back_to_what_they_were() -> None:
    rows = {"m": shown(M, pinned=False), "api": shown(API, suspended=False, pinned=True)}
    todo = plan(KEPT, rows, {"m.yaml": FILE}, frozenset({"node-2"}))
    assert set(todo.verbs) == {("pin", "m"), ("unpin", "api"), ("drain", "api")}
    assert not todo.deploy


def test_a_body_is_what_rest_takes() -> None:
    for row in (M, shown(M)):
        made = ModelFile.model_validate(body(row)).to_model(M.source)
        assert made == replace(M, revision=0)


def access(tenant: Tenant, key: ApiKey) -> AccessShown:
    row = msgspec.json.decode(msgspec.json.encode(key))
    del row["sha256"]
    tenant_row = msgspec.json.decode(msgspec.json.encode(tenant)) | {"num_keys": 1}
    return AccessShown(tenants={tenant.name: tenant_row}, keys={key.key_id: row | {"state": "active"}})


def access_plan(shown: AccessShown, kept: Backup = KEPT) -> RestorePlan:
    return plan(replace(kept, models={}, cordons=(), files={}), {}, {}, frozenset(), shown)


def test_an_empty_fleet_gets_tenants_and_the_digests_of_keys() -> None:
    todo = access_plan(AccessShown())
    assert not todo.conflicts and todo.tenants.keys() == {"lab"}
    assert todo.tenants["lab"]["limits"]["concurrent"] == 4 and todo.tenants["lab"]["priority"] == "standard"
    assert todo.keys["abcdefgh"] == {
        "tenant": "lab", "name": "ci", "sha256": CI.sha256, "models": ["m"], "surfaces": ["data"],
        "limits": msgspec.to_builtins(AccessLimits()), "priority": None, "created_at": 5.0, "expires_at": 0.0,
        "revoked_at": 0.0,
    }  # fmt: skip


def test_tenants_and_keys_that_are_there_are_left_alone_and_what_differs_is_a_conflict() -> None:
    assert access_plan(access(replace(LAB, revision=9), replace(CI, revision=9))).is_nothing
    todo = access_plan(access(replace(LAB, weight=2.0), replace(CI, models=("*",))))
    assert todo.conflicts == (
        "tenant lab exists with a different declaration",
        "key gp-abcdefgh exists with a different declaration",
    )


def test_a_key_that_the_fleet_has_revoked_stays_so_and_one_that_was_revoked_is_again() -> None:
    assert access_plan(access(LAB, replace(CI, revoked_at=7.0, models=("*",)))).is_nothing
    revoked = replace(KEPT, keys={"abcdefgh": replace(CI, revoked_at=7.0)})
    todo = access_plan(access(LAB, CI), revoked)
    assert todo.keys["abcdefgh"]["revoked_at"] == 7.0 and len(todo.conflicts) == 1


def test_tenants_and_keys_of_a_file_come_back_with_the_file() -> None:
    lab, ci = replace(LAB, source="/etc/access/lab.yaml"), replace(CI, source="/etc/access/lab.yaml")
    todo = access_plan(AccessShown(), replace(KEPT, tenants={"lab": lab}, keys={"abcdefgh": ci}))
    assert todo.is_nothing and todo.lacking == ("lab.yaml",)


def test_what_a_custom_resource_declares_comes_back_as_its_own() -> None:
    source = "kubernetes:team/lab"
    lab = replace(LAB, source=source)
    todo = access_plan(AccessShown(), replace(KEPT, tenants={"lab": lab}, keys={}))
    assert todo.tenants.keys() == {"lab"} and not todo.lacking
    assert source_of(lab) == source_of(replace(API, source=source)) == {"source": source}
    assert source_of(LAB) == source_of(API) == source_of(M) == {}


def test_a_backup_of_format_1_has_no_tenants(tmp_path: Path) -> None:
    manifest = json.loads(MEMBERS[MANIFEST])
    named = {
        name: member for name, member in manifest["members"].items() if name not in ("tenants.jsonl", "keys.jsonl")
    }
    old = json.dumps(manifest | {"format_version": 1, "members": named}).encode()
    write(tmp_path / "b.tar.gz", repacked({MANIFEST: old, "tenants.jsonl": None, "keys.jsonl": None}))
    assert read(tmp_path / "b.tar.gz") == replace(KEPT, tenants={}, keys={})
