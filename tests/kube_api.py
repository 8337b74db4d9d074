"""A stand-in for Kubernetes' API server, sufficient for the operator and `kubectl`.

Objects with resourceVersion, generation, uid, finalizers and deletionTimestamp; paged lists, watches (410 once changes
are forgotten), merge patches, server-side apply, the subresources status and scale, printer columns as a Table,
conflicts. Custom resources of deploy/helm/glowplug/crds are validated by their schemas, but CEL rules are not
evaluated.

python -m tests.kube_api 8001     # then: kubectl --server http://127.0.0.1:8001 get models
"""

import asyncio
import copy
import json
import sys
import threading
import uuid
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import jsonschema
import uvicorn
import yaml
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from glowplug.runtime.custom_resources import GROUP, definitions
from glowplug.runtime.service import listen

Document = dict[str, Any]
BUILT_IN = {("events.k8s.io/v1", "events"): "Event", ("coordination.k8s.io/v1", "leases"): "Lease"}
BUILT_IN |= {("v1", "namespaces"): "Namespace", ("v1", "events"): "Event"}


class Refused(Exception):
    def __init__(self, status: int, reason: str, message: str) -> None:
        super().__init__(message)
        self.status, self.reason = status, reason

    def document(self) -> Document:
        said = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "message": str(self)}
        return {**said, "reason": self.reason, "code": self.status}


@dataclass(frozen=True)
class Kind:
    group_version: str
    plural: str
    name: str
    crd: Document | None = None

    @property
    def version(self) -> Document:
        assert self.crd is not None
        found: Document = self.crd["spec"]["versions"][0]
        return found


def kinds() -> dict[tuple[str, str], Kind]:
    found = {key: Kind(*key, name) for key, name in BUILT_IN.items()}
    for crd in definitions().values():
        names, version = crd["spec"]["names"], crd["spec"]["versions"][0]["name"]
        key = (f"{GROUP}/{version}", names["plural"])
        found[key] = Kind(*key, names["kind"], crd)
    return found


