"""One page's commands in their own folder: one shell, with its own ports and state."""

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from glowplug.runtime.supervisor.probe import free_block
from tests.house.tree import files
from tests.howto.blocks import ROOT, Block, Page, expected, shows
from tests.waiting import WAIT_S

BLOCK_S = 300.0
POLL_S = 0.02
NUM_PORTS = 60
MARK = "_HOWTO_SANDBOX"
_ADDRESS = re.compile(r"\b((?:127\.0\.0\.1|localhost|\[::1\]):|GLOWPLUG_(?:DATA_)?PORT=)8(\d{3})\b")


class PageFailed(AssertionError):
    """A block failed; the message has page, line and output."""


@dataclass
class Sandbox:
    folder: Path
    state: Path  # of the fleet under its commands
    port_base: int
    _shell: subprocess.Popen[str]
    _count: int = 0
    _background: list[tuple[Block, Path]] = field(default_factory=list)

    @classmethod
    def open(
        cls, folder: Path, checkout: Callable[[Path], None], *, imports: bool, of: "Sandbox | None" = None
    ) -> "Sandbox":
        work = folder / "clone"
        work.mkdir()
        checkout(work)
        _environment(work / ".venv")
        # curl exits 22 on an HTTP error; pages need not ask for that.
        (folder / ".curlrc").write_text("fail\nsilent\nshow-error\n")
        state = of.state if of else folder / "state"
        base = of.port_base if of else free_block("127.0.0.1", NUM_PORTS, os.getpid() * 131)
        env = {k: v for k, v in os.environ.items() if not k.startswith(("GLOWPLUG_", "OTEL_", "MAKE", "MFLAGS"))}
        if imports:
            env.pop("PYTHONDONTWRITEBYTECODE", None)
            env["PYTHONPATH"] = f"{work / 'libs'}:{work}"
        env |= {
            "PATH": f"{Path(sys.executable).parent}:{env.get('PATH', '')}",
            "GLOWPLUG_STATE_DIR": str(state),
            "GLOWPLUG_PORT_BASE": str(base),
            "GLOWPLUG_READY_TIMEOUT_S": "240",
            "PIP_DRY_RUN": "1",
            "CURL_HOME": str(folder),
            MARK: str(folder),
        }
        shell = subprocess.Popen(
            ["sh"],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=(folder / "shell.log").open("w"),
            text=True,
            cwd=work,
            env=env,
            start_new_session=True,
        )
        return cls(folder, state, base, shell)

    @property
    def work(self) -> Path:
        return self.folder / "clone"

    def moved(self, text: str) -> str:
        def port(match: re.Match[str]) -> str:
            offset = int(match[2])
            return f"{match[1]}{self.port_base + offset}" if offset < NUM_PORTS else match[0]

        return _ADDRESS.sub(port, text)

    def write(self, block: Block) -> None:
        (self.work / block.words["file"]).write_text(self.moved(block.text))

    def run(self, block: Block, wanted: str = "") -> str:
        if "background" in block.words:
            return self._start(block)
        code, output = self.execute(block.text, stop=not block.exit_code)
        if code != block.exit_code:
            raise PageFailed(self._told(block, f"ended with {code}, not {block.exit_code}", output))
        if missing := shows(self.moved(wanted), output):
            raise PageFailed(self._told(block, f"never printed {missing!r}", output))
        return output

    def execute(self, text: str, *, stop: bool = True) -> tuple[int | str, str]:
        """(exit code, output); with `stop` the first failure ends the shell."""
        self._count += 1
        out, status = self.folder / f"out-{self._count}", self.folder / f"status-{self._count}"
        given = f"echo $? >'{status}.new'; mv '{status}.new' '{status}'\n"  # at once: the shell may end before it
        self._say(f"set {'-e' if stop else '+e'}\n{{\n{self.moved(text)}\n}} >'{out}' 2>&1 </dev/null\n{given}")
        deadline = time.monotonic() + BLOCK_S
        while not status.exists():
            if (code := self._shell.poll()) is not None:
                return code, _read(out)
            if time.monotonic() > deadline:
                return f"nothing within {BLOCK_S:g} s", _read(out)
            time.sleep(POLL_S)
        return int(status.read_text()), _read(out)

    def _start(self, block: Block) -> str:
        """Start a background block and wait until it prints its word."""
        self._count += 1
        out, word = self.folder / f"out-{self._count}", block.words["background"].replace("_", " ")
        ended = self.folder / f"status-{self._count}"
        self._say(f"{{ ( set -e\n{self.moved(block.text)}\n) >'{out}' 2>&1 </dev/null; echo $? >'{ended}'; }} &\n")
        deadline = time.monotonic() + BLOCK_S
        while word and word not in _read(out):
            if time.monotonic() > deadline or ended.exists():
                raise PageFailed(self._told(block, f"never printed {word!r}", _read(out)))
            time.sleep(POLL_S)
        return _read(out)

    def _say(self, text: str) -> None:
        assert self._shell.stdin is not None
        try:
            self._shell.stdin.write(text)
            self._shell.stdin.flush()
        except BrokenPipeError as error:
            raise PageFailed("the page's shell has ended") from error

    def _told(self, block: Block, what: str, output: str) -> str:
        logs = ""
        for log in sorted((self.state / "logs").glob("*.log")):
            bad = [row for row in _read(log).splitlines() if "ERROR" in row or "Traceback" in row][-3:]
            logs += "".join(f"\n  {log.name}: {row}" for row in bad)
        return f"{block.where} {what}\n--- the block\n{block.text}--- its output\n{output[-4000:]}{logs}"

    def close(self) -> None:
        ours = self._processes()
        for process in ours:
            _signal(process, signal.SIGTERM)
        psutil.wait_procs(ours, timeout=20)
        deadline = time.monotonic() + 10
        while (left := self._processes()) and time.monotonic() < deadline:
            for process in left:
                _signal(process, signal.SIGKILL)
            psutil.wait_procs(left, timeout=1)
        self._shell.wait(WAIT_S)

    def _processes(self) -> list[psutil.Process]:
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get(MARK) == str(self.folder) and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except (psutil.Error, OSError):
                continue
        return found


