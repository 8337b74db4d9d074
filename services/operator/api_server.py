"""Client of the Kubernetes API server: list, watch, server-side apply, create, get and replace, with the token of the
pod's account."""

import json
import ssl
import time
from collections.abc import AsyncGenerator, Mapping
from pathlib import Path
from typing import Any, Final

import httpx

from glowplug.controllers.resources.messages import MANAGER, Resource, ResourceKind
from glowplug.runtime.custom_resources import GROUP, VERSION

Document = dict[str, Any]
TIMEOUT_S: Final = 10.0
WATCH_S: Final = 300  # the API server then ends a watch
SILENT_S: Final = 330.0  # a watch without any message for so long is dead
PAGE: Final = 500
TOKEN_S: Final = 60.0  # the kubelet replaces the token's file long before it expires
GONE: Final = 410


class ApiServerError(Exception):
    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"the API server answered {status}: {message}")
        self.status = status


class Expired(ApiServerError):
    """The version to watch from is no longer kept (410): list anew."""


class Unreachable(Exception):
    """The API server does not answer."""


class ApiServer:
    """Every method raises ApiServerError, and Unreachable without an answer. `namespace`: of listed and watched
    resources, "" for all."""

    def __init__(self, url: str, account: Path, namespace: str = "") -> None:
        self._account, self._namespace = account, namespace
        authority = account / "ca.crt"
        verify: ssl.SSLContext | bool = True
        if url.startswith("https:") and authority.exists():
            verify = ssl.create_default_context(cafile=str(authority))
        self._client = httpx.AsyncClient(base_url=url, verify=verify, timeout=TIMEOUT_S, trust_env=False)
        self._token, self._token_until = "", 0.0

    async def close(self) -> None:
        await self._client.aclose()

    async def list(self, kind: ResourceKind) -> tuple[list[Document], str]:
        """Return all resources of a kind, and the version to watch from."""
        found: list[Document] = []
        params: dict[str, Any] = {"limit": PAGE}
        while True:
            page = await self.call("GET", self._followed(kind), params=params)
            found += [{**item, "kind": kind.value} for item in page["items"]]
            if not (more := page["metadata"].get("continue")):
                return found, str(page["metadata"]["resourceVersion"])
            params = {"limit": PAGE, "continue": more}

    async def watch(self, kind: ResourceKind, version: str) -> AsyncGenerator[tuple[str, Document], None]:
        """Yield (ADDED, MODIFIED, DELETED or BOOKMARK; resource) until the API server ends the watch. Raises Expired
        too."""
        params: dict[str, str | int] = {
            "watch": "1",
            "resourceVersion": version,
            "allowWatchBookmarks": "true",
            "timeoutSeconds": WATCH_S,
        }
        timeout = httpx.Timeout(TIMEOUT_S, read=SILENT_S)
        try:
            async with self._client.stream(
                "GET", self._followed(kind), params=params, headers=self._headers(), timeout=timeout
            ) as answer:
                if answer.is_error:
                    await answer.aread()
                    raise _refused(answer)
                async for line in answer.aiter_lines():
                    change = json.loads(line)
                    if change["type"] == "ERROR":
                        raise _error(int(change["object"].get("code", 500)), change["object"])
                    yield change["type"], change["object"]
        except (httpx.HTTPError, ValueError) as error:
            raise Unreachable(f"{type(error).__name__}: {error}") from error

    async def apply(self, resource: Resource, fields: Mapping[str, Any], part: str = "") -> Document:
        """Apply our fields of a resource (or its `part` "status"); omitted ones of ours are removed. The uid keeps a
        deleted resource from being created anew."""
        metadata = {"name": resource.name, "namespace": resource.namespace, "uid": resource.uid}
        document = {"apiVersion": f"{GROUP}/{VERSION}", "kind": resource.kind.value, **fields}
        document["metadata"] = {**metadata, **fields.get("metadata", {})}
        return await self.call(
            "PATCH",
            f"{self._place(resource)}{f'/{part}' if part else ''}",
            params={"fieldManager": MANAGER, "force": "true"},
            content=json.dumps(document),
            headers={"Content-Type": "application/apply-patch+yaml"},
        )

    async def get(self, resource: Resource) -> Document:
        return await self.call("GET", self._place(resource))

    async def call(self, method: str, path: str, **given: Any) -> Document:
        headers = {**self._headers(), **given.pop("headers", {})}
        try:
            answer = await self._client.request(method, path, headers=headers, **given)
            if answer.is_error:
                raise _refused(answer)
            found: Document = answer.json()
        except (httpx.HTTPError, ValueError) as error:
            raise Unreachable(f"{type(error).__name__}: {error}") from error
        return found

    def _followed(self, kind: ResourceKind) -> str:
        where = f"/namespaces/{self._namespace}" if self._namespace else ""
        return f"/apis/{GROUP}/{VERSION}{where}/{_plural(kind)}"

    @staticmethod
    def _place(resource: Resource) -> str:
        return f"/apis/{GROUP}/{VERSION}/namespaces/{resource.namespace}/{_plural(resource.kind)}/{resource.name}"

    def _headers(self) -> dict[str, str]:
        now_s = time.monotonic()
        if now_s >= self._token_until:
            path = self._account / "token"
            self._token = path.read_text().strip() if path.exists() else ""
            self._token_until = now_s + TOKEN_S
        return {"Authorization": f"Bearer {self._token}"} if self._token else {}


def _plural(kind: ResourceKind) -> str:
    return f"{kind.value.lower()}s"


def _refused(answer: httpx.Response) -> ApiServerError:
    try:
        found = answer.json()
    except ValueError:
        found = {"message": answer.text[:200]}
    return _error(answer.status_code, found)


def _error(status: int, document: Mapping[str, Any]) -> ApiServerError:
    kind = Expired if status == GONE else ApiServerError
    return kind(status, str(document.get("message", "no reason given"))[:1000])
