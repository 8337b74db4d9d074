"""One page's commands in a folder of their own: a shell that lives as long as the page, ports and state of its own."""

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
    """A block did not do what the page says; carries the page, the line and what it printed."""


@dataclass
class Sandbox:
    """Runs blocks one after the other. `close` ends everything that was started from it."""

    folder: Path
    state: Path  # of the fleet that its commands act on
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
        # An answer that is an error ends curl with 22; a page need not say so each time.
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
        """The checkout as its commands see it."""
        return self.folder / "clone"

    def moved(self, text: str) -> str:
        """`text` with the default ports replaced by those of this page's fleet."""

        def port(match: re.Match[str]) -> str:
            offset = int(match[2])
            return f"{match[1]}{self.port_base + offset}" if offset < NUM_PORTS else match[0]

        return _ADDRESS.sub(port, text)

    def write(self, block: Block) -> None:
        (self.work / block.words["file"]).write_text(self.moved(block.text))

    def run(self, block: Block, wanted: str = "") -> str:
        """What the block printed. Raises PageFailed."""
        if "background" in block.words:
            return self._start(block)
        code, output = self.execute(block.text, stop=not block.exit_code)
        if code != block.exit_code:
            raise PageFailed(self._told(block, f"ended with {code}, not {block.exit_code}", output))
        if missing := shows(self.moved(wanted), output):
            raise PageFailed(self._told(block, f"never printed {missing!r}", output))
        return output

    def execute(self, text: str, *, stop: bool = True) -> tuple[int | str, str]:
        """(exit code, output) of commands; with `stop` the first that fails ends the shell."""
        self._count += 1
        out, status = self.folder / f"out-{self._count}", self.folder / f"status-{self._count}"
        given = f"echo $? >'{status}.new'; mv '{status}.new' '{status}'\n"  # said at once: the shell may end before it
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
        """Start a block beside the others and wait until it prints the word it is given."""
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
        """Ask everything started from here to end, then see to it."""
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
        """Living processes that carry our mark."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get(MARK) == str(self.folder) and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except (psutil.Error, OSError):
                continue
        return found


def linked(work: Path) -> None:
    """Make `work` look like a checkout: links to what the repository holds, which no page may change."""
    for name in {path.partition("/")[0] for path in files() if not path.startswith(".")}:
        (work / name).symlink_to(ROOT / name)


def _environment(venv: Path) -> None:
    """The environment the tests run in, seen through links, as one that is installed: no page may change it."""
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
    """A sandbox that is gone afterwards. Its path is short: a unix socket lives in it. `imports`: its commands import
    what `checkout` made, not what the tests themselves run. `of`: they act on the fleet of that sandbox."""
    with tempfile.TemporaryDirectory(prefix="gp-howto-", ignore_cleanup_errors=True) as folder:
        opened = Sandbox.open(Path(folder), checkout, imports=imports, of=of)
        try:
            yield opened
        finally:
            opened.close()
            shutil.rmtree(folder, ignore_errors=True)


def start_fleet(box: Sandbox, page: Page) -> None:
    """The fleet that the page's comment asks for, if it does. Raises PageFailed."""
    if page.fleet is not None:
        engine, nodes = page.fleet.get("engine", "emulated"), page.fleet.get("nodes", "2")
        code, output = box.execute(f"glowplug up --detach --quiet --engine {engine} --nodes {nodes}\n")
        if code != 0:
            raise PageFailed(f"{page.path}: its fleet did not start ({code})\n{output[-3000:]}")


def run_page(page: Page, here: frozenset[str] = frozenset(), of: Sandbox | None = None) -> int:
    """Run every block of a page whose needs are `here`, on a fleet of its own or that of the sandbox `of`; returns how
    many ran. Raises PageFailed."""
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
