"""Ids of commands and rows as names of files: whatever an id is, its files stay in the folder they belong to."""

import hashlib
import re

# The ids the control plane makes; a file system takes names of 255 bytes, of which a suffix needs some.
_SAFE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


def file_name(given: str) -> str:
    """`given` where it is safe as one name in a folder, else a digest of it."""
    if _SAFE.fullmatch(given):
        return given
    return f"id-{hashlib.sha256(given.encode('utf-8', 'surrogatepass')).hexdigest()[:32]}"
