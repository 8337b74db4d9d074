"""A scenario as written: YAML with inheritance, command-line settings, and human units."""

import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

from glowplug.domain.reading import known
from glowplug.domain.units import parse_bytes, parse_seconds
from glowplug.policies.systems import DEFAULT, installed, system
from glowplug.runtime import plain_yaml
from glowplug_lab.simulator.scenario.errors import ScenarioError, join
from glowplug_lab.simulator.scenario.trace import under_trace

Tree = dict[str, Any]
MAX_BASES = 8
SOURCE = "workload.source"
REST = "rest"  # of kv_bytes, no size


def read_tree(path: Path) -> Tree:
    """Policies default to an unconfigured fleet's. Raises ScenarioError."""
    return with_default_system(_read(path, ()))


def with_default_system(tree: Tree) -> Tree:
    return tree if "policies" in tree else with_system({**tree, "policies": DEFAULT})


def _read(path: Path, below: tuple[Path, ...]) -> Tree:
    if path in below or len(below) > MAX_BASES:
        raise ScenarioError("base", f"{path} inherits itself")
    try:
        tree = plain_yaml.load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ScenarioError("", f"{path}: {error.strerror or error}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{path}, line {mark.line + 1}" if mark else str(path)
        raise ScenarioError("", f"{where}: {getattr(error, 'problem', None) or 'is not YAML text'}") from error
    if not isinstance(tree, dict):
        raise ScenarioError("", f"{path}: is not a mapping of fields to values")
    tree = with_system(expand(tree))
    base = tree.pop("base", None)
    if base is None:
        return tree
    if not isinstance(base, str):
        raise ScenarioError("base", f"{base!r} is not a name of a file")
    under = _read((path.parent / base).resolve(), (*below, path))
    return merge(under_trace(under, tree, (below[0] if below else path).parent), tree)


def expand(tree: Mapping[str, Any]) -> Tree:
    """'a.b: 1' becomes 'a: {b: 1}', at any depth."""
    out: Tree = {}
    for name, value in tree.items():
        head, dot, rest = str(name).partition(".")
        value = expand({rest: value}) if dot else expand(value) if isinstance(value, Mapping) else value
        old = out.get(head)
        out[head] = merge(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return out


def merge(under: Tree, over: Tree) -> Tree:
    """Lay `over` over `under`: mappings by field, others whole."""
    out = dict(under)
    for name, value in over.items():
        old = out.get(name)
        out[name] = merge(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return out


def override(tree: Tree, settings: Iterable[str], beside: Path | None = None) -> Tree:
    """Apply each 'dotted.path=value' to a copy. Paths enter lists by number, entry `name`, or '*' for all; values are
    YAML. With `beside`, a trace path replaces the tree's requests. Raises ScenarioError."""
    settings = list(settings)
    sources = [value.strip() for key, _, value in (one.partition("=") for one in settings) if key.strip() == SOURCE]
    if beside is not None and sources:
        tree = under_trace(tree, {"workload": {"source": sources[-1]}}, beside)
    for setting in settings:
        path, equals, text = setting.partition("=")
        if not equals or not path.strip():
            raise ScenarioError("--set", f"{setting!r} is not key=value")
        try:
            value = plain_yaml.load(text)
        except yaml.YAMLError as error:
            raise ScenarioError(path, f"{text!r} is not a YAML value") from error
        tree = with_system(_set(tree, path.strip().split("."), value, path), over=True)
    return tree


def _set(tree: Any, parts: list[str], value: Any, path: str) -> Any:
    head, rest = parts[0], parts[1:]
    if isinstance(tree, list):
        places = range(len(tree)) if head == "*" else [_place(tree, head, path)]
        return [_set(old, rest, value, path) if n in places and rest else value if n in places else old
                for n, old in enumerate(tree)]  # fmt: skip
    if tree is not None and not isinstance(tree, dict):
        raise ScenarioError(path, f"{head!r} cannot be set inside {tree!r}")
    old = (tree or {}).get(head)
    return {**(tree or {}), head: _set(old, rest, value, path) if rest else value}


def _place(items: list[Any], head: str, path: str) -> int:
    names = [str(item.get("name", "")) if isinstance(item, dict) else "" for item in items]
    if head in names:
        return names.index(head)
    if head.isdigit() and int(head) < len(items):
        return int(head)
    raise ScenarioError(path, f"no entry {head!r} {known(head, names)}")


def in_units(value: Any, path: str = "") -> Any:
    """Convert '12.55GB' to bytes and '5m' to seconds by the unit in the field's name. Raises ScenarioError for a
    negative or non-numeric value."""
    if isinstance(value, dict):
        return {
            name: _measured(name, in_units(item, join(path, name)), join(path, name)) for name, item in value.items()
        }
    if isinstance(value, list):
        named = [(item.get("name") or n) if isinstance(item, dict) else n for n, item in enumerate(value)]
        return [in_units(item, join(path, name)) for name, item in zip(named, value, strict=True)]
    if isinstance(value, float) and not math.isfinite(value):
        raise ScenarioError(path, f"{value} is not a finite number")
    return value


def _measured(name: str, value: Any, path: str) -> Any:
    size = name.endswith(("_bytes", "_bytes_per_s", "_bytes_per_token"))
    time = not size and (name.endswith("_s") or name == "seconds")
    if isinstance(value, str) and value != REST and (size or time):
        try:
            return _bytes(value) if size else parse_seconds(value)
        except ValueError as error:
            raise ScenarioError(path, str(error)) from error
    least = -1 if name == "keep_alive_s" else 0  # for ever
    if (size or time) and isinstance(value, int | float) and value < least:
        raise ScenarioError(path, f"{value} is below {least}")
    return value


def _bytes(text: str) -> int:
    """'16Gbps' is 2 GB a second."""
    if text.lower().endswith("bps"):
        return parse_bytes(text[:-3] + "B") // 8
    return parse_bytes(text.removesuffix("/s"))


def data_folder() -> Path:
    if named := os.environ.get("GLOWPLUG_DATA", ""):
        return Path(named)
    places = [Path("../shared/data"), Path(__file__).parents[4] / "shared/data"]
    return next((place for place in places if place.is_dir()), places[0])


def with_system(tree: Mapping[str, Any], *, over: bool = False) -> dict[str, Any]:
    """A system's settings go under or `over` the tree's. Raises ScenarioError for an unknown name."""
    named = tree.get("policies")
    if not isinstance(named, str):
        return dict(tree)
    if named not in installed():
        raise ScenarioError("policies", f"there is no system {named!r} {known(named, installed())}")
    chosen = system(named)
    params = dict(tree.get("params") or {})
    for part, settings in chosen.params.items():
        own = dict(params.get(part) or {})
        params[part] = own | dict(settings) if over else dict(settings) | own
    return {**tree, "policies": dict(chosen.policies), "params": params}
