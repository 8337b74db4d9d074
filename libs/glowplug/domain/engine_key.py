"""Derive the key of an engine.

Routers and agents share a secret; rows and facts carry only the `key_id`, so no key crosses the bus, store or console.
"""

import base64
import hashlib
import hmac


def engine_key(secret: str, key_id: str) -> str:
    """Return the engine's key, or "" (none) if either is empty."""
    if not secret or not key_id:
        return ""
    digest = hmac.digest(secret.encode(), b"glowplug engine " + key_id.encode(), hashlib.sha256)
    return base64.urlsafe_b64encode(digest).rstrip(b"=").decode()
