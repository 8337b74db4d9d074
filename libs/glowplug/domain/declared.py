"""Name the declarer of a model or tenant: a file, REST, or a Kubernetes custom resource."""

from typing import Final

from glowplug.domain.errors import Conflict

OF_KUBERNETES: Final = "kubernetes:"  # followed by NAMESPACE/NAME


def declared_by(source: str) -> str:
    """The source in words."""
    if source.startswith(OF_KUBERNETES):
        return f"the resource {source.removeprefix(OF_KUBERNETES)} in Kubernetes"
    return "REST" if source in ("", "api") else f"the file {source}"


def check_owner(what: str, known: str, source: str) -> None:
    """Raise Conflict if the sources `known` and `source` differ and either is a custom resource."""
    if known != source and (known.startswith(OF_KUBERNETES) or source.startswith(OF_KUBERNETES)):
        raise Conflict(f"{what} is declared by {declared_by(known)}, and changes only there", param="name")
