"""The part of the Kubernetes API behind helm's `--dry-run=server`: kinds, and objects that templates look up."""

import http.server
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.k8s.rendering import Manifest


def plural(kind: str) -> str:
    name = kind.lower()
    return f"{name[:-1]}ies" if name.endswith("y") else f"{name}s"


def answers(known: list[Manifest]) -> dict[str, Any]:
    kinds = {(manifest["apiVersion"], manifest["kind"]) for manifest in known}
    groups = [
        {"name": version.partition("/")[0], "versions": [of], "preferredVersion": of}
        for version in sorted({version for version, _ in kinds if "/" in version})
        for of in [{"groupVersion": version, "version": version.partition("/")[2]}]
    ]
    found: dict[str, Any] = {
        "/version": {"major": "1", "minor": "35", "gitVersion": "v1.35.0"},
        "/api": {"kind": "APIVersions", "versions": ["v1"]},
        "/apis": {"kind": "APIGroupList", "apiVersion": "v1", "groups": groups},
    }
    for version, kind in sorted(kinds):
        path = f"/apis/{version}" if "/" in version else f"/api/{version}"
        about = {"name": plural(kind), "singularName": kind.lower(), "namespaced": True, "kind": kind, "verbs": ["get"]}
        found.setdefault(path, {"kind": "APIResourceList", "groupVersion": version, "resources": []})
        found[path]["resources"].append(about)
    return found


@contextmanager
def api_server(known: list[Manifest], objects: Mapping[str, Manifest], folder: Path) -> Iterator[str]:
    """Serve the kinds of `known`, and `objects` by path; yields a kubeconfig's path."""
    says = {**answers(known), **objects}

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            found = says.get(self.path.partition("?")[0])
            self.send_response(404 if found is None else 200)
            self.send_header("Content-Type", "application/json")
            self.end_headers()
            self.wfile.write(json.dumps(found or {"kind": "Status", "status": "Failure", "code": 404}).encode())

        def log_message(self, format: str, *args: Any) -> None:
            """Says nothing."""

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "c", "cluster": {"server": f"http://127.0.0.1:{server.server_address[1]}"}}],
            "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
            "current-context": "c",
            "users": [{"name": "u", "user": {}}],
        }
        path = folder / "kubeconfig"
        path.write_text(json.dumps(config))
        yield str(path)
        server.shutdown()
