"""Watch the files of tenants and their keys."""

from collections.abc import Collection
from datetime import datetime
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError, field_validator

from glowplug.controllers.autoscaler.access import PutKey, PutTenant, RemoveTenant, RevokeKey
from glowplug.controllers.autoscaler.controller import AutoscalerController
from glowplug.domain.access import ApiKey, Surface, Tenant
from glowplug.domain.errors import InvalidModelFile
from glowplug.runtime.model_files import first_fault, read_yaml
from glowplug.runtime.shell import Shell
from glowplug.runtime.tenant_body import TenantBody
from glowplug.services.autoscaler.access_api import DeclaredKey, Names, Surfaces
from glowplug.services.autoscaler.file_watch import FileWatch

MAX_FILE_BYTES = 8 << 20


class KeyFile(DeclaredKey):
    """A key of a tenant's file: its id and digest as `glowplug keys hash` prints them, and its rights."""

    id: str
    models: Names = Field(default_factory=lambda: ["*"])
    surfaces: Surfaces = Field(default_factory=lambda: [Surface.DATA])
    expires_at: datetime | float = Field(0.0, description="a date with its zone, or epoch seconds; 0: never")

    @field_validator("sha256")
    @classmethod
    def _small(cls, digest: str) -> str:
        return digest.lower()

    def of(self, tenant: Tenant) -> ApiKey:
        """Raises BadRequest for an invalid id, digest or name."""
        end = self.expires_at
        ends_at = end.timestamp() if isinstance(end, datetime) else end
        return self.to_key(self.id, tenant=tenant.name, expires_at=ends_at, source=tenant.source)


class TenantFile(TenantBody):
    """One tenant with its keys, as its owner writes it."""

    tenant: str
    keys: list[KeyFile] = Field(default_factory=list, max_length=100_000)


def load(path: Path) -> tuple[Tenant, list[ApiKey]]:
    """Raises InvalidModelFile with the first wrong field, BadRequest for an invalid name, id or digest."""
    documents = read_yaml(path, MAX_FILE_BYTES)
    if len(documents) != 1:
        raise InvalidModelFile(f"a file declares one tenant, not {len(documents)}")
    try:
        file = TenantFile.model_validate(documents[0])
    except ValidationError as error:
        raise first_fault(error) from error
    tenant = file.to_tenant(file.tenant, str(path))
    keys = [key.of(tenant) for key in file.keys]
    if len({key.key_id for key in keys}) < len(keys):
        raise InvalidModelFile("keys: an id appears twice")
    return tenant, keys


class AccessWatch(FileWatch):
    """A key missing in its file is revoked; a tenant without its file is removed, and its keys are revoked."""

    kind = "tenant file"

    def load(self, path: Path) -> tuple[Tenant, list[ApiKey]]:
        return load(path)

    async def apply(
        self, shell: Shell, controller: AutoscalerController, path: Path, declared: Any, present: Collection[str]
    ) -> bool:
        source = str(path)
        tenant: Tenant
        keys: list[ApiKey]
        tenant, keys = declared
        rows = controller.access
        known = rows.tenants.get(tenant.name)
        if known is not None and known.source != source and known.source in present:
            self.keep_out(path, f"tenant: {tenant.name!r} comes from {Path(known.source).name} already")
            return False
        done = await self.tell(shell, source, PutTenant(tenant))
        for name in [t.name for t in rows.tenants.values() if t.source == source and t.name != tenant.name]:
            done &= await self._remove(shell, source, name)
        for key in keys:
            done &= await self.tell(shell, source, PutKey(key))
        ids = {key.key_id for key in keys}
        for key_id in [k.key_id for k in rows.keys.values() if k.source == source and k.key_id not in ids]:
            done &= await self.tell(shell, source, RevokeKey(key_id, source))
        if done:
            self.errors.pop(source, None)
        return done

    async def gone(self, shell: Shell, controller: AutoscalerController, present: Collection[str]) -> set[str]:
        for tenant in list(controller.access.tenants.values()):
            if self.is_ours(tenant.source) and tenant.source not in present:
                await self._remove(shell, tenant.source, tenant.name)
        return set()

    async def _remove(self, shell: Shell, source: str, name: str) -> bool:
        return await self.tell(shell, source, RemoveTenant(name, source, with_keys=True))
