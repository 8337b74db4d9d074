"""Show a model file as a form: fields, YAML, and faults by field. A faultless form is a deployable file
(model_files.py)."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import yaml
from pydantic import ValidationError

from glowplug.domain.errors import GlowplugError, InvalidModelFile
from glowplug.domain.model import Model, WeightsRef
from glowplug.runtime import plain_yaml
from glowplug.runtime.model_files import OF_BASE, ModelFile, WeightsFile, message_of
from glowplug.weights.source import local_path

WHOLE: Final = ""  # a fault of no single field
_UNITS: Final = (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10), ("GB", 10**9), ("MB", 10**6))
_SIZES: Final = ("weights_bytes", "kv_bytes")


@dataclass(frozen=True, slots=True)
class Fault:
    """`field` is dotted if nested: `slo.ttft_s`, `engine_args.profile`."""

    field: str
    message: str


def read(text: str, otherwise: str = "write one field per line, as name: value") -> dict[str, Any]:
    """Parse a YAML mapping, e.g. a model's fields. Raises InvalidModelFile with the line if known, or `otherwise` for
    no mapping."""
    try:
        found = plain_yaml.load(text)
    except yaml.MarkedYAMLError as error:
        line = f"line {error.problem_mark.line + 1}: " if error.problem_mark else ""
        raise InvalidModelFile(f"{line}{error.problem or error.context}") from error
    except yaml.YAMLError as error:
        raise InvalidModelFile(str(error).splitlines()[0]) from error
    if not isinstance(found, dict):
        raise InvalidModelFile(otherwise)
    return {str(name): value for name, value in found.items()}


def written(given: Mapping[str, Any]) -> str:
    """Dump fields in the order of the schema, unknown ones last."""
    order = {name: place for place, name in enumerate(ModelFile.model_fields)}
    sorted_fields = dict(sorted(given.items(), key=lambda pair: order.get(pair[0], len(order))))
    return yaml.dump(sorted_fields, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100)


class _Dumper(yaml.SafeDumper):
    """Multi-line texts as blocks, no anchors."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style="|" if "\n" in value else None)


_Dumper.add_representer(str, _text)


def check_fields(given: Mapping[str, Any]) -> tuple[ModelFile | None, list[Fault]]:
    try:
        return ModelFile.model_validate(dict(given)), []
    except ValidationError as error:
        return None, faults_of(error, given)


def faults_of(error: ValidationError, given: Mapping[str, Any]) -> list[Fault]:
    """One fault per field; weights, text or mapping, fail in the given form."""
    wrong = WeightsFile.__name__ if not isinstance(given.get("weights"), Mapping) else "str"
    found: dict[str, Fault] = {}
    for one in error.errors():
        if wrong in one["loc"]:
            continue
        where = ".".join(str(part) for part in one["loc"] if part not in (WeightsFile.__name__, "str"))
        found.setdefault(where, Fault(where, message_of(one)))
    return list(found.values())


def fault_of(error: GlowplugError) -> Fault:
    """Turn a refusal into its field's fault, without repeating the name."""
    field = error.param or WHOLE
    return Fault(field, error.message.removeprefix(f"{field}: ") if field else error.message)


def fields_of(model: Model) -> dict[str, Any]:
    """Fields that declare this model: required and non-default ones, without operators' marks."""
    found: dict[str, Any] = {"name": model.name, "engine": model.engine}
    if model.base:
        found |= {"base": model.base, "adapter": _weights(model.weights)}
    elif model.weights != WeightsRef(uri=""):
        found["weights"] = _weights(model.weights)
    without = {"name", "engine", "weights", "base", "adapter"}
    if model.base:
        without |= OF_BASE
    else:
        found["weights_bytes"] = model.weights_bytes
    defaults = ModelFile.model_construct(name="", engine="").model_dump(exclude=without)
    for name, default in defaults.items():
        value = getattr(model, name)
        if name == "slo":
            value = {part: seconds for part in default if (seconds := getattr(value, part))}
            default = {}
        elif name == "aliases":
            value = list(value)
        elif name == "engine_args":
            value = dict(value)
        if value != default:
            found[name] = str(value) if name == "on_cold" else value
    return {name: _size(value) if name in _SIZES else value for name, value in found.items()}


def _weights(ref: WeightsRef) -> Any:
    uri = str(path) if (path := local_path(ref.uri)) is not None else ref.uri
    more = {"sha256": ref.sha256, "num_bytes": ref.num_bytes}
    given = {name: value for name, value in more.items() if value}
    return {"uri": uri, **given} if given else uri


def _size(num_bytes: int) -> int | str:
    exact = [f"{num_bytes // step}{unit}" for unit, step in _UNITS if num_bytes and num_bytes % step == 0]
    return min(exact, key=len, default=num_bytes)
