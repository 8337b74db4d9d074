"""Can a fleet run on this machine? `look` reads values, bounded and read-only, for the pure functions that judge
them."""

import contextlib
import importlib
import importlib.metadata
import importlib.util
import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from glowplug.cli.doctor.findings import Finding, Findings
from glowplug.domain.units import show_bytes
from glowplug.engines import vllm_env
from glowplug.runtime.errors import NotInstalled, WrongSetting
from glowplug.runtime.supervisor import embedded, plan, probe
from glowplug.runtime.supervisor.settings import SHM_NEEDED_BYTES, FleetSettings, check_services

PYTHON_OLDEST = (3, 11)
MEMORY_NEEDED_BYTES = 1200 << 20  # a whole local fleet without engines needs less (docs/figures.md)
DISK_WARN_BYTES = 1 << 30
FILES_NEEDED = 1024  # sockets of one router at rest
FILES_WANTED = 10_000
PIDS_NEEDED = 512
DRIVER_OLDEST = 525  # the first branch with CUDA 12
PROGRAM_S, VLLM_S = 20.0, 90.0  # importing vLLM takes 15 s on two idle cores
_CGROUP = Path("/sys/fs/cgroup")
_M = Findings("machine")


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    version: str = ""
    problem: str = ""
    absent: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessLimits:
    """Of this process's cgroup (version 2); None: no limit."""

    memory_bytes: int | None = None
    memory_used_bytes: int = 0
    cpus: float | None = None
    pids: int | None = None


def look(state_dir: Path, *, fleet_runs: bool, deep: bool = False) -> list[Finding]:
    """Return every finding, the most basic first, in seconds, or PROGRAM_S if a program hangs. `deep`, or an engine of
    vllm, imports vLLM."""
    wrong, settings = "", FleetSettings(state_dir=state_dir)
    try:
        settings = FleetSettings.read(state_dir=state_dir)
        check_services()
    except WrongSetting as error:
        wrong = str(error)
    with ThreadPoolExecutor(max_workers=6) as pool:
        nats = pool.submit(_server, settings.nats_url, "GLOWPLUG_NATS_URL", embedded.find_nats)
        valkey = pool.submit(_server, settings.redis_url, "GLOWPLUG_REDIS_URL", embedded.find_valkey)
        llamacpp, vllm = pool.submit(_llamacpp), pool.submit(_vllm, deep or settings.engine == "vllm")
        container = pool.submit(_container)
        driver, cuda, gpus = _nvidia()
        limits, free_bytes = _cgroup(), shutil.disk_usage(_existing(settings.state_dir)).free
        found = (
            python(sys.version_info[:3]),
            setting(wrong),
            disk(settings, _unwritable(settings.state_dir), free_bytes),
            memory(_available(limits)),
            shm(_shm_free()),
            open_files(_open_files()),
            cgroup(limits, os.cpu_count() or 1),
            loopback(loopback_problem(), _localhost()),
            proxy(proxy_in_the_way(os.environ)),
            ports(settings, taken=None if fleet_runs else _taken(settings)),
            server("nats", nats.result()),
            server("valkey", valkey.result()),
            engines(settings.engine, llamacpp.result(), vllm.result()),
            nvidia(settings.gpu_kind, driver, cuda, gpus),
            containers(*container.result(), has_gpus=bool(gpus)),
        )
        return [finding for group in found for finding in group]


def python(version: tuple[int, int, int]) -> Iterator[Finding]:
    said = f"Python {'.'.join(str(part) for part in version)}"
    if version[:2] < PYTHON_OLDEST:
        yield _M.fail("python", f"{said} is too old", "install Python 3.11 or newer and make the .venv again")
    else:
        yield _M.ok("python", said)


def setting(wrong: str) -> Iterator[Finding]:
    """`wrong`: the first bad GLOWPLUG_* variable of `up`, and why."""
    if wrong:
        yield _M.fail("settings", wrong, "correct the variable, or unset it")
    else:
        yield _M.ok("settings", "the GLOWPLUG_* variables of `glowplug up` are in range")


def disk(settings: FleetSettings, problem: str, free_bytes: int) -> Iterator[Finding]:
    """`problem`: why the state directory is not writable."""
    free, needed_bytes = f"{show_bytes(free_bytes)} free for {settings.state_dir}", settings.min_free_bytes
    elsewhere = "choose another place with --state-dir (GLOWPLUG_STATE_DIR)"
    if problem:
        yield _M.fail("disk", problem, elsewhere)
    elif free_bytes < needed_bytes:
        yield _M.fail("disk", f"{free}, and the fleet needs {show_bytes(needed_bytes)}", f"make room, or {elsewhere}")
    elif free_bytes < DISK_WARN_BYTES:
        yield _M.warn("disk", f"only {free}", "make room: logs, JetStream and Valkey write there")
    else:
        yield _M.ok("disk", free)


