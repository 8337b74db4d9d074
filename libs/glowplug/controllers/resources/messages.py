"""Messages between the operator's shell and its controller. Times are epoch seconds."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final

from glowplug.domain.decision import DecisionRecord
from glowplug.domain.declared import OF_KUBERNETES
from glowplug.domain.instance import Instance
from glowplug.domain.model import model_key

FINALIZER: Final = "glowplug.dev/drain"
MANAGER: Final = "glowplug-operator"  # field owner


class ResourceKind(StrEnum):
    MODEL = "Model"
    TENANT = "Tenant"


@dataclass(frozen=True, slots=True, kw_only=True)
class Resource:
    """A custom resource. `is_leaving`: deleted, and gone once our finalizer (`is_held`) is removed; `version`:
    grows with each write, 0 where the API server counts otherwise."""

    kind: ResourceKind
    namespace: str
    name: str
    uid: str
    version: int
    generation: int
    is_leaving: bool
    is_held: bool
    spec: Mapping[str, Any]
    status: Mapping[str, Any]

    @classmethod
    def read(cls, document: Mapping[str, Any]) -> "Resource":
        """Raises KeyError, ValueError or TypeError for a document that no API server sends."""
        meta = document["metadata"]
        return cls(
            kind=ResourceKind(document["kind"]),
            namespace=str(meta["namespace"]),
            name=str(meta["name"]),
            uid=str(meta["uid"]),
            version=int(version) if (version := str(meta.get("resourceVersion", ""))).isdecimal() else 0,
            generation=int(meta.get("generation", 1)),
            is_leaving=bool(meta.get("deletionTimestamp")),
            is_held=FINALIZER in meta.get("finalizers", ()),
            spec=dict(document.get("spec") or {}),
            status=dict(document.get("status") or {}),
        )

    @property
    def source(self) -> str:
        """`source` of its rows in the fleet."""
        return f"{OF_KUBERNETES}{self.namespace}/{self.name}"

    @property
    def fleet_name(self) -> str:
        return str(self.spec.get("name") or self.name)

    @property
    def key(self) -> str:
        """Key of its row in the fleet; "" if its name has none."""
        if self.kind is ResourceKind.TENANT:
            return self.fleet_name
        try:
            return model_key(self.fleet_name)
        except ValueError:
            return ""

    @property
    def body(self) -> dict[str, Any]:
        if self.kind is ResourceKind.TENANT:
            return {name: value for name, value in self.spec.items() if name != "name"}
        return {**self.spec, "name": self.fleet_name}


@dataclass(frozen=True, slots=True, kw_only=True)
class DeclaredRow:
    """A model or tenant of the fleet. From `state` on, a model's fields; `refuses_cold`: requests do not wait for a
    start; `keeps_one`: an instance should always run."""

    key: str
    source: str
    num_keys: int = 0
    state: str = ""
    last_failure: str = ""
    refuses_cold: bool = False
    keeps_one: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorView:
    """The fleet at one look, begun at `taken_at`. `instances`: by model key, with gone ones; `etas`: seconds until a
    request that arrives now is served, by key, of models known to the router asked."""

    taken_at: float
    rows: Mapping[ResourceKind, Mapping[str, DeclaredRow]]
    instances: Mapping[str, tuple[Instance, ...]] = field(default_factory=dict)
    decisions: tuple[DecisionRecord, ...] = ()
    etas: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Notice:
    """An event of Kubernetes. `name` is stable for the same news."""

    name: str
    reason: str
    note: str
    at_s: float
    is_warning: bool = False


# Stimuli


@dataclass(frozen=True, slots=True)
class Listed:
    kind: ResourceKind
    resources: tuple[Resource, ...]


@dataclass(frozen=True, slots=True)
class Seen:
    resource: Resource


@dataclass(frozen=True, slots=True)
class Gone:
    uid: str


@dataclass(frozen=True, slots=True)
class Looked:
    view: OperatorView


@dataclass(frozen=True, slots=True)
class Lost:
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """`status`: of HTTP, 0: no answer; `message`: "" if done."""

    uid: str
    generation: int
    status: int = 200
    message: str = ""


@dataclass(frozen=True, slots=True)
class NotDone:
    """The API server did not take the effect."""

    effect: Any


# Effects


@dataclass(frozen=True, slots=True)
class AddFinalizer:
    """Set our finalizer."""

    resource: Resource


@dataclass(frozen=True, slots=True)
class RemoveFinalizer:
    """Remove our finalizer: the API server then removes the resource."""

    resource: Resource


@dataclass(frozen=True, slots=True)
class Declare:
    resource: Resource


@dataclass(frozen=True, slots=True)
class Withdraw:
    """Remove the fleet's row; instances drain."""

    resource: Resource
    key: str


@dataclass(frozen=True, slots=True)
class WriteStatus:
    resource: Resource
    status: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Announce:
    resource: Resource
    notice: Notice
