"""A container engine for the lane: the running one, else our own as root, ended with the tests."""

import os
import re
import shutil
import subprocess
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[2]
TAG = "test"
BASE = "python:3.11-slim-bookworm"
STAND_IN = "glowplug-test/python:3.11"
SERVERS = f"glowplug-test/servers:{TAG}"
START_S = 60.0
PULL_S = 60.0
BUILD_S = 1500.0
NEEDED_BYTES = 12 << 30


class NoEngine(RuntimeError):
    """No engine is available; the message is a skip reason."""


def run(*argv: str, timeout_s: float = 120.0, check: bool = True, **env: str) -> str:
    """Return stdout. RuntimeError has the end of the output on failure or timeout."""
    try:
        done = subprocess.run(
            argv, cwd=ROOT, env=os.environ | env, capture_output=True, text=True, timeout=timeout_s, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise RuntimeError(f"{' '.join(argv[:4])} took longer than {timeout_s:g} s") from error
    if check and done.returncode:
        raise RuntimeError(f"{' '.join(argv)}: exit {done.returncode}\n{done.stdout[-1500:]}{done.stderr[-3000:]}")
    return done.stdout


def answers() -> bool:
    try:
        return bool(run("docker", "info", "-f", "{{.ServerVersion}}", timeout_s=20.0).strip())
    except (RuntimeError, OSError):
        return False


@dataclass
class Engine:
    """`start` raises NoEngine. `stop` ends only what `start` launched."""

    folder: Path | None = None
    process: subprocess.Popen[bytes] | None = None
    compose: tuple[str, ...] = field(default=())

    def start(self) -> "Engine":
        if shutil.which("docker") is None:
            raise NoEngine("no docker command here (Debian: docker.io)")
        if not answers():
            self._start_daemon()
        self.compose = find_compose()
        return self

    def _start_daemon(self) -> None:
        if os.geteuid() != 0 or shutil.which("dockerd") is None:
            raise NoEngine("no container engine answers, and only root with dockerd could start one")
        self.folder = Path(tempfile.mkdtemp(prefix="gp-docker-"))
        if shutil.disk_usage(self.folder).free < NEEDED_BYTES:
            raise NoEngine(f"no container engine answers, and {self.folder} has too little space for one")
        socket = f"unix://{self.folder}/docker.sock"
        paths = [f"--{name}={self.folder / name}" for name in ("data-root", "exec-root")]
        with (self.folder / "log").open("wb") as log:
            self.process = subprocess.Popen(
                ["dockerd", "-H", socket, f"--pidfile={self.folder}/pid", *paths], stdout=log, stderr=log
            )
        os.environ["DOCKER_HOST"] = socket
        deadline = time.monotonic() + START_S
        while not answers():
            if self.process.poll() is not None or time.monotonic() > deadline:
                reason = (self.folder / "log").read_text(errors="replace").strip().rpartition("\n")[2][-300:]
                self.stop()
                raise NoEngine(f"dockerd does not start here: {reason}")
            time.sleep(0.2)
        if run("docker", "info", "-f", "{{.Driver}}").strip() == "vfs":
            self.stop()
            raise NoEngine("the container engine has no layered storage here, each layer would be a whole copy")

    def stop(self) -> None:
        if self.process is not None:
            os.environ.pop("DOCKER_HOST", None)
            self.process.terminate()
            try:
                self.process.wait(60)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
            self.process = None
        if self.folder is not None:
            # The daemon leaves its network namespace mounted, which prevents removal.
            run("umount", "-q", str(self.folder / "exec-root/netns/default"), check=False)
            subprocess.Popen(["rm", "-rf", self.folder], stderr=subprocess.DEVNULL, start_new_session=True)


def find_compose() -> tuple[str, ...]:
    """Find docker-compose 1.29, else docker's plug-in. Raises NoEngine."""
    for parts in (("docker-compose",), ("docker", "compose")):
        try:
            if re.search(r"\d+\.\d+", run(*parts, "version", timeout_s=30.0)):
                return parts
        except (RuntimeError, OSError):
            continue
    raise NoEngine("neither docker-compose nor docker compose is here (Debian: docker-compose)")


def has_image(tag: str) -> bool:
    return bool(run("docker", "images", "-q", tag).strip())


def base_image() -> str:
    """Find or pull the real base, else make a stand-in. Raises NoEngine."""
    if has_image(BASE):
        return BASE
    try:
        run("docker", "pull", "-q", BASE, timeout_s=PULL_S)
        return BASE
    except RuntimeError:
        if has_image(STAND_IN):
            return STAND_IN
    if os.geteuid() != 0 or not (shutil.which("mmdebstrap") or shutil.which("debootstrap")):
        raise NoEngine(f"{BASE} cannot be pulled, and only root with mmdebstrap or debootstrap can make a stand-in")
    try:
        run("sh", "tests/compose/base_image.sh", STAND_IN, timeout_s=600.0)
    except RuntimeError as error:
        raise NoEngine(f"no base image can be made here: {error}") from error
    return STAND_IN


def build_images(base: str) -> None:
    """Build ours by `make images`' own script, and stand-ins for third-party servers. Half of a build waits for
    packages: some run at a time, once the first has the common layers."""
    arguments = f"--network host --build-arg PYTHON_IMAGE={base}"

    def ours(*names: str) -> None:
        script = ("deploy/docker/images.sh", "build", *names)
        run("sh", *script, timeout_s=BUILD_S, VERSION=TAG, DOCKER_BUILD_ARGS=arguments)

    def others() -> None:
        servers = ("-f", "tests/compose/servers.Dockerfile", "-t", SERVERS, ".")
        run("docker", "build", "-q", *arguments.split(), *servers, timeout_s=BUILD_S)

    with ThreadPoolExecutor() as pool:
        building = [pool.submit(others)]
        ours("router")
        building += [pool.submit(ours, "agent-llamacpp", "sample-weights"), pool.submit(ours, "predictor", "agent")]
        building += [pool.submit(ours, "prefetcher", "placer", "autoscaler", "console")]
        for one in building:
            one.result()
