"""REST API of tenants and keys. Keys that open `read` list them; keys that open `admin`, and the admin token, change
them.

A key is only in the answer that creates it: the fleet keeps its digest."""

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, fields, replace
from typing import Annotated, Any, Final

from fastapi import APIRouter, Depends, Query, Response
from pydantic import Field

from glowplug.controllers.autoscaler.access import AccessRows, PutKey, PutTenant, RemoveTenant, RevokeKey
from glowplug.controllers.autoscaler.controller import AutoscalerController
from glowplug.domain.access import ApiKey, Priority, Role, Surface, Tenant, digest_of, find_key
from glowplug.domain.declared import OF_KUBERNETES
from glowplug.domain.errors import BadRequest, Conflict
from glowplug.runtime.control import ControlService
from glowplug.runtime.model_files import Seconds, Strict
from glowplug.runtime.new_key import new_key
from glowplug.runtime.rest import FindKey, admin
from glowplug.runtime.tenant_body import LimitsBody, TenantBody

MOST_KEYS: Final = 100_000
OfResource = Annotated[str, Query(pattern=f"^({OF_KUBERNETES}.*)?$", max_length=600)]
Surfaces = Annotated[list[Surface], Field(min_length=1, max_length=len(Surface))]
Names = Annotated[list[Annotated[str, Field(min_length=1, max_length=256)]], Field(min_length=1, max_length=256)]


class KeyBody(Strict):
    """The rights of a key; None leaves one unchanged."""

    name: str | None = Field(None, min_length=1, max_length=64)
    models: Names | None = None
    surfaces: Surfaces | None = None
    limits: LimitsBody | None = None
    priority: Priority | None = None
    expires: Seconds | None = Field(None, ge=0, description="seconds from now, or 30d, 12h; 0: never")

    def changed(self, key: ApiKey, now_s: float) -> ApiKey:
        """Raises BadRequest for an invalid name."""
        new: dict[str, Any] = self.model_dump(exclude_none=True, include={"name", "priority"})
        if self.models is not None:
            new["models"] = tuple(self.models)
        if self.surfaces is not None:
            new["surfaces"] = tuple(dict.fromkeys(self.surfaces))
        if self.limits is not None:
            new["limits"] = self.limits.to_limits()
        if self.expires is not None:
            new["expires_at"] = now_s + self.expires if self.expires else 0.0
        try:
            return replace(key, **new)
        except ValueError as error:
            raise BadRequest(str(error), param="name") from error


class NewKeyBody(KeyBody):
    """A new key: its tenant, name and rights."""

    tenant: str = Field(min_length=1, max_length=64)
    name: str = Field(min_length=1, max_length=64)


class DeclaredKey(Strict):
    """A key by its digest, with its rights."""

    name: str
    sha256: str
    models: Names
    surfaces: Surfaces
    limits: LimitsBody = LimitsBody()
    priority: Priority | None = None

    def to_key(self, key_id: str, **more: Any) -> ApiKey:
        """Raises BadRequest for an invalid id, digest or name."""
        given = {name: getattr(self, name) for name in ("name", "sha256", "priority")}
        given |= {"models": tuple(self.models), "surfaces": tuple(dict.fromkeys(self.surfaces))}
        try:
            return ApiKey(key_id=key_id, **given, limits=self.limits.to_limits(), **more)
        except ValueError as error:
            raise BadRequest(str(error)) from error


class KeptKeyBody(DeclaredKey):
    """A key as a backup has it. Times are epoch seconds, 0: never."""

    tenant: str
    created_at: float = Field(0.0, ge=0)
    expires_at: float = Field(0.0, ge=0)
    revoked_at: float = Field(0.0, ge=0)


class RotateBody(Strict):
    """How long the old key stays."""

    overlap: Seconds = Field(86_400.0, ge=0)


def finder(service: ControlService) -> FindKey:
    async def find(presented: str) -> ApiKey | None:
        return find_key(_rows(service).keys, presented, time.time())

    return find


def _rows(service: ControlService) -> AccessRows:
    return service.controller(AutoscalerController).access


def key_row(key: ApiKey, now_s: float) -> dict[str, Any]:
    shown = {field.name: getattr(key, field.name) for field in fields(key) if field.name != "sha256"}
    return shown | {"prefix": key.prefix, "limits": asdict(key.limits), "state": key.ended(now_s) or "active"}


def tenant_row(rows: AccessRows, tenant: Tenant, now_s: float) -> dict[str, Any]:
    return asdict(tenant) | {"num_keys": len(rows.keys_of(tenant.name, now_s))}


def routes(service: ControlService, token: str) -> APIRouter:
    find = finder(service)
    reading = APIRouter(tags=["access"], dependencies=[Depends(admin(token, least=Role.VIEWER, find=find))])
    changing = APIRouter(tags=["access"], dependencies=[Depends(admin(token, find=find))])
    _tenants(reading, changing, service)
    _keys(reading, changing, service)
    both = APIRouter()
    both.include_router(reading)
    both.include_router(changing)
    return both


