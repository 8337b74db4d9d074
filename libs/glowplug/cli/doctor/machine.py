"""Can a fleet run on this machine? What it is like is gathered (`gather`, bounded in time, changing nothing), then
judged by pure functions (`check`)."""

import contextlib
import ctypes
import importlib
import importlib.metadata
import importlib.util
import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from pydantic import ValidationError

from glowplug.cli.doctor.findings import Finding, Findings
from glowplug.domain.units import show_bytes
from glowplug.engines import vllm_env
from glowplug.runtime.settings import explain
from glowplug.runtime.supervisor import embedded, plan, probe
from glowplug.runtime.supervisor.errors import NotInstalled, WrongSetting
from glowplug.runtime.supervisor.settings import SHM_NEEDED_BYTES, FleetSettings, check_services

PYTHON_OLDEST = (3, 11)
MEMORY_NEEDED_BYTES = 1200 << 20  # the whole local fleet without engines stays below (README)
DISK_WARN_BYTES = 1 << 30
FILES_NEEDED = 1024  # sockets of one router at rest; its own bound is GLOWPLUG_MAX_CONNECTIONS
FILES_WANTED = 10_000
PIDS_NEEDED = 512
DRIVER_OLDEST = 525  # the first branch with CUDA 12
PROGRAM_S, VLLM_S = 20.0, 90.0  # importing vLLM takes 15 s on two idle cores
_TIME_ERROR = 5  # of adjtimex(2)
_CGROUP = Path("/sys/fs/cgroup")
_M = Findings("machine")


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """A program or package: its version as it says itself, or why it cannot be used."""

    version: str = ""
    problem: str = ""
    absent: bool = False  # not installed at all, which is fine where nothing needs it


@dataclass(frozen=True, slots=True, kw_only=True)
class TakenPort:
    """A port the fleet needs and another process has; `holder` is empty when the system does not say which."""

    port: int
    owner: str
    holder: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuFacts:
    """One NVIDIA device as NVML tells it."""

    name: str
    total_bytes: int
    used_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineFacts:
    """What was found. Bytes; None where it could not be read or does not exist; "" where nothing is wrong."""

    python: tuple[int, int, int]
    settings: FleetSettings  # of `glowplug up` here
    wrong_setting: str = ""  # the first GLOWPLUG_* variable of `up` that is out of range
    state_dir_problem: str = ""  # why it cannot be written
    disk_free_bytes: int
    memory_available_bytes: int
    memory_limit_bytes: int | None = None  # of the cgroup
    cpu_limit: float | None = None  # of the cgroup, in cores
    pids_limit: int | None = None
    num_cpus: int = 1
    shm_free_bytes: int | None = None
    open_files: int = 0  # soft limit
    ports_taken: tuple[TakenPort, ...] | None = None  # None: a fleet runs, here or elsewhere
    ipv4_loopback: str = ""
    ipv6_loopback: str = ""
    localhost: tuple[str, ...] = ()  # what the name resolves to
    proxy: str = ""  # the variable that would send loopback requests through a proxy
    clock_synchronised: bool | None = None
    nats: Program
    valkey: Program
    llamacpp: Program
    vllm: Program
    driver: Program  # of NVIDIA
    cuda: str = ""
    gpus: tuple[GpuFacts, ...] = ()
    container: Program
    container_has_gpu: bool | None = None


def check(facts: MachineFacts) -> list[Finding]:
    """Every finding about the machine, the most basic first."""
    groups = (_python, _space, _limits, _network, _servers, _engines, _gpus, _containers)
    return [finding for group in groups for finding in group(facts)]


def _python(facts: MachineFacts) -> Iterator[Finding]:
    version = ".".join(str(part) for part in facts.python)
    if facts.python[:2] < PYTHON_OLDEST:
        yield _M.fail("python", f"Python {version} is too old", "install Python 3.11 or newer and make the .venv again")
    else:
        yield _M.ok("python", f"Python {version}")
    if facts.wrong_setting:
        yield _M.fail("settings", facts.wrong_setting, "correct the variable, or unset it: docs/configuration.md")
    else:
        yield _M.ok("settings", "the GLOWPLUG_* variables of `glowplug up` are in range")


