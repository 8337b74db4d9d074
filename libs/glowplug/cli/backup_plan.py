"""What a restore does to a fleet, worked out before anything is done. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from glowplug.cli.backup_archive import Backup
from glowplug.domain.model import Model
from glowplug.runtime.model_files import ModelFile

# What an operator changes beside the declaration: `glowplug pin`, `drain`.
_BY_VERB = ("pinned",)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """`conflicts` are things that are there and different; with any of them nothing is done unless asked to replace."""

    files: Mapping[str, str]  # name -> text, to be written
    deploy: tuple[Mapping[str, Any], ...]  # bodies of PUT /v1/models/{name}
    verbs: tuple[tuple[str, str], ...]  # (verb, model name): pin, unpin, drain, load
    cordons: tuple[str, ...]
    unchanged: tuple[str, ...]  # names of models that are as in the backup
    conflicts: tuple[str, ...]

    @property
    def is_nothing(self) -> bool:
        return not (self.files or self.deploy or self.verbs or self.cordons)


def body(model: Model | Mapping[str, Any]) -> dict[str, Any]:
    """A model as its owner would write it: what PUT /v1/models takes, from a row of the store or of REST."""
    row: dict[str, Any] = dict(msgspec.to_builtins(model)) if isinstance(model, Model) else dict(model)
    shown = {name: row[name] for name in ModelFile.model_fields}
    shown["aliases"] = list(shown["aliases"])
    return shown


def plan(
    backup: Backup,
    models: Mapping[str, Mapping[str, Any]],
    files: Mapping[str, str] | None,
    draining: frozenset[str],
) -> Plan:
    """From the rows the autoscaler shows (by key), the files of its folder (None: not on this machine), and the nodes
    that drain already."""
    conflicts: list[str] = []
    write: dict[str, str] = {}
    for name, text in sorted(backup.files.items()) if files is not None else ():
        if files is not None and files.get(name) != text:
            write[name] = text
            if name in files:
                conflicts.append(f"model file {name} is there with other words")
    deploy: list[dict[str, Any]] = []
    verbs: list[tuple[str, str]] = []
    unchanged: list[str] = []
    for key, model in sorted(backup.models.items()):
        row, wanted = models.get(key), body(model)
        from_file = Path(model.source).name in write  # its file, once written, is read by the autoscaler itself
        now = body(row) if row is not None else None
        same = now is not None and _declared(now) == _declared(wanted)
        if row is not None and not same:
            conflicts.append(f"model {model.name} is there and declared otherwise")
        if not same and not from_file:
            deploy.append(wanted)
        found = _verbs(model, row)
        verbs += found
        if same and not found:
            unchanged.append(model.name)
    return Plan(
        files=write,
        deploy=tuple(deploy),
        verbs=tuple(verbs),
        cordons=tuple(node_id for node_id in backup.cordons if node_id not in draining),
        unchanged=tuple(unchanged),
        conflicts=tuple(conflicts),
    )


def _declared(shown: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in shown.items() if name not in _BY_VERB}


def _verbs(model: Model, row: Mapping[str, Any] | None) -> list[tuple[str, str]]:
    """What an operator had asked for and the declaration does not say."""
    pinned, suspended = (bool(row["pinned"]), bool(row["suspended"])) if row else (False, False)
    found = []
    if model.pinned and not pinned:
        found.append(("pin", model.name))
    elif pinned and not model.pinned:
        found.append(("unpin", model.name))
    if model.suspended and not suspended:
        found.append(("drain", model.name))
    return found
