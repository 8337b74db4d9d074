"""The custom resource definitions. Costs a second."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from glowplug.runtime.custom_resources import FOLDER, definitions, written
from glowplug.runtime.model_files import OF_BASE, ModelFile
from tests import kube_api

ROOT = Path(__file__).parents[3]


def nodes(schema: dict[str, Any], path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    yield path, schema
    for name, one in schema.get("properties", {}).items():
        yield from nodes(one, f"{path}.{name}")
    for name in ("items", "additionalProperties"):
        if isinstance(schema.get(name), dict):
            yield from nodes(schema[name], f"{path}.{name}")


def spec_of(kind: str) -> dict[str, Any]:
    found: dict[str, Any] = definitions()[f"{kind.lower()}.yaml"]["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    return found


@pytest.mark.parametrize("name", definitions())
def test_the_definitions_are_current(name: str) -> None:
    text = (ROOT / FOLDER / name).read_text()
    assert text == written(definitions()[name]), "run python -m glowplug.runtime.custom_resources"


@pytest.mark.parametrize("name", definitions())
def test_kubernetes_takes_them_as_structural(name: str) -> None:
    import kubernetes_validate

    crd = definitions()[name]
    for version in ("1.30.0", "1.36.0"):
        kubernetes_validate.validate(crd, version, strict=True)
    for path, one in nodes(crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]):
        free = one.get("x-kubernetes-int-or-string") or one.get("x-kubernetes-preserve-unknown-fields")
        assert "type" in one or free, path
        assert not {"$ref", "anyOf", "default", "title", "const"} & one.keys(), path
        assert not ("properties" in one and "additionalProperties" in one), path


def test_the_spec_of_a_model_is_a_model_file() -> None:
    spec = spec_of("Model")["properties"]["spec"]
    assert list(spec["properties"]) == list(ModelFile.model_fields)
    lacking = [name for name, one in spec["properties"].items() if not one.get("description")]
    assert not lacking, "a field that kubectl explain cannot explain"
    (adapters,) = (one["rule"] for one in spec["x-kubernetes-validations"] if "!has(self.base)" in one["rule"])
    assert all(f"!has(self.{name})" in adapters for name in OF_BASE)
    read = {
        name for one in spec["x-kubernetes-validations"] for name in spec["properties"] if f"self.{name}" in one["rule"]
    }
    untyped = {name for name in read if "type" not in spec["properties"][name]}
    assert untyped <= {"kv_bytes", "weights_bytes"}, "CEL knows a field without a type only where it is int or text"


@pytest.mark.parametrize("path", sorted((ROOT / "deploy/models").glob("*/*.yaml")), ids=lambda path: path.stem)
def test_model_files_fit_once_their_weights_are_mappings(path: Path) -> None:
    schema = kube_api._checked(spec_of("Model")["properties"]["spec"])
    for document in yaml.safe_load_all(path.read_text()):
        shown = {name: {"uri": value} if name in ("weights", "adapter") else value for name, value in document.items()}
        jsonschema.validate(shown, schema | {"additionalProperties": False})
        assert ModelFile.model_validate(shown).name == shown["name"]
