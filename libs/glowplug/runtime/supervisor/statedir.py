"""Manage the state directory: its holder, secrets, and fleet.json with the addresses."""

import contextlib
import errno
import fcntl
import json
import os
import secrets
import shutil
import stat
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from glowplug.runtime.errors import AlreadyRunning, CannotStart

FLEET_FILE, LOCK_FILE, SECRETS_FILE = "fleet.json", "lock", "secrets.json"
_TOKEN_BYTES = 24
OTHERS = 0o077  # mode bits of group and others


@dataclass(frozen=True, slots=True)
class Secrets:
    """Made once per directory. `passwords`: by user of runtime/privileges.py."""

    admin_token: str
    api_key: str
    passwords: Mapping[str, str]
    engine_secret: str = ""  # source of engine keys, for routers and agents


class StateDir:
    """Makes the directory of one fleet; `lock` before writing."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock_fd = -1

    def lock(self, min_free_bytes: int = 0) -> None:
        """Raises AlreadyRunning naming the holder, CannotStart if unusable."""
        try:
            self.path.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._make_private()
            fd = os.open(self.path / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise CannotStart(f"cannot use state directory {self.path}: {error.strerror}") from error
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(fd)
            if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                raise CannotStart(f"cannot lock {self.path}: {error.strerror}") from error
            raise AlreadyRunning(self._holder()) from error
        self._lock_fd = fd
        self._check_room(min_free_bytes)
        with disk_errors(self.path):
            os.ftruncate(fd, 0)
            os.pwrite(fd, json.dumps({"pid": os.getpid(), "since": time.time()}).encode(), 0)

    def _make_private(self) -> None:
        """Restrict directory and secrets to the owner. Raises CannotStart if it is another user's or holds other
        things."""
        found = self.path.stat()
        if found.st_uid != os.geteuid():
            raise CannotStart(f"{self.path} belongs to another user: choose another place with --state-dir")
        if stat.S_IMODE(found.st_mode) & OTHERS:
            names = {entry.name for entry in os.scandir(self.path)}
            if names and LOCK_FILE not in names:
                raise CannotStart(
                    f"{self.path} can be read by others and holds files that are not a fleet's: "
                    f"chmod 700 {self.path}, or choose another place with --state-dir (GLOWPLUG_STATE_DIR)"
                )
            self.path.chmod(0o700)
        for name in (SECRETS_FILE, FLEET_FILE):
            with contextlib.suppress(FileNotFoundError):
                (self.path / name).chmod(0o600)

    def _holder(self) -> str:
        pid = "?"
        with contextlib.suppress(OSError, ValueError):
            pid = json.loads((self.path / LOCK_FILE).read_text())["pid"]
        return f"a fleet already runs in {self.path} (pid {pid}): `glowplug down` stops it, --state-dir starts another"

    def _check_room(self, min_free_bytes: int) -> None:
        free = shutil.disk_usage(self.path).free
        if free < min_free_bytes:
            raise CannotStart(
                f"{self.path} has {free >> 20} MiB free and the fleet needs {min_free_bytes >> 20} MiB: "
                "make room or choose another place with --state-dir (GLOWPLUG_STATE_DIR)"
            )

    def unlock(self) -> None:
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1

    def directory(self, name: str) -> Path:
        path = self.path / name
        with disk_errors(path):
            path.mkdir(parents=True, exist_ok=True, mode=0o700)
            path.chmod(0o700)
        return path

    def secrets(self, *, admin_token: str = "", api_key: str = "", engine_secret: str = "") -> Secrets:
        """Make secrets at first use; given ones win, unwritten."""
        from glowplug.runtime.privileges import USERS  # here: commands that only look for a fleet skip it

        path = self.path / SECRETS_FILE
        kept: dict[str, Any] = {}
        with contextlib.suppress(FileNotFoundError, ValueError):
            kept = json.loads(path.read_text())
        made: dict[str, Any] = {
            "admin_token": kept.get("admin_token") or f"gpa-{secrets.token_urlsafe(_TOKEN_BYTES)}",
            "api_key": kept.get("api_key") or f"gp-{secrets.token_urlsafe(_TOKEN_BYTES)}",
            "passwords": {
                user: kept.get("passwords", {}).get(user) or f"gps-{secrets.token_hex(_TOKEN_BYTES)}" for user in USERS
            },
            "engine_secret": kept.get("engine_secret") or secrets.token_hex(_TOKEN_BYTES),
        }
        if made != kept:
            write_private(path, made)
        return Secrets(
            admin_token=admin_token or made["admin_token"],
            api_key=api_key or made["api_key"],
            passwords=made["passwords"],
            engine_secret=engine_secret or made["engine_secret"],
        )

    def write_fleet(self, fleet: Mapping[str, Any]) -> None:
        write_private(self.path / FLEET_FILE, fleet)

    def remove_fleet(self) -> None:
        (self.path / FLEET_FILE).unlink(missing_ok=True)


def read_fleet(path: Path) -> dict[str, Any] | None:
    """Contents of fleet.json, or None without a living fleet."""
    try:
        fleet: dict[str, Any] = json.loads((path / FLEET_FILE).read_text())
        process = psutil.Process(fleet["pid"])
        alive = abs(process.create_time() - fleet["pid_started_at"]) < 1 and process.status() != psutil.STATUS_ZOMBIE
    except (OSError, ValueError, KeyError, TypeError, psutil.Error):
        return None
    return fleet if alive else None


def write_private(path: Path, value: Mapping[str, Any]) -> None:
    """Write JSON atomically, readable by the owner only."""
    with disk_errors(path):
        fd, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")  # made 0600
        try:
            with os.fdopen(fd, "w") as file:
                json.dump(value, file, indent=1)
            Path(temporary).replace(path)
        except OSError:
            Path(temporary).unlink(missing_ok=True)
            raise


@contextlib.contextmanager
def disk_errors(path: Path) -> Any:
    try:
        yield
    except OSError as error:
        hint = ": the disk is full" if error.errno in (errno.ENOSPC, errno.EDQUOT) else f": {error.strerror}"
        raise CannotStart(
            f"cannot write {path}{hint}; --state-dir (GLOWPLUG_STATE_DIR) chooses another place"
        ) from error
