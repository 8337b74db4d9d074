"""A copy on this router's disk, replaced whole or not at all."""

from pathlib import Path


def replace_file(path: Path, content: bytes) -> None:
    """Write a file readable by this user only. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.touch(mode=0o600)
    part.write_bytes(content)
    part.replace(path)