def memory(available_bytes: int) -> Iterator[Finding]:
    available = f"{show_bytes(available_bytes)} available"
    if available_bytes < MEMORY_NEEDED_BYTES:
        says = f"{available}; a fleet without engines takes up to {show_bytes(MEMORY_NEEDED_BYTES)}"
        yield _M.warn("memory", says, "end other programs, or start fewer nodes: glowplug up --nodes 1")
    else:
        yield _M.ok("memory", available)


def shm(free_bytes: int | None) -> Iterator[Finding]:
    if free_bytes is None:
        says = "/dev/shm is missing or not writable: weights go to the state directory, which is slower"
        do = "mount a tmpfs there (docker: --shm-size; Kubernetes: emptyDir medium Memory), or set GLOWPLUG_SHM_DIR"
        yield _M.warn("shm", says, do)
        return
    says = f"/dev/shm has {show_bytes(free_bytes)} free"
    if free_bytes < SHM_NEEDED_BYTES:
        do = "free it (left-over files of other programs?), enlarge it (docker: --shm-size), or set GLOWPLUG_SHM_DIR"
        yield _M.warn("shm", f"{says}: below {show_bytes(SHM_NEEDED_BYTES)} weights go to the state directory", do)
    else:
        yield _M.ok("shm", says)


def open_files(most: int) -> Iterator[Finding]:
    if most < FILES_NEEDED:
        yield _M.fail("open files", f"at most {most} per process", "ulimit -n 65536 before starting")
    elif most < FILES_WANTED:
        says = f"at most {most} per process: a router takes 10000 connections (GLOWPLUG_MAX_CONNECTIONS)"
        yield _M.warn("open files", says, "ulimit -n 65536 before starting")
    else:
        yield _M.ok("open files", f"up to {most} per process")


def cgroup(limits: ProcessLimits, num_cpus: int) -> Iterator[Finding]:
    caps = []
    if limits.memory_bytes is not None:
        caps.append(f"memory {show_bytes(limits.memory_bytes)}")
    if limits.cpus is not None:
        caps.append(f"{limits.cpus:g} of {num_cpus} cores")
    if limits.pids is not None:
        caps.append(f"{limits.pids} processes and threads")
    limited = f"limited to {', '.join(caps)}"
    if limits.memory_bytes is not None and limits.memory_bytes < MEMORY_NEEDED_BYTES:
        yield _M.warn("cgroup", limited, "raise the memory limit of this container or unit")
    elif limits.pids is not None and limits.pids < PIDS_NEEDED:
        yield _M.warn("cgroup", limited, "raise its limit of processes (docker: --pids-limit)")
    else:
        yield _M.ok("cgroup", limited if caps else "no limits on memory, cores and processes")


def loopback(problem: str, localhost: Sequence[str]) -> Iterator[Finding]:
    """`localhost`: its addresses."""
    if problem:
        yield _M.fail("loopback", f"127.0.0.1 does not work: {problem}", "ip link set lo up")
    elif "127.0.0.1" not in localhost:
        says = f"`localhost` is {', '.join(localhost) or 'not resolved'}, and services listen on 127.0.0.1"
        yield _M.warn("loopback", says, "use 127.0.0.1 in addresses, or correct /etc/hosts")
    else:
        yield _M.ok("loopback", "127.0.0.1 works, and `localhost` resolves to it")


def proxy(variable: str) -> Iterator[Finding]:
    """`variable`: sends loopback requests to a proxy."""
    if variable:
        says = f"{variable} is set and does not exempt 127.0.0.1: curl and OpenAI clients would ask the proxy"
        yield _M.warn("proxy", says, "export NO_PROXY=127.0.0.1,localhost")


def ports(settings: FleetSettings, taken: Sequence[tuple[int, str, str]] | None) -> Iterator[Finding]:
    """`taken`: (port, its user in the fleet, its holder or ""); None if a fleet runs."""
    if taken is None:
        yield _M.skipped("ports", "the running fleet has its own")
    elif taken:
        port, owner, holder = taken[0]
        more = f", and {len(taken) - 1} more" if len(taken) > 1 else ""
        by = f" by {holder}" if holder else ""
        says = f"port {port} on {settings.host}, needed by {owner}, is taken{by}{more}"
        do = "free it, or choose other ports with --port-base (GLOWPLUG_PORT_BASE); 0 finds a free block"
        yield _M.fail("ports", says, do)
    else:
        yield _M.ok("ports", f"those of a fleet at {settings.port_base} are free on {settings.host}")


def server(about: str, program: Program) -> Iterator[Finding]:
    if program.problem:
        yield _M.fail(about, program.problem, "install the named program, or point to a running server")
    else:
        yield _M.ok(about, program.version)