@dataclass
class KubeApi:
    """`down`: every call is refused, as during a restart."""

    objects: dict[tuple[str, str, str], Document] = field(default_factory=dict)  # (plural, namespace, name)
    log: list[tuple[int, str, str, Document]] = field(default_factory=list)  # (version, plural, change, object)
    forgotten: int = 0  # changes up to this version are gone
    version: int = 100
    writes: list[tuple[str, str]] = field(default_factory=list)  # (method, path) of each change
    refuse_next: list[Refused] = field(default_factory=list)  # refusals of the next writes
    down: bool = False
    num_expired: int = 0  # watches that got 410
    lock: Any = field(default_factory=threading.RLock)  # of changes, by tests and by clients
    url: str = ""
    kinds: dict[tuple[str, str], Kind] = field(default_factory=kinds)

    def get(self, plural: str, name: str, namespace: str = "default") -> Document:
        return self.objects[plural, namespace, name]

    def status(self, plural: str, name: str) -> Document:
        found: Document = self.get(plural, name).get("status", {})
        return found

    def conditions(self, plural: str, name: str) -> dict[str, str]:
        """Type -> reason, `!reason` of a false condition."""
        rows = self.status(plural, name).get("conditions", ())
        return {one["type"]: ("" if one["status"] == "True" else "!") + one["reason"] for one in rows}

    def events(self) -> list[tuple[str, str]]:
        return [(o["reason"], o["note"]) for (plural, _, _), o in self.objects.items() if plural == "events"]

    def declare(self, kind: str, name: str, **spec: Any) -> Document:
        document = {"apiVersion": f"{GROUP}/v1alpha1", "kind": kind, "metadata": {"name": name}, "spec": spec}
        with self.lock:
            return self.apply(self.kinds[f"{GROUP}/v1alpha1", f"{kind.lower()}s"], "default", name, document, "kubectl")

    def remove(self, kind: str, name: str) -> None:
        """It stays while it has finalizers."""
        with self.lock:
            self.delete(self.kinds[f"{GROUP}/v1alpha1", f"{kind.lower()}s"], "default", name)

    def forget(self, *changes: Callable[[], Any]) -> None:
        """A watch that has not seen these changes gets 410."""
        with self.lock:
            for change in changes:
                change()
            self.forgotten, self.log = self.version, []

    def put(self, kind: Kind, found: Document, change: str) -> Document:
        """Store under a new version; remove a deleted one without finalizers."""
        self.version += 1
        meta = found["metadata"]
        meta["resourceVersion"] = str(self.version)
        key = (kind.plural, meta.get("namespace", ""), meta["name"])
        if meta.get("deletionTimestamp") and not meta.get("finalizers"):
            self.objects.pop(key, None)
            change = "DELETED"
        else:
            self.objects[key] = found
        self.log.append((self.version, kind.plural, change, copy.deepcopy(found)))
        return found

    def check(self, kind: Kind, found: Document) -> None:
        if kind.crd is None:
            return
        try:
            jsonschema.validate(found, _checked(kind.version["schema"]["openAPIV3Schema"]))
        except jsonschema.ValidationError as error:
            where = ".".join(str(part) for part in error.absolute_path)
            raise Refused(
                422, "Invalid", f'{kind.name} "{found["metadata"]["name"]}": {where}: {error.message}'
            ) from error

    def create(self, kind: Kind, namespace: str, given: Document) -> Document:
        name = given["metadata"]["name"]
        if (kind.plural, namespace, name) in self.objects:
            raise Refused(409, "AlreadyExists", f'{kind.plural} "{name}" already exists')
        found = copy.deepcopy(given)
        meta = found["metadata"]
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        meta |= {"uid": str(uuid.uuid4()), "generation": 1, "creationTimestamp": now}
        meta |= {"namespace": namespace} if namespace else {}
        found |= {"apiVersion": kind.group_version, "kind": kind.name}
        if kind.crd:
            found.pop("status", None)
        self.check(kind, found)
        return self.put(kind, found, "ADDED")

    def change(self, kind: Kind, old: Document, new: Document, part: str = "") -> Document:
        meta, was = new["metadata"], old["metadata"]
        if meta.get("resourceVersion", was["resourceVersion"]) != was["resourceVersion"]:
            raise Refused(409, "Conflict", "the object has been modified; apply your changes to the latest version")
        if meta.get("uid", was["uid"]) != was["uid"]:
            raise Refused(409, "Conflict", f"Precondition failed: UID in precondition: {meta['uid']}")
        kept = copy.deepcopy(old)
        if part == "status":
            kept["status"] = copy.deepcopy(new.get("status", {}))
            kept["metadata"]["managedFields"] = meta.get("managedFields", [])
        else:
            kept = {**copy.deepcopy(new), **({"status": old["status"]} if kind.crd and "status" in old else {})}
            fixed = {name: was[name] for name in ("uid", "creationTimestamp", "generation") if name in was}
            fixed |= {"deletionTimestamp": was["deletionTimestamp"]} if "deletionTimestamp" in was else {}
            kept["metadata"] = {**kept["metadata"], **fixed}
            kept["metadata"]["generation"] += kept.get("spec") != old.get("spec")
        self.check(kind, kept)
        before, after = ({**one, "metadata": {**one["metadata"], "resourceVersion": ""}} for one in (old, kept))
        return old if before == after else self.put(kind, kept, "MODIFIED")

    def apply(self, kind: Kind, namespace: str, name: str, given: Document, manager: str, part: str = "") -> Document:
        """Server-side apply: `manager` owns the given fields; its former ones that are missing are removed."""
        old = self.objects.get((kind.plural, namespace, name))
        if old is None:
            if part:
                raise Refused(404, "NotFound", f'{kind.plural} "{name}" not found')
            if "uid" in given["metadata"]:
                raise Refused(409, "Conflict", "uid mismatch: no existing object was found")
            old = self.create(kind, namespace, {**given, "metadata": {"name": name}})
        new = copy.deepcopy(old)
        owners = {(one["manager"], one["part"]): one for one in new["metadata"].get("managedFields", [])}
        owned = sorted(
            _leaves({name: value for name, value in given.items() if name in ("metadata", "spec", "status")})
        )
        owned = [
            path
            for path in owned
            if path[:2] not in {("metadata", "name"), ("metadata", "namespace"), ("metadata", "uid")}
        ]
        before = owners.get((manager, part), {"fields": []})["fields"]
        others = {tuple(path) for key, one in owners.items() if key != (manager, part) for path in one["fields"]}
        for path in map(tuple, before):
            if path not in owned and path not in others:
                _remove(new, path)
        for path in owned:
            _set(new, path, _at(given, path))
        owners[manager, part] = {"manager": manager, "part": part, "fields": [list(path) for path in owned]}
        new["metadata"]["managedFields"] = list(owners.values())
        new["metadata"]["resourceVersion"] = given["metadata"].get(
            "resourceVersion", old["metadata"]["resourceVersion"]
        )
        new["metadata"]["uid"] = given["metadata"].get("uid", old["metadata"]["uid"])
        return self.change(kind, old, new, part)

    def delete(self, kind: Kind, namespace: str, name: str) -> Document:
        found = copy.deepcopy(self._found(kind, namespace, name))
        found["metadata"].setdefault("deletionTimestamp", datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"))
        return self.put(kind, found, "MODIFIED")

    def _found(self, kind: Kind, namespace: str, name: str) -> Document:
        try:
            return self.objects[kind.plural, namespace, name]
        except KeyError:
            raise Refused(
                404, "NotFound", f'{kind.plural}.{kind.group_version.partition("/")[0]} "{name}" not found'
            ) from None

    def app(self) -> Starlette:
        return Starlette(
            routes=[Route("/{path:path}", self._answer, methods=["GET", "POST", "PUT", "PATCH", "DELETE"])]
        )

    async def _answer(self, request: Request) -> Response:
        try:
            if self.down:
                raise Refused(503, "ServiceUnavailable", "the API server shuts down")
            found = self._discovered(request.url.path)
            return JSONResponse(found) if found is not None else await self._resources(request)
        except Refused as error:
            return JSONResponse(error.document(), error.status)

    def _discovered(self, path: str) -> Document | None:
        if path == "/version":
            return {"major": "1", "minor": "36", "gitVersion": "v1.36.0"}
        if path == "/api":
            return {"kind": "APIVersions", "versions": ["v1"]}
        groups = sorted({gv for gv, _ in self.kinds if "/" in gv})
        if path == "/apis":
            rows = []
            for gv in groups:
                group, _, version = gv.partition("/")
                one = {"groupVersion": gv, "version": version}
                rows.append({"name": group, "versions": [one], "preferredVersion": one})
            return {"kind": "APIGroupList", "apiVersion": "v1", "groups": rows}
        gv = path.removeprefix("/apis/").removeprefix("/api/")
        if gv not in (*groups, "v1"):
            return None
        verbs = ["create", "delete", "get", "list", "patch", "update", "watch"]
        rows = []
        for (own, plural), kind in self.kinds.items():
            if own == gv:
                base: Document = {"namespaced": plural != "namespaces", "kind": kind.name, "verbs": verbs}
                names = {"singularName": kind.name.lower(), "categories": ["glowplug"] if kind.crd else []}
                rows.append({"name": plural, **names, **base})
                for part in kind.version["subresources"] if kind.crd else ():
                    of_scale = {"group": "autoscaling", "version": "v1", "kind": "Scale"} if part == "scale" else {}
                    rows.append({"name": f"{plural}/{part}", "singularName": "", **base, **of_scale})
        return {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": gv, "resources": rows}

    def _place(self, path: str) -> tuple[Kind, str, str, str]:
        parts = path.strip("/").split("/")
        gv, rest = (
            ("/".join(parts[1:3]), parts[3:]) if parts[0] == "apis" else (parts[1] if parts[1:] else "", parts[2:])
        )
        namespace = ""
        if rest[:1] == ["namespaces"] and len(rest) > 2:
            namespace, rest = rest[1], rest[2:]
        kind = self.kinds.get((gv, rest[0] if rest else ""))
        if kind is None:
            raise Refused(404, "NotFound", "the server could not find the requested resource")
        return kind, namespace, rest[1] if rest[1:] else "", rest[2] if rest[2:] else ""

    async def _resources(self, request: Request) -> Response:
        kind, namespace, name, part = self._place(request.url.path)
        query = request.query_params
        if request.method == "GET" and not name:
            if query.get("watch") in ("1", "true"):
                return self._watched(kind, namespace, query)
            return JSONResponse(self._listed(kind, namespace, query, request.headers.get("accept", "")))
        if request.method == "GET":
            found = self._found(kind, namespace, name)
            found = self._scale(kind, found) if part == "scale" else found
            return JSONResponse(self._shown(kind, [found], request.headers.get("accept", "")) or found)
        if self.refuse_next:
            raise self.refuse_next.pop(0)
        body = await request.body()
        given: Document = yaml.safe_load(body) if body else {}
        before = self.version
        with self.lock:
            found = self._written(request, kind, namespace, name, part, given)
        if self.version != before:
            self.writes.append((request.method, request.url.path))
        return JSONResponse(found, 201 if request.method == "POST" else 200)

    def _written(self, request: Request, kind: Kind, namespace: str, name: str, part: str, given: Document) -> Document:
        if request.method == "POST":
            return self.create(kind, namespace, given)
        if request.method == "DELETE":
            return self.delete(kind, namespace, name)
        content = request.headers.get("content-type", "")
        if request.method == "PATCH" and content.startswith("application/apply-patch"):
            return self.apply(kind, namespace, name, given, request.query_params["fieldManager"], part)
        old = self._found(kind, namespace, name)
        new = given if request.method == "PUT" else _merged(copy.deepcopy(old), given)
        if part == "scale":
            new = copy.deepcopy(old)
            new["spec"]["min_instances"] = given["spec"]["replicas"]
            return self._scale(kind, self.change(kind, old, new))
        return self.change(kind, old, new, part)

    def _scale(self, kind: Kind, found: Document) -> Document:
        meta = {name: found["metadata"][name] for name in ("name", "namespace", "uid", "resourceVersion")}
        status = found.get("status", {})
        return {
            "kind": "Scale",
            "apiVersion": "autoscaling/v1",
            "metadata": meta,
            "spec": {"replicas": found["spec"].get("min_instances", 0)},
            "status": {"replicas": status.get("replicas", 0), "selector": status.get("selector", "")},
        }

    def _listed(self, kind: Kind, namespace: str, query: Mapping[str, str], accept: str) -> Document:
        rows = [
            found
            for (plural, where, _), found in sorted(self.objects.items())
            if plural == kind.plural and namespace in ("", where)
        ]
        selected = query.get("fieldSelector", "")
        if selected.startswith("metadata.name="):
            rows = [one for one in rows if one["metadata"]["name"] == selected.partition("=")[2]]
        if kind.group_version == "v1" and kind.plural == "events":
            about = selected.partition("involvedObject.name=")[2].partition(",")[0]
            rows = [_as_core(one) for one in rows if one["regarding"]["name"] == about]
        begin, limit = int(query.get("continue") or 0), int(query.get("limit") or 0)
        page = rows[begin : begin + limit] if limit else rows
        meta: Document = {"resourceVersion": str(self.version)}
        if limit and begin + limit < len(rows):
            meta["continue"] = str(begin + limit)
        if (table := self._shown(kind, page, accept)) is not None:
            return {**table, "metadata": meta}
        return {"kind": f"{kind.name}List", "apiVersion": kind.group_version, "metadata": meta, "items": page}

    def _shown(self, kind: Kind, rows: list[Document], accept: str) -> Document | None:
        if "as=Table" not in accept or kind.crd is None:
            return None
        columns = kind.version["additionalPrinterColumns"]
        head = [{"name": "Name", "type": "string", "format": "name", "priority": 0}]
        head += [{"format": "", "priority": 0, **{k: v for k, v in one.items() if k != "jsonPath"}} for one in columns]
        cells = []
        for row in rows:
            values = [_cell(row, one) for one in columns]
            cells.append(
                {
                    "cells": [row["metadata"]["name"], *values],
                    "object": {
                        "kind": "PartialObjectMetadata",
                        "apiVersion": "meta.k8s.io/v1",
                        "metadata": row["metadata"],
                    },
                }
            )
        return {"kind": "Table", "apiVersion": "meta.k8s.io/v1", "columnDefinitions": head, "rows": cells}

    def _expired(self) -> Refused:
        self.num_expired += 1
        return Refused(410, "Expired", "too old resource version")

    def _watched(self, kind: Kind, namespace: str, query: Mapping[str, str]) -> Response:
        if "sendInitialEvents" in query:
            raise Refused(422, "Invalid", "sendInitialEvents: Forbidden: lists are not streamed here")
        since = int(query.get("resourceVersion") or 0)
        if since < self.forgotten:
            raise self._expired()
        until = asyncio.get_running_loop().time() + float(query.get("timeoutSeconds") or 300)

        async def lines() -> AsyncIterator[bytes]:
            at = since
            while not self.down and asyncio.get_running_loop().time() < until:
                with self.lock:
                    fresh = [one for one in self.log if one[0] > at]
                    is_late = at < self.forgotten
                if is_late:
                    gone = self._expired().document()
                    yield json.dumps({"type": "ERROR", "object": gone}).encode() + b"\n"
                    return
                for version, plural, change, found in fresh:
                    at = version
                    if plural == kind.plural and namespace in ("", found["metadata"].get("namespace", "")):
                        yield json.dumps({"type": change, "object": found}).encode() + b"\n"
                await asyncio.sleep(0.02)

        return StreamingResponse(lines(), media_type="application/json")


def _as_core(event: Document) -> Document:
    """Show it in the older API's form, for `kubectl describe`."""
    seen = dict.fromkeys(("firstTimestamp", "lastTimestamp"), event["eventTime"][:19] + "Z")
    shown = {**event, **seen, "apiVersion": "v1", "involvedObject": event["regarding"], "message": event["note"]}
    return {**shown, "source": {"component": event["reportingController"]}, "count": 1}


def _checked(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_checked(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    made = {name: _checked(one) for name, one in schema.items() if not name.startswith("x-kubernetes")}
    if schema.get("x-kubernetes-int-or-string"):
        made["type"] = ["integer", "string"]
    return made


def _leaves(found: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Lists are owned whole, but finalizers and conditions by element."""
    if path == ("metadata", "finalizers"):
        yield from ((*path, f"={one}") for one in found)
    elif path == ("status", "conditions"):
        yield from ((*path, f"type={one['type']}") for one in found)
    elif isinstance(found, dict) and found:
        for name, value in found.items():
            yield from _leaves(value, (*path, name))
    elif path:
        yield path


def _at(found: Any, path: tuple[str, ...]) -> Any:
    for name in path:
        if name.startswith("="):
            return name[1:]
        is_row = name.startswith("type=")
        found = next(one for one in found if one["type"] == name[5:]) if is_row else found[name]
    return found


def _set(found: Document, path: tuple[str, ...], value: Any) -> None:
    for name in path[:-2]:
        found = found.setdefault(name, {})
    last = path[-1]
    if last.startswith(("=", "type=")):
        rows = found.setdefault(path[-2], [])
        same = [k for k, one in enumerate(rows) if one == value or (last[0] != "=" and one["type"] == last[5:])]
        if same:
            rows[same[0]] = value
        else:
            rows.append(value)
        return
    if len(path) > 1:
        found = found.setdefault(path[-2], {})
    found[last] = copy.deepcopy(value)


def _remove(found: Document, path: tuple[str, ...]) -> None:
    for name in path[:-2] if path[-1].startswith(("=", "type=")) else path[:-1]:
        found = found.get(name, {})
    last = path[-1]
    if last.startswith(("=", "type=")):
        rows = found.get(path[-2], [])
        found[path[-2]] = [one for one in rows if (one != last[1:] if last[0] == "=" else one["type"] != last[5:])]
    else:
        found.pop(last, None)


def _merged(found: Any, patch: Any) -> Any:
    """A JSON merge patch (RFC 7386)."""
    if not isinstance(patch, dict):
        return patch
    found = found if isinstance(found, dict) else {}
    for name, value in patch.items():
        if value is None:
            found.pop(name, None)
        else:
            found[name] = _merged(found.get(name), value)
    return found


def _cell(row: Document, column: Document) -> Any:
    path = column["jsonPath"].lstrip(".")
    if "[?(" in path:
        wanted, last = path.partition('=="')[2].partition('"')[0], path.rpartition(".")[2]
        rows = row.get("status", {}).get("conditions", ())
        return next((one[last] for one in rows if one["type"] == wanted), "")
    found: Any = row
    for name in path.split("."):
        found = found.get(name, "") if isinstance(found, dict) else ""
    if column["type"] == "date" and found:
        age_s = (datetime.now(UTC) - datetime.fromisoformat(found)).total_seconds()
        return f"{age_s:.0f}s" if age_s < 120 else f"{age_s / 60:.0f}m"
    return found


@contextmanager
def serving(port: int = 0) -> Iterator[KubeApi]:
    api, sock = KubeApi(), listen("127.0.0.1", port)
    api.url = f"http://127.0.0.1:{sock.getsockname()[1]}"
    config = uvicorn.Config(api.app(), log_config=None, access_log=False, lifespan="off", timeout_graceful_shutdown=1)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=lambda: asyncio.run(server._serve([sock])), daemon=True)
    thread.start()
    try:
        yield api
    finally:
        server.should_exit = True
        thread.join(10)


if __name__ == "__main__":
    with serving(int(sys.argv[1])) as standing:
        print(standing.url, flush=True)
        threading.Event().wait()
