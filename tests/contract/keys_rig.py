"""Named keys, and the facts that tell a router about them."""

from typing import Any

from glowplug.domain.access import ApiKey, Tenant, digest_of
from glowplug.events import facts
from glowplug.services.router.keys import KeyRing
from tests import fleet_builder

KEY = "aaaaaaa1"


def secret_of(key_id: str = KEY) -> str:
    return f"gp-{key_id}-{'s' * 35}{key_id}"


def a_key(key_id: str = KEY, tenant: str = "acme", **over: Any) -> ApiKey:
    return ApiKey(**({"key_id": key_id, "tenant": tenant, "name": "k", "sha256": digest_of(secret_of(key_id))} | over))


def bearer(key_id: str = KEY) -> bytes:
    return f"authorization: Bearer {secret_of(key_id)}\r\n".encode()


def tell(ring: KeyRing, *given: Any, at: float = 0.0) -> None:
    for one in given:
        if isinstance(one, ApiKey):
            one = facts.KeyChanged(api_key=one)
        elif isinstance(one, Tenant):
            one = facts.TenantChanged(tenant=one)
        ring.take(fleet_builder.an_event(one, issuer="autoscaler-1", occurred_at=at))
