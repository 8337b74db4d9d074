"""Watch the files of tenants and their keys."""

from collections.abc import Collection, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError, field_validator

from glowplug.controllers.autoscaler.access import PutKey, PutTenant, RemoveTenant, RevokeKey
from glowplug.controllers.autoscaler.controller import AutoscalerController
from glowplug.domain.access import KEYS, TENANTS, ApiKey, Surface, Tenant
from glowplug.domain.errors import InvalidModelFile
from glowplug.runtime.model_files import first_fault, read_yaml
from glowplug.runtime.shell import Shell
from glowplug.runtime.tenant_body import TenantBody
from glowplug.services.autoscaler.access_api import DeclaredKey, Names, Surfaces
from glowplug.services.autoscaler.file_watch import POLL_S, READ_S, FileWatch

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
    """A key that no file declares any more is revoked; such a tenant is removed, and its keys are revoked. Both may
    change their files, and keys their tenants, in one look."""

    kind = "tenant file"

    def __init__(self, directory: Path | None, poll_s: float = POLL_S, timeout_s: float = READ_S) -> None:
        super().__init__(directory, poll_s, timeout_s)
        self._declared: dict[str, frozenset[tuple[str, str]]] = {}  # file -> its rows, as last read

    def load(self, path: Path) -> tuple[Tenant, list[ApiKey]]:
        return load(path)

    async def apply_all(
        self, shell: Shell, controller: AutoscalerController, read: Mapping[str, Any], present: Collection[str]
    ) -> set[str]:
        """Put tenants before keys, and end the undeclared last: a key that has moved is not revoked."""
        for source, (tenant, keys) in read.items():
            self._declared[source] = frozenset({(TENANTS, tenant.name), *((KEYS, key.key_id) for key in keys)})
        access, left = controller.access, set[str]()
        for source, (tenant, _) in read.items():
            was_of = self._left_by(TENANTS, access.tenants.get(tenant.name), tenant.name, present)
            if not await self.tell(shell, source, PutTenant(tenant, was_of)):
                left.add(source)
        for source in sorted(read.keys() - left):
            for key in read[source][1]:
                was_of = self._left_by(KEYS, access.keys.get(key.key_id), key.key_id, present)
                if not await self.tell(shell, source, PutKey(key, was_of)):
                    left.add(source)
        for key in list(access.keys.values()) if read else ():
            source = "" if key.revoked_at else self._left_by(KEYS, key, key.key_id, present)
            if source and not await self.tell(shell, source, RevokeKey(key.key_id, source)):
                left.add(source)
        for tenant in list(access.tenants.values()):
            source = self._left_by(TENANTS, tenant, tenant.name, present)
            if source and not await self.tell(shell, source, RemoveTenant(tenant.name, source, with_keys=True)):
                left.add(source)
        for source in read.keys() - left:
            self.errors.pop(source, None)
        return left

    def _left_by(self, table: str, row: Tenant | ApiKey | None, name: str, present: Collection[str]) -> str:
        """Return a row's file if it is gone, or declares the row no more as far as is known; else ""."""
        if row is None:
            return ""
        if row.source in present:
            declared = self._declared.get(row.source)
            return "" if declared is None or (table, name) in declared else row.source
        return row.source if self.is_ours(row.source) else ""

    def forget(self, name: str) -> None:
        super().forget(name)
        self._declared.pop(name, None)
