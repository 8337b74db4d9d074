"""Shapes of the custom resources we write, by (apiVersion, kind), as the operator's schemas have them.

The definitions of monitoring.coreos.com are not bundled with the Kubernetes schemas; these refuse unknown fields.
"""

from typing import Any


def _object(required: tuple[str, ...], **properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "required": list(required),
        "properties": properties,
        "additionalProperties": False,
    }


_TEXT = {"type": "string", "minLength": 1}
_LABELS = {"type": "object", "additionalProperties": {"type": "string"}}
_DURATION = {"type": "string", "pattern": r"^(\d+(ms|[smhdwy]))+$"}
_META = _object(("name",), name=_TEXT, namespace=_TEXT, labels=_LABELS, annotations=_LABELS)
_SELECTOR = _object(
    (),
    matchLabels=_LABELS,
    matchExpressions={
        "type": "array",
        "items": _object(
            ("key", "operator"),
            key=_TEXT,
            operator={"enum": ["In", "NotIn", "Exists", "DoesNotExist"]},
            values={"type": "array", "items": _TEXT},
        ),
    },
)
_RELABEL = _object(
    (),
    sourceLabels={"type": "array", "items": _TEXT},
    targetLabel=_TEXT,
    replacement=_TEXT,
    regex=_TEXT,
    action=_TEXT,
)
_ENDPOINT = _object(
    ("port",),
    port=_TEXT,
    path={"type": "string", "pattern": "^/"},
    interval=_DURATION,
    scrapeTimeout=_DURATION,
    honorLabels={"type": "boolean"},
    relabelings={"type": "array", "items": _RELABEL},
)
_RULE = _object(
    ("expr",),
    record=_TEXT,
    alert=_TEXT,
    expr={"type": ["string", "integer"]},
    labels=_LABELS,
    annotations=_LABELS,
    keep_firing_for=_DURATION,
    **{"for": _DURATION},
)
_GROUP = _object(("name", "rules"), name=_TEXT, interval=_DURATION, rules={"type": "array", "items": _RULE})


def _resource(kind: str, spec: dict[str, Any]) -> dict[str, Any]:
    version = {"const": "monitoring.coreos.com/v1"}
    return _object(
        ("apiVersion", "kind", "metadata", "spec"), apiVersion=version, kind={"const": kind}, metadata=_META, spec=spec
    )


SCHEMAS: dict[tuple[str, str], dict[str, Any]] = {
    ("monitoring.coreos.com/v1", "ServiceMonitor"): _resource(
        "ServiceMonitor",
        _object(
            ("selector", "endpoints"),
            selector=_SELECTOR,
            jobLabel=_TEXT,
            endpoints={"type": "array", "minItems": 1, "items": _ENDPOINT},
            namespaceSelector=_object((), matchNames={"type": "array", "items": _TEXT}),
        ),
    ),
    ("monitoring.coreos.com/v1", "PrometheusRule"): _resource(
        "PrometheusRule", _object(("groups",), groups={"type": "array", "minItems": 1, "items": _GROUP})
    ),
}