def _tenants(reading: APIRouter, changing: APIRouter, service: ControlService) -> None:
    @reading.get("/v1/tenants")
    async def tenants() -> dict[str, Any]:
        """Every tenant, by name."""
        rows, now_s = _rows(service), time.time()
        return {
            "object": "list",
            "data": [tenant_row(rows, rows.tenants[name], now_s) for name in sorted(rows.tenants)],
        }

    @reading.get("/v1/tenants/{name}")
    async def tenant(name: str) -> dict[str, Any]:
        """One tenant."""
        rows = _rows(service)
        return tenant_row(rows, rows.tenant(name), time.time())

    @changing.put("/v1/tenants/{name}")
    async def put_tenant(name: str, body: TenantBody, source: OfResource = "") -> dict[str, Any]:
        """Create or change a tenant; an omitted field has its default. It changes only where it was declared:
        `source` names the custom resource that does."""
        await service.ask(PutTenant(body.to_tenant(name, source)))
        return await tenant(name)

    @changing.delete("/v1/tenants/{name}")
    async def remove_tenant(name: str, with_keys: bool = Query(False), source: OfResource = "") -> dict[str, Any]:
        """Remove a tenant; 409 while it has keys that are not over, unless they are to be revoked too."""
        await service.ask(RemoveTenant(name, with_keys=with_keys, source=source))
        return {"name": name, "deleted": True}


def _keys(reading: APIRouter, changing: APIRouter, service: ControlService) -> None:
    @reading.get("/v1/keys")
    async def keys() -> dict[str, Any]:
        """Every key, the newest first, without its secret."""
        now_s = time.time()
        found = sorted(_rows(service).keys.values(), key=lambda key: (-key.created_at, key.key_id))
        return {"object": "list", "data": [key_row(key, now_s) for key in found]}

    @reading.get("/v1/keys/{key_id}")
    async def key(key_id: str) -> dict[str, Any]:
        """One key, without its secret."""
        return key_row(_rows(service).key(key_id), time.time())

    @changing.post("/v1/keys", status_code=201)
    async def create_key(body: NewKeyBody, answer: Response) -> dict[str, Any]:
        """Create a key. `key` in the answer is shown only once."""
        return await made(answer, body.tenant, body.name, lambda blank: body.changed(blank, time.time()))

    @changing.put("/v1/keys/{key_id}")
    async def keep_key(key_id: str, body: KeptKeyBody) -> dict[str, Any]:
        """Declare a key by its digest, as a restored backup does; 409 where another key has the id. A key that is
        revoked stays so."""
        times = {"created_at": body.created_at, "expires_at": body.expires_at, "revoked_at": body.revoked_at}
        given, rows = body.to_key(key_id, tenant=body.tenant, **times), _rows(service).keys
        if (known := rows.get(key_id)) is not None and known.sha256 != given.sha256:
            raise Conflict(f"another key has the id {key_id!r}", param="key_id")
        if known is None:
            _check_room(rows)
        await service.ask(PutKey(given))
        return await key(key_id)

    @changing.patch("/v1/keys/{key_id}")
    async def change_key(key_id: str, body: KeyBody) -> dict[str, Any]:
        """Change a key's rights, or its end."""
        changed = body.changed(_rows(service).key(key_id), time.time())
        await service.ask(PutKey(replace(changed, source="")))  # a file's key is a Conflict
        return await key(key_id)

    @changing.delete("/v1/keys/{key_id}")
    async def revoke_key(key_id: str) -> dict[str, Any]:
        """Revoke a key: its next request is refused by every router."""
        await service.ask(RevokeKey(key_id))
        return await key(key_id)

    @changing.post("/v1/keys/{key_id}/rotate", status_code=201)
    async def rotate_key(key_id: str, answer: Response, body: RotateBody | None = None) -> dict[str, Any]:
        """Create a key with the rights of this one, which ends after the overlap."""
        old = _rows(service).key(key_id)
        if (how := old.ended(time.time())) or old.source:
            raise Conflict(f"{old.prefix} is {how or f'declared in the file {old.source}'}", param="key_id")
        row = await made(answer, old.tenant, old.name, lambda new: _with_rights_of(old, new))
        overlap_s = (body or RotateBody()).overlap
        await service.ask(RevokeKey(key_id, at=time.time() + overlap_s if overlap_s else 0.0))
        return row

    async def made(answer: Response, tenant: str, name: str, finish: Callable[[ApiKey], ApiKey]) -> dict[str, Any]:
        rows = _rows(service)
        _check_room(rows.keys)
        key_id, whole = new_key()
        while key_id in rows.keys:
            key_id, whole = new_key()
        try:
            blank = ApiKey(key_id=key_id, tenant=tenant, name=name, sha256=digest_of(whole))
        except ValueError as error:
            raise BadRequest(str(error), param="name") from error
        await service.ask(PutKey(finish(blank)))
        answer.headers["cache-control"] = "no-store"
        return await key(key_id) | {"key": whole}


def _check_room(keys: Mapping[str, ApiKey]) -> None:
    """Raises Conflict at the limit."""
    if len(keys) >= MOST_KEYS:
        raise Conflict(f"there are {len(keys)} keys already")


def _with_rights_of(old: ApiKey, new: ApiKey) -> ApiKey:
    return replace(
        new,
        models=old.models,
        surfaces=old.surfaces,
        limits=old.limits,
        priority=old.priority,
        expires_at=old.expires_at,
    )
