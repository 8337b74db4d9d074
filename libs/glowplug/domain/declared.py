"""Who declared a model or a tenant: a file, REST, or a custom resource in Kubernetes."""

from typing import Final

from glowplug.domain.errors import Conflict

OF_KUBERNETES: Final = "kubernetes:"  # a custom resource declares with the source kubernetes:NAMESPACE/NAME


def declared_by(source: str) -> str:
    """The source of a row in words."""
    if source.startswith(OF_KUBERNETES):
        return f"the resource {source.removeprefix(OF_KUBERNETES)} in Kubernetes"
    return "REST" if source in ("", "api") else f"the file {source}"


def check_owner(what: str, known: str, source: str) -> None:
    """Raise Conflict where `what` is declared by a custom resource (`known`, its source, says so) and another source
    would change it, or where a custom resource would take over what another source declared."""
    if known != source and (known.startswith(OF_KUBERNETES) or source.startswith(OF_KUBERNETES)):
        raise Conflict(f"{what} is declared by {declared_by(known)}, and changes only there", param="name")