def _space(facts: MachineFacts) -> Iterator[Finding]:
    free = f"{show_bytes(facts.disk_free_bytes)} free for {facts.settings.state_dir}"
    needed_bytes, elsewhere = (
        facts.settings.min_free_bytes,
        "choose another place with --state-dir (GLOWPLUG_STATE_DIR)",
    )
    if facts.state_dir_problem:
        yield _M.fail("disk", facts.state_dir_problem, elsewhere)
    elif facts.disk_free_bytes < needed_bytes:
        yield _M.fail("disk", f"{free}, and the fleet needs {show_bytes(needed_bytes)}", f"make room, or {elsewhere}")
    elif facts.disk_free_bytes < DISK_WARN_BYTES:
        yield _M.warn("disk", f"only {free}", "make room: logs, JetStream and Valkey write there")
    else:
        yield _M.ok("disk", free)
    memory = show_bytes(facts.memory_available_bytes)
    if facts.memory_available_bytes < MEMORY_NEEDED_BYTES:
        says = f"{memory} available; a fleet without engines takes up to {show_bytes(MEMORY_NEEDED_BYTES)}"
        yield _M.warn("memory", says, "end other programs, or start fewer nodes: glowplug up --nodes 1")
    else:
        yield _M.ok("memory", f"{memory} available")
    if facts.shm_free_bytes is None:
        yield _M.warn(
            "shm",
            "/dev/shm is not there or not writable: weights go to the state directory, which is slower",
            "mount a tmpfs there (docker: --shm-size; Kubernetes: emptyDir medium Memory), or set GLOWPLUG_SHM_DIR",
        )
    elif facts.shm_free_bytes < SHM_NEEDED_BYTES:
        yield _M.warn(
            "shm",
            f"/dev/shm has {show_bytes(facts.shm_free_bytes)} free: below {show_bytes(SHM_NEEDED_BYTES)} weights go "
            "to the state directory",
            "free it (left-over files of other programs?), enlarge it (docker: --shm-size), or set GLOWPLUG_SHM_DIR",
        )
    else:
        yield _M.ok("shm", f"/dev/shm has {show_bytes(facts.shm_free_bytes)} free")


def _limits(facts: MachineFacts) -> Iterator[Finding]:
    if facts.open_files < FILES_NEEDED:
        yield _M.fail("open files", f"at most {facts.open_files} per process", "ulimit -n 65536 before starting")
    elif facts.open_files < FILES_WANTED:
        says = f"at most {facts.open_files} per process: a router takes 10000 connections (GLOWPLUG_MAX_CONNECTIONS)"
        yield _M.warn("open files", says, "ulimit -n 65536 before starting")
    else:
        yield _M.ok("open files", f"up to {facts.open_files} per process")
    caps = []
    if facts.memory_limit_bytes is not None:
        caps.append(f"memory {show_bytes(facts.memory_limit_bytes)}")
    if facts.cpu_limit is not None:
        caps.append(f"{facts.cpu_limit:g} of {facts.num_cpus} cores")
    if facts.pids_limit is not None:
        caps.append(f"{facts.pids_limit} processes and threads")
    if facts.memory_limit_bytes is not None and facts.memory_limit_bytes < MEMORY_NEEDED_BYTES:
        yield _M.warn("cgroup", f"limited to {', '.join(caps)}", "raise the memory limit of this container or unit")
    elif facts.pids_limit is not None and facts.pids_limit < PIDS_NEEDED:
        yield _M.warn("cgroup", f"limited to {', '.join(caps)}", "raise its limit of processes (docker: --pids-limit)")
    else:
        yield _M.ok("cgroup", f"limited to {', '.join(caps)}" if caps else "no limits on memory, cores and processes")


