"""Settings of the operator."""

import os
from pathlib import Path

from pydantic import Field

from glowplug.runtime.settings import ElectedSettings, advanced

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")


class OperatorSettings(ElectedSettings):
    autoscaler_url: str = "http://autoscaler:8080"  # of models and tenants
    placer_url: str = "http://placer:8080"  # of instances and decisions
    router_url: str = "http://router:8080"  # of estimates of starts: the admin port of any router; empty: none
    leader_lease_s: float = Field(15.0, ge=0)  # as above, by a Lease of Kubernetes
    kubernetes_url: str = ""  # of the API server; empty: that of the cluster the process runs in
    kubernetes_account: Path = advanced(ACCOUNT)  # folder with token, ca.crt and namespace
    watch_namespace: str = Field("", max_length=63)  # whose custom resources it follows; empty: all namespaces

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