def linked(work: Path) -> None:
    """Link `work` like a checkout: no page may change the targets."""
    for name in {path.partition("/")[0] for path in files() if not path.startswith(".")}:
        (work / name).symlink_to(ROOT / name)


def _environment(venv: Path) -> None:
    """Link the tests' environment like an installed one: no page may change it."""
    venv.mkdir()
    for name in ("bin", "lib", "lib64", "include", "share", "pyvenv.cfg"):
        if (Path(sys.prefix) / name).exists():
            (venv / name).symlink_to(Path(sys.prefix) / name)
    for stamp in (".local-installed", ".lab-installed", ".dev-installed"):
        (venv / stamp).touch()


def _signal(process: psutil.Process, number: int) -> None:
    try:
        process.send_signal(number)
    except psutil.Error:
        return


def _read(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""


@contextmanager
def sandbox(
    checkout: Callable[[Path], None] = linked, *, imports: bool = False, of: Sandbox | None = None
) -> Iterator[Sandbox]:
    """The path is short, for Unix sockets. `imports`: commands import `checkout`'s code, not the tests'. `of`: act on
    that sandbox's fleet."""
    with tempfile.TemporaryDirectory(prefix="gp-howto-", ignore_cleanup_errors=True) as folder:
        opened = Sandbox.open(Path(folder), checkout, imports=imports, of=of)
        try:
            yield opened
        finally:
            opened.close()
            shutil.rmtree(folder, ignore_errors=True)


def start_fleet(box: Sandbox, page: Page) -> None:
    if page.fleet is not None:
        engine, nodes = page.fleet.get("engine", "emulated"), page.fleet.get("nodes", "2")
        code, output = box.execute(f"glowplug up --detach --quiet --engine {engine} --nodes {nodes}\n")
        if code != 0:
            raise PageFailed(f"{page.path}: its fleet did not start ({code})\n{output[-3000:]}")


def run_page(page: Page, here: frozenset[str] = frozenset(), of: Sandbox | None = None) -> int:
    """Run blocks whose needs are `here`, on its own fleet or that of `of`; returns how many. Raises PageFailed."""
    num_run = 0
    with sandbox(of=of) as box:
        if of is None:
            start_fleet(box, page)
        for block in page.blocks:
            if "file" in block.words:
                box.write(block)
            if block.language == "sh" and block.needs <= here:
                box.run(block, expected(page, block))
                num_run += 1
    return num_run