def _network(facts: MachineFacts) -> Iterator[Finding]:
    if facts.ipv4_loopback:
        yield _M.fail("loopback", f"127.0.0.1 does not work: {facts.ipv4_loopback}", "ip link set lo up")
    elif "127.0.0.1" not in facts.localhost:
        says = f"`localhost` is {', '.join(facts.localhost) or 'not resolved'}, and services listen on 127.0.0.1"
        yield _M.warn("loopback", says, "use 127.0.0.1 in addresses, or mend /etc/hosts")
    else:
        yield _M.ok("loopback", "127.0.0.1 works and is what `localhost` means")
    if facts.ipv6_loopback:
        says = f"::1 does not work ({facts.ipv6_loopback}); nothing needs it unless GLOWPLUG_HOST=::1"
        yield _M.skipped("ipv6", says)
    else:
        yield _M.ok("ipv6", "::1 works")
    if facts.proxy:
        says = f"{facts.proxy} is set and does not spare 127.0.0.1: curl and OpenAI clients would ask the proxy"
        yield _M.warn("proxy", says, "export NO_PROXY=127.0.0.1,localhost")
    if facts.ports_taken is None:
        yield _M.skipped("ports", "the running fleet has its own")
    elif facts.ports_taken:
        first = facts.ports_taken[0]
        more = f", and {len(facts.ports_taken) - 1} more" if len(facts.ports_taken) > 1 else ""
        holder = f" by {first.holder}" if first.holder else ""
        yield _M.fail(
            "ports",
            f"port {first.port} on {facts.settings.host}, needed by {first.owner}, is taken{holder}{more}",
            "free it, or choose other ports with --port-base (GLOWPLUG_PORT_BASE); 0 finds a free block",
        )
    else:
        yield _M.ok("ports", f"those of a fleet at {facts.settings.port_base} are free on {facts.settings.host}")
    if facts.clock_synchronised is None:
        yield _M.skipped("clock", "this system does not tell whether its clock is synchronised")
    elif facts.clock_synchronised:
        yield _M.ok("clock", "synchronised, as the kernel says")
    else:
        yield _M.skipped(
            "clock",
            "the kernel says that nothing synchronises it: no matter for one machine, but nodes must agree to a second",
            "run chrony or systemd-timesyncd before other machines join",
        )


def _servers(facts: MachineFacts) -> Iterator[Finding]:
    for about, program in (("nats", facts.nats), ("valkey", facts.valkey)):
        if program.problem:
            yield _M.fail(about, program.problem, "install what the message names, or point to a running server")
        else:
            yield _M.ok(about, program.version)


def _engines(facts: MachineFacts) -> Iterator[Finding]:
    if facts.llamacpp.problem:
        yield _M.warn("llama.cpp", facts.llamacpp.problem, "make install (or pip install 'glowplug[llamacpp]')")
    else:
        yield _M.ok("llama.cpp", facts.llamacpp.version)
    if facts.vllm.problem and facts.settings.engine == "vllm":
        yield _M.fail("vllm", facts.vllm.problem, "make vllm-env")
    elif facts.vllm.absent:
        yield _M.skipped("vllm", facts.vllm.problem)
    elif facts.vllm.problem:
        yield _M.warn("vllm", f"it is installed and does not work: {facts.vllm.problem}", "make vllm-env")
    else:
        yield _M.ok("vllm", facts.vllm.version)


def _gpus(facts: MachineFacts) -> Iterator[Finding]:
    if facts.driver.problem:
        make = _M.fail if facts.settings.gpu_kind == "cuda" else _M.skipped
        yield make("gpu", facts.driver.problem, "install the NVIDIA driver, or set GLOWPLUG_GPU_KIND=host")
        return
    major = facts.driver.version.partition(".")[0]
    if major.isdecimal() and int(major) < DRIVER_OLDEST:
        says = f"NVIDIA driver {facts.driver.version} is older than CUDA 12"
        yield _M.warn("gpu driver", says, "install driver 525 or newer")
    else:
        yield _M.ok("gpu driver", f"NVIDIA driver {facts.driver.version}, CUDA {facts.cuda or 'unknown'}")
    if not facts.gpus:
        says = "the NVIDIA driver answers but there is no GPU"
        yield _M.fail("gpu", says, "nvidia-smi -L; is it given to this container?")
    for index, gpu in enumerate(facts.gpus):
        says = f"{gpu.name}, {show_bytes(gpu.total_bytes)}, {show_bytes(gpu.used_bytes)} used"
        if gpu.used_bytes > gpu.total_bytes // 2:
            do = "nvidia-smi shows by whom; an agent plans with all of it"
            yield _M.warn(f"gpu {index}", f"{says}: most of it is taken", do)
        else:
            yield _M.ok(f"gpu {index}", says)


