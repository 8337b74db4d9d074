"""The key that one engine requires. Routers and agents share a secret; rows and facts carry only the `key_id`, which is
useless without it, so that no key passes the bus, the store or the console."""

import base64
import hashlib
import hmac


def engine_key(secret: str, key_id: str) -> str:
    """The key of the engine with that `key_id`; "" (no key) where either is empty."""
    if not secret or not key_id:
        return ""
    digest = hmac.digest(secret.encode(), b"glowplug engine " + key_id.encode(), hashlib.sha256)
    return base64.urlsafe_b64encode(digest).rstrip(b"=").decode()
