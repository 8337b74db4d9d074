"""Make keys for the autoscaler, which shows each once, and for a person's file, which has its digest."""

import secrets
import string
from typing import Final

from glowplug.domain.access import prefix_of

_LETTERS: Final = string.ascii_lowercase + string.digits
_ID_LENGTH: Final = 8
_SECRET_BYTES: Final = 32


def new_key() -> tuple[str, str]:
    """(key id, whole key), random."""
    key_id = "".join(secrets.choice(_LETTERS) for _ in range(_ID_LENGTH))
    return key_id, f"{prefix_of(key_id)}-{secrets.token_urlsafe(_SECRET_BYTES)}"