def _containers(facts: MachineFacts) -> Iterator[Finding]:
    if facts.container.problem:
        yield _M.skipped("containers", facts.container.problem)
    elif facts.gpus and facts.container_has_gpu is False:
        says = f"{facts.container.version} has no NVIDIA runtime: containers do not see the GPUs"
        yield _M.warn("containers", says, "install nvidia-container-toolkit and run nvidia-ctk runtime configure")
    else:
        yield _M.ok("containers", facts.container.version)


def gather(state_dir: Path, *, fleet_runs: bool, deep: bool = False) -> MachineFacts:
    """Takes seconds at most, PROGRAM_S when a program hangs; `deep` (and an engine of vllm) imports vLLM too."""
    wrong, settings = "", FleetSettings.model_construct(state_dir=state_dir.absolute())
    try:
        settings = FleetSettings(state_dir=state_dir)
        check_services()
    except ValidationError as error:
        wrong = explain(error)
    except WrongSetting as error:
        wrong = str(error)
    with ThreadPoolExecutor(max_workers=6) as pool:
        nats = pool.submit(_server, settings.nats_url, "GLOWPLUG_NATS_URL", embedded.find_nats)
        valkey = pool.submit(_server, settings.redis_url, "GLOWPLUG_REDIS_URL", embedded.find_valkey)
        llamacpp, vllm = pool.submit(_llamacpp), pool.submit(_vllm, deep or settings.engine == "vllm")
        container = pool.submit(_container)
        driver, cuda, gpus = _nvidia()
        limits = _cgroup()
        engine, has_gpu = container.result()
        return MachineFacts(
            python=sys.version_info[:3],
            settings=settings,
            wrong_setting=wrong,
            state_dir_problem=_writable(settings.state_dir),
            disk_free_bytes=shutil.disk_usage(_existing(settings.state_dir)).free,
            memory_available_bytes=_available(limits.get("memory"), limits.get("memory_used")),
            memory_limit_bytes=limits.get("memory"),
            cpu_limit=limits["cpu_millis"] / 1000 if "cpu_millis" in limits else None,
            pids_limit=limits.get("pids"),
            num_cpus=os.cpu_count() or 1,
            shm_free_bytes=_shm_free(),
            open_files=_open_files(),
            ports_taken=None if fleet_runs else _ports(settings),
            ipv4_loopback=loopback(socket.AF_INET, "127.0.0.1"),
            ipv6_loopback=loopback(socket.AF_INET6, "::1"),
            localhost=_localhost(),
            proxy=proxy_in_the_way(os.environ),
            clock_synchronised=_synchronised(),
            nats=nats.result(),
            valkey=valkey.result(),
            llamacpp=llamacpp.result(),
            vllm=vllm.result(),
            driver=driver,
            cuda=cuda,
            gpus=gpus,
            container=engine,
            container_has_gpu=has_gpu,
        )


def said(argv: list[str], timeout_s: float = PROGRAM_S, env: Mapping[str, str] | None = None) -> Program:
    """The last line a program prints as its version, or why it cannot run."""
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
    """The NATS or Valkey that `glowplug up` would start."""
    if url:
        return Program(version=f"not needed here: {variable} names a server")
    try:
        return said([str(find()), "--version"])
    except (NotInstalled, subprocess.TimeoutExpired) as error:
        return Program(problem=str(error))


def _llamacpp() -> Program:
    """Imported in a process of its own: a library built for another processor ends the one that imports it."""
    if importlib.util.find_spec("xllamacpp") is None:
        return Program(problem="the llama.cpp engine is not installed")
    tried = said([sys.executable, "-c", "import xllamacpp"])
    if tried.problem:
        return Program(problem=f"xllamacpp is installed and cannot be imported: {tried.problem}")
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


def _nvidia() -> tuple[Program, str, tuple[GpuFacts, ...]]:
    try:
        nvml: Any = importlib.import_module("pynvml")
    except ImportError:
        return Program(problem="no GPU is looked for: nvidia-ml-py is not installed"), "", ()
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        return Program(problem=f"no NVIDIA driver answers ({error})"), "", ()
    try:
        version = str(nvml.nvmlSystemGetDriverVersion())
        number = int(nvml.nvmlSystemGetCudaDriverVersion_v2())
        found = []
        for index in range(nvml.nvmlDeviceGetCount()):
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            memory = nvml.nvmlDeviceGetMemoryInfo(handle)
            name = str(nvml.nvmlDeviceGetName(handle))
            found.append(GpuFacts(name=name, total_bytes=int(memory.total), used_bytes=int(memory.used)))
        return Program(version=version), f"{number // 1000}.{number % 1000 // 10}", tuple(found)
    except nvml.NVMLError as error:
        return Program(problem=f"NVML cannot read the GPUs: {error}"), "", ()
    finally:
        with contextlib.suppress(nvml.NVMLError):
            nvml.nvmlShutdown()


