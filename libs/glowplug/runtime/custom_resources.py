"""Generate the Kubernetes custom resource definitions from model file and tenant body: `python -m
glowplug.runtime.custom_resources` writes deploy/helm/glowplug/crds.

`spec` is the model file. Structural schemas need one type per field, so `weights` and `adapter` are mappings (`{uri:
...}`), as CEL cannot see untyped fields; seconds, number or text, stay untyped. Defaults are omitted: the API server
would write them into the object, where they count as given.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

import yaml

from glowplug.runtime.model_files import OF_BASE, ModelFile, Strict
from glowplug.runtime.tenant_body import TenantBody

GROUP: Final = "glowplug.dev"
VERSION: Final = "v1alpha1"
FOLDER: Final = Path("deploy/helm/glowplug/crds")
Schema = dict[str, Any]

_MADE_BY = "# Written by `python -m glowplug.runtime.custom_resources`; change the model file's own fields instead.\n"
_KEPT: Final = frozenset(  # taken over unchanged
    {"description", "type", "enum", "pattern", "format", "minimum", "maximum", "minLength", "maxLength", "minItems"}
    | {"maxItems", "maxProperties"}
)
_OR_TEXT: Final = {  # number that may be text -> its structural schema, and words
    "integer": ("x-kubernetes-int-or-string", "or text with a unit: 512MiB, 24GB"),
    "number": ("x-kubernetes-preserve-unknown-fields", "seconds, or text with a unit: 500ms, 5m"),
}
_MAY_NOT = " && ".join(f"!has(self.{name})" for name in sorted(OF_BASE))
_RULES: Mapping[str, tuple[tuple[str, str], ...]] = {
    "Model": (
        ("(has(self.engine) && self.engine != '') || has(self.base)", "engine: a model without a base needs one"),
        ("has(self.base) == has(self.adapter)", "base, adapter: a LoRA adapter has both"),
        (f"!has(self.base) || ({_MAY_NOT})", f"an adapter has that of its base: {', '.join(sorted(OF_BASE))}"),
        (
            "(has(self.min_instances) ? self.min_instances : 0) <= (has(self.max_instances) ? self.max_instances : 1)",
            "min_instances is above max_instances",
        ),
    ),
    "Tenant": (),
}
_SAME_NAME = (
    "has(self.name) == has(oldSelf.name) && (!has(self.name) || self.name == oldSelf.name)",
    "name: it cannot change; make another resource",
)


def structural(node: Mapping[str, Any], defs: Mapping[str, Schema]) -> Schema:
    """Convert pydantic's JSON schema into Kubernetes' structural form."""
    if "$ref" in node:
        rest = {name: value for name, value in node.items() if name != "$ref"}
        node = {**defs[node["$ref"].rpartition("/")[2]], **rest}
    made: Schema = {name: value for name, value in node.items() if name in _KEPT}
    forms = [one for one in node.get("anyOf", ()) if one.get("type") != "null"]
    types = {one.get("type") for one in forms}
    if "string" in types and types & set(_OR_TEXT):
        number = next(iter(types & set(_OR_TEXT)))
        mark, said = _OR_TEXT[number]
        made |= {mark: True, "description": "; ".join(filter(None, (made.get("description", ""), said)))}
    elif forms:
        mapping = next(one for one in forms if one.get("type") != "string")
        made = {**structural(mapping, defs), **made}
    if "properties" in node:
        made["properties"] = {name: structural(one, defs) for name, one in node["properties"].items()}
        made |= {"required": list(node["required"])} if node.get("required") else {}
    elif node.get("type") == "object":
        if isinstance(values := node.get("additionalProperties"), Mapping) and values:
            made["additionalProperties"] = structural(values, defs)
        else:
            made["x-kubernetes-preserve-unknown-fields"] = True
    if "items" in node:
        made["items"] = structural(node["items"], defs)
    if (default := node.get("default")) not in (None, "", {}, []) and not isinstance(default, dict):
        made["description"] = "; ".join(filter(None, (made.get("description", ""), f"default {_shown(default)}")))
    return made


def _shown(default: Any) -> str:
    return str(default).lower() if isinstance(default, bool) else f"{default:g}" if default == 1 else str(default)


def _spec(file: type[Strict], kind: str) -> Schema:
    schema = file.model_json_schema()
    spec = structural(schema, schema.get("$defs", {}))
    name = {"type": "string", "minLength": 1, "maxLength": 200}
    name["description"] = f"the {kind.lower()}'s name in the fleet; without it, that of the resource"
    spec["properties"] = {"name": name, **{key: one for key, one in spec["properties"].items() if key != "name"}}
    spec.pop("required", None)
    rules = [{"rule": rule, "message": said} for rule, said in (*_RULES[kind], _SAME_NAME)]
    return spec | {"x-kubernetes-validations": rules}


def _text(description: str) -> Schema:
    return {"type": "string", "description": description}


def _number(description: str) -> Schema:
    return {"type": "integer", "format": "int64", "description": description}


def _status(own: Mapping[str, Schema]) -> Schema:
    condition = {
        "type": "object",
        "required": ["type", "status", "reason", "message", "lastTransitionTime"],
        "properties": {
            "type": {"type": "string", "enum": ["Accepted", "Ready"]},
            "status": {"type": "string", "enum": ["True", "False", "Unknown"]},
            "reason": _text("one word for machines"),
            "message": _text("one sentence for people"),
            "lastTransitionTime": {"type": "string", "format": "date-time"},
            "observedGeneration": _number("of the spec that the condition is about"),
        },
    }
    listed = {
        "type": "array",
        "description": "Accepted: the fleet has taken the spec. Ready: a request is answered, at once or after a start",
        "items": condition,
        "x-kubernetes-list-type": "map",
        "x-kubernetes-list-map-keys": ["type"],
    }
    observed = _number("generation of the spec that the fleet has taken or refused")
    properties = {"observedGeneration": observed, **own, "conditions": listed}
    return {"type": "object", "description": "Written by the operator alone", "properties": properties}


def _column(name: str, path: str, kind: str = "string", *, wide: bool = False) -> Schema:
    return {"name": name, "type": kind, "jsonPath": path} | ({"priority": 1} if wide else {})


def _reason(condition: str) -> str:
    return f'.status.conditions[?(@.type=="{condition}")].reason'


def _definition(kind: str, spec: Schema, status: Schema, columns: Iterable[Schema], scale: Schema | None) -> Schema:
    plural = f"{kind.lower()}s"
    whole = {
        "type": "object",
        "description": spec.get("description", ""),
        "required": ["spec"],
        "properties": {
            "apiVersion": {"type": "string"},
            "kind": {"type": "string"},
            "metadata": {"type": "object"},
            "spec": spec,
            "status": status,
        },
    }
    version = {
        "name": VERSION,
        "served": True,
        "storage": True,
        "schema": {"openAPIV3Schema": whole},
        "subresources": {"status": {}} | ({"scale": scale} if scale else {}),
        "additionalPrinterColumns": [*columns, _column("Age", ".metadata.creationTimestamp", "date")],
    }
    names = {"kind": kind, "listKind": f"{kind}List", "plural": plural, "singular": kind.lower()}
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{plural}.{GROUP}"},
        "spec": {
            "group": GROUP,
            "scope": "Namespaced",
            "names": {**names, "categories": ["glowplug"]},
            "versions": [version],
        },
    }


def definitions() -> dict[str, Schema]:
    of_model = {
        "key": _text("key of the model in the fleet"),
        "state": _text("hot, warm, cold, starting, draining or suspended"),
        "replicas": _number("instances that serve now"),
        "selector": _text("label selector of the scale subresource; instances are not pods, so it selects none"),
        "where": _text("nodes with an instance"),
        "eta": _text("time until a request that comes now would be served, where no instance is ready"),
    }
    columns = [
        _column("State", ".status.state"),
        _column("Replicas", ".status.replicas", "integer"),
        _column("Where", ".status.where"),
        _column("ETA", ".status.eta"),
        _column("Accepted", _reason("Accepted"), wide=True),
        _column("Ready", _reason("Ready"), wide=True),
    ]
    scale = {
        "specReplicasPath": ".spec.min_instances",
        "statusReplicasPath": ".status.replicas",
        "labelSelectorPath": ".status.selector",
    }
    tenant = [
        _column("Priority", ".spec.priority"),
        _column("Keys", ".status.keys", "integer"),
        _column("Accepted", _reason("Accepted")),
    ]
    model, keys = _spec(ModelFile, "Model"), {"keys": _number("keys of the tenant that are not over")}
    return {
        "model.yaml": _definition("Model", model, _status(of_model), columns, scale),
        "tenant.yaml": _definition("Tenant", _spec(TenantBody, "Tenant"), _status(keys), tenant, None),
    }


def written(definition: Schema) -> str:
    return _MADE_BY + yaml.safe_dump(definition, sort_keys=False, allow_unicode=True, width=118)


if __name__ == "__main__":
    for name, definition in definitions().items():
        (FOLDER / name).write_text(written(definition))
