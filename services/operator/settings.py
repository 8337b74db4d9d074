"""Settings of the operator."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from glowplug.domain.bounds import word
from glowplug.domain.reading import ADVANCED
from glowplug.runtime.settings import ElectedSettings

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")


@dataclass(kw_only=True)
class OperatorSettings(ElectedSettings):
    autoscaler_url: str = "http://autoscaler:8080"  # of models and tenants
    placer_url: str = "http://placer:8080"  # of instances and decisions
    router_url: str = "http://router:8080"  # of estimates of starts: the admin port of any router; empty: none
    leader_lease_s: float = 15.0  # as above, by a Lease of Kubernetes
    kubernetes_url: str = ""  # of the API server; empty: that of the cluster the process runs in
    kubernetes_account: Annotated[Path, ADVANCED] = ACCOUNT  # folder with token, ca.crt and namespace
    watch_namespace: Annotated[str, word(r"[^/]*", 63)] = ""  # whose custom resources it follows; empty: all namespaces

    def api_server(self) -> str:
        """The URL of the API server; "" outside a cluster where none is given."""
        host, port = os.environ.get("KUBERNETES_SERVICE_HOST", ""), os.environ.get("KUBERNETES_SERVICE_PORT", "443")
        inside = f"https://{f'[{host}]' if ':' in host else host}:{port}" if host else ""
        return self.kubernetes_url.rstrip("/") or inside

    def own_namespace(self) -> str:
        """The namespace the process runs in, where its Lease is."""
        try:
            return (self.kubernetes_account / "namespace").read_text().strip() or "default"
        except OSError:
            return "default"