def _container() -> tuple[Program, bool | None]:
    """The first container engine that answers, and whether it has the NVIDIA runtime."""
    problem = "no docker and no podman here; only the compose fleet needs one"
    for name in ("docker", "podman"):
        if shutil.which(name) is None:
            continue
        tried = said([name, "info", "--format", "{{json .}}"], 8.0)
        try:
            answer = json.loads(tried.version)
        except ValueError:
            problem = f"{name} is installed and does not answer: {tried.problem or tried.version}"
            continue
        version = answer.get("ServerVersion") or (answer.get("version") or {}).get("Version") or ""
        return Program(version=f"{name} {version}".strip()), "nvidia" in (answer.get("Runtimes") or {})
    return Program(problem=problem), None


def _existing(path: Path) -> Path:
    return next(folder for folder in (path, *path.parents) if folder.exists())


def _writable(path: Path) -> str:
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
    return soft if soft >= 0 else 1 << 30  # -1 is no limit


def _available(limit: int | None, used: int | None) -> int:
    free = int(psutil.virtual_memory().available)
    return min(free, max(0, limit - (used or 0))) if limit is not None else free


def _cgroup() -> dict[str, int]:
    """Limits of the cgroup we are in, v2 or v1: memory, memory_used (bytes), cpu_millis, pids; what is there."""
    found: dict[str, int] = {}

    def read(name: str, *files: str) -> None:
        for file in files:
            with contextlib.suppress(OSError, ValueError):
                value = int((_CGROUP / file).read_text().split()[0])
                if 0 <= value < 1 << 60:  # v1 writes a huge number for "no limit"
                    found[name] = value
                return

    read("memory", "memory.max", "memory/memory.limit_in_bytes")
    read("memory_used", "memory.current", "memory/memory.usage_in_bytes")
    read("pids", "pids.max", "pids/pids.max")
    for quota_file, period_file in (("cpu.max", ""), ("cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us")):
        with contextlib.suppress(OSError, ValueError, IndexError):
            words = (_CGROUP / quota_file).read_text().split()
            period = (_CGROUP / period_file).read_text() if period_file else words[1]
            if int(words[0]) > 0:
                found["cpu_millis"] = int(words[0]) * 1000 // int(period)
    return found


def _ports(settings: FleetSettings) -> tuple[TakenPort, ...]:
    if not settings.port_base:
        return ()
    wanted = plan.Plan(settings, settings.port_base).ports()
    taken = [(port, owner) for port, owner in wanted if not probe.is_free(settings.host, port)]
    return tuple(TakenPort(port=port, owner=owner, holder=probe.holder(port)) for port, owner in taken)


def loopback(family: socket.AddressFamily, address: str) -> str:
    """ "" when a byte sent to `address` comes back, else why not."""
    try:
        with socket.socket(family, socket.SOCK_STREAM) as server:
            server.settimeout(2)
            server.bind((address, 0))
            server.listen(1)
            with socket.create_connection((address, server.getsockname()[1]), timeout=2) as client:
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
    """The proxy variable that applies to http://127.0.0.1, "" when none does."""
    spared = {word.strip() for name in ("no_proxy", "NO_PROXY") for word in environ.get(name, "").split(",")}
    if spared & {"*", "127.0.0.1", "127.0.0.0/8"}:
        return ""
    return next((name for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY") if environ.get(name)), "")


def _synchronised() -> bool | None:
    """What adjtimex(2) says; it only reads when no mode is set."""
    if sys.platform != "linux":
        return None
    buffer = (ctypes.c_long * 64)()
    answer = ctypes.CDLL(None, use_errno=True).adjtimex(ctypes.byref(buffer))
    return None if answer < 0 else answer != _TIME_ERROR