def engines(wanted: str, llamacpp: Program, vllm: Program) -> Iterator[Finding]:
    if llamacpp.problem:
        yield _M.warn("llama.cpp", llamacpp.problem, "make install (or pip install 'glowplug[llamacpp]')")
    else:
        yield _M.ok("llama.cpp", llamacpp.version)
    if vllm.problem and wanted == "vllm":
        yield _M.fail("vllm", vllm.problem, "make vllm-env")
    elif vllm.absent:
        yield _M.skipped("vllm", vllm.problem)
    elif vllm.problem:
        yield _M.warn("vllm", f"it is installed but does not work: {vllm.problem}", "make vllm-env")
    else:
        yield _M.ok("vllm", vllm.version)


def nvidia(gpu_kind: str, driver: Program, cuda: str, gpus: Sequence[tuple[str, int, int]]) -> Iterator[Finding]:
    """`gpus`: name, bytes, bytes in use (NVML)."""
    if driver.problem:
        make = _M.fail if gpu_kind == "cuda" else _M.skipped
        yield make("gpu", driver.problem, "install the NVIDIA driver, or set GLOWPLUG_GPU_KIND=host")
        return
    major = driver.version.partition(".")[0]
    if major.isdecimal() and int(major) < DRIVER_OLDEST:
        says = f"NVIDIA driver {driver.version} is older than CUDA 12"
        yield _M.warn("gpu driver", says, "install driver 525 or newer")
    else:
        yield _M.ok("gpu driver", f"NVIDIA driver {driver.version}, CUDA {cuda or 'unknown'}")
    if not gpus:
        says = "the NVIDIA driver answers but there is no GPU"
        yield _M.fail("gpu", says, "nvidia-smi -L; is it available in this container?")
    for index, (name, total_bytes, used_bytes) in enumerate(gpus):
        says = f"{name}, {show_bytes(total_bytes)}, {show_bytes(used_bytes)} used"
        if used_bytes > total_bytes // 2:
            do = "nvidia-smi shows by whom; an agent plans with all of it"
            yield _M.warn(f"gpu {index}", f"{says}: most of it is taken", do)
        else:
            yield _M.ok(f"gpu {index}", says)


def containers(engine: Program, sees_gpus: bool | None, *, has_gpus: bool) -> Iterator[Finding]:
    """`sees_gpus`: has the NVIDIA runtime; None without a container engine."""
    if engine.problem:
        yield _M.skipped("containers", engine.problem)
    elif has_gpus and sees_gpus is False:
        says = f"{engine.version} has no NVIDIA runtime: containers do not see the GPUs"
        yield _M.warn("containers", says, "install nvidia-container-toolkit and run nvidia-ctk runtime configure")
    else:
        yield _M.ok("containers", engine.version)


def said(argv: list[str], timeout_s: float = PROGRAM_S, env: Mapping[str, str] | None = None) -> Program:
    try:
        done = subprocess.run(
            argv, capture_output=True, text=True, timeout=timeout_s, check=False, stdin=subprocess.DEVNULL, env=env
        )
    except subprocess.TimeoutExpired:
        return Program(problem=f"{argv[0]} did not answer within {timeout_s:g} s")
    except OSError as error:
        return Program(problem=f"{argv[0]} cannot run: {error.strerror}")
    if done.returncode:
        why = (done.stderr or done.stdout).strip() or f"exit code {done.returncode}"
        return Program(problem=f"{argv[0]} fails: {why.splitlines()[-1].strip()}")
    return Program(version=((done.stdout or done.stderr).strip() or argv[0]).splitlines()[-1].strip())


def _server(url: str, variable: str, find: Callable[[], Path]) -> Program:
    if url:
        return Program(version=f"not needed here: {variable} names a server")
    try:
        return said([str(find()), "--version"])
    except (NotInstalled, subprocess.TimeoutExpired) as error:
        return Program(problem=str(error))


def _llamacpp() -> Program:
    """Import in a child process: a library for another processor ends its importer."""
    if importlib.util.find_spec("xllamacpp") is None:
        return Program(problem="the llama.cpp engine is not installed")
    tried = said([sys.executable, "-c", "import xllamacpp"])
    if tried.problem:
        return Program(problem=f"xllamacpp is installed but cannot be imported: {tried.problem}")
    return Program(version=f"xllamacpp {importlib.metadata.version('xllamacpp')} imports")


def _vllm(deep: bool) -> Program:
    python = vllm_env.interpreter(os.environ.get("GLOWPLUG_VLLM_PYTHON", ""))
    if reason := vllm_env.missing(python):
        return Program(problem=reason, absent=True)
    if not deep:
        return Program(version=f"installed in {python.parent.parent} (--deep imports it)")
    code = "import torch, vllm; print('vllm', vllm.__version__, 'imports, with torch', torch.__version__)"
    quiet = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
    return said([str(python), "-c", code], VLLM_S, quiet)


