"""A disk of a few megabytes for tests to fill: a tmpfs, which only root can mount."""

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

BLOCK_BYTES = 64 << 10


class SmallDisk:
    def __init__(self, path: Path) -> None:
        self.path = path

    def fill(self) -> None:
        with (self.path / "ballast").open("ab", buffering=0) as ballast, contextlib.suppress(OSError):
            while True:
                ballast.write(b"\0" * BLOCK_BYTES)

    def free(self) -> None:
        (self.path / "ballast").unlink(missing_ok=True)


@contextlib.contextmanager
def small_disk(path: Path, num_mib: int) -> Iterator[SmallDisk]:
    if os.geteuid() != 0:
        pytest.skip("only root can mount a small disk (tmpfs)")
    path.mkdir(parents=True)
    options = ["-t", "tmpfs", "-o", f"size={num_mib}m,mode=0700", "tmpfs", str(path)]
    done = subprocess.run(["mount", *options], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"this machine does not mount a tmpfs: {done.stderr.strip()}")
    try:
        yield SmallDisk(path)
    finally:
        subprocess.run(["umount", "--lazy", str(path)], check=False)