def _nvidia() -> tuple[Program, str, list[tuple[str, int, int]]]:
    try:
        nvml: Any = importlib.import_module("pynvml")
    except ImportError:
        return Program(problem="GPUs cannot be detected: nvidia-ml-py is not installed"), "", []
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        return Program(problem=f"no NVIDIA driver answers ({error})"), "", []
    try:
        version = str(nvml.nvmlSystemGetDriverVersion())
        number = int(nvml.nvmlSystemGetCudaDriverVersion_v2())
        found = []
        for index in range(nvml.nvmlDeviceGetCount()):
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            memory = nvml.nvmlDeviceGetMemoryInfo(handle)
            found.append((str(nvml.nvmlDeviceGetName(handle)), int(memory.total), int(memory.used)))
        return Program(version=version), f"{number // 1000}.{number % 1000 // 10}", found
    except nvml.NVMLError as error:
        return Program(problem=f"NVML cannot read the GPUs: {error}"), "", []
    finally:
        with contextlib.suppress(nvml.NVMLError):
            nvml.nvmlShutdown()


def _container() -> tuple[Program, bool | None]:
    problem = "no docker and no podman here; only the compose fleet needs one"
    for name in ("docker", "podman"):
        if shutil.which(name) is None:
            continue
        tried = said([name, "info", "--format", "{{json .}}"], 8.0)
        try:
            answer = json.loads(tried.version)
        except ValueError:
            problem = f"{name} is installed but does not answer: {tried.problem or tried.version}"
            continue
        version = answer.get("ServerVersion") or (answer.get("version") or {}).get("Version") or ""
        return Program(version=f"{name} {version}".strip()), "nvidia" in (answer.get("Runtimes") or {})
    return Program(problem=problem), None


def _existing(path: Path) -> Path:
    return next(folder for folder in (path, *path.parents) if folder.exists())


def _unwritable(path: Path) -> str:
    folder = _existing(path)
    if not folder.is_dir():
        return f"{folder} is not a directory"
    return "" if os.access(folder, os.W_OK | os.X_OK) else f"{folder} is not writable for this user"


def _shm_free() -> int | None:
    shm = Path("/dev/shm")
    return shutil.disk_usage(shm).free if shm.is_dir() and os.access(shm, os.W_OK) else None


def _open_files() -> int:
    resource: Any = importlib.import_module("resource")
    soft = int(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    return soft if soft >= 0 else 1 << 30  # -1: no limit


def _available(limits: ProcessLimits) -> int:
    free = int(psutil.virtual_memory().available)
    limit = limits.memory_bytes
    return min(free, max(0, limit - limits.memory_used_bytes)) if limit is not None else free


def _cgroup() -> ProcessLimits:
    def words(file: str) -> list[str]:
        with contextlib.suppress(OSError):
            return (_CGROUP / file).read_text().split()
        return []

    def read(file: str) -> int | None:
        return next((int(word) for word in words(file)[:1] if word.isdecimal()), None)

    quota = words("cpu.max")
    return ProcessLimits(
        memory_bytes=read("memory.max"),
        memory_used_bytes=read("memory.current") or 0,
        cpus=int(quota[0]) / int(quota[1]) if len(quota) == 2 and quota[0].isdecimal() else None,
        pids=read("pids.max"),
    )


def _taken(settings: FleetSettings) -> list[tuple[int, str, str]]:
    if not settings.port_base:
        return []
    wanted = plan.Plan(settings, settings.port_base).ports()
    return [(port, owner, probe.holder(port)) for port, owner in wanted if not probe.is_free(settings.host, port)]


def loopback_problem(address: str = "127.0.0.1") -> str:
    """Return "" if a byte to `address` comes back, else the problem."""
    try:
        with socket.create_server((address, 0)) as server:
            server.settimeout(2)
            with socket.create_connection(server.getsockname(), timeout=2) as client:
                accepted, _ = server.accept()
                with accepted:
                    accepted.settimeout(2)
                    client.sendall(b"x")
                    return "" if accepted.recv(1) == b"x" else "it lost a byte"
    except OSError as error:
        return error.strerror or str(error)


def _localhost() -> tuple[str, ...]:
    with contextlib.suppress(OSError):
        return tuple(dict.fromkeys(str(row[4][0]) for row in socket.getaddrinfo("localhost", 80)))
    return ()


def proxy_in_the_way(environ: Mapping[str, str]) -> str:
    """Return the proxy variable that applies to http://127.0.0.1, or ""."""
    spared = {word.strip() for name in ("no_proxy", "NO_PROXY") for word in environ.get(name, "").split(",")}
    if spared & {"*", "127.0.0.1", "127.0.0.0/8"}:
        return ""
    return next((name for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY") if environ.get(name)), "")
