"""What this machine is like: files, limits, ports, programs. Everything is bounded in time and changes nothing."""

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
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
from pydantic import ValidationError

from glowplug.cli.doctor.machine import GpuFacts, MachineFacts, Program, TakenPort
from glowplug.engines import vllm_env
from glowplug.runtime.settings import explain
from glowplug.runtime.supervisor import embedded, plan, probe
from glowplug.runtime.supervisor.settings import FleetSettings, NotInstalled, WrongSetting, check_services

PROGRAM_S, VLLM_S = 20.0, 90.0  # importing vLLM takes 15 s on two idle cores
_TIME_ERROR = 5
_CGROUP = Path("/sys/fs/cgroup")


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
        nats, valkey = pool.submit(_nats, settings.nats_url), pool.submit(_valkey, settings.redis_url)
        llamacpp, vllm = pool.submit(_llamacpp), pool.submit(_vllm, deep or settings.engine == "vllm")
        container = pool.submit(_container)
        driver, cuda, gpus = _nvidia()
        limits = _cgroup()
        engine, has_gpu = container.result()
        return MachineFacts(
            python=(sys.version_info.major, sys.version_info.minor, sys.version_info.micro),
            wrong_setting=wrong,
            state_dir=str(settings.state_dir),
            state_dir_problem=_writable(settings.state_dir),
            disk_free_bytes=shutil.disk_usage(_existing(settings.state_dir)).free,
            min_free_bytes=settings.min_free_bytes,
            memory_available_bytes=_available(limits.get("memory"), limits.get("memory_used")),
            memory_limit_bytes=limits.get("memory"),
            cpu_limit=limits["cpu_millis"] / 1000 if "cpu_millis" in limits else None,
            pids_limit=limits.get("pids"),
            num_cpus=os.cpu_count() or 1,
            shm_free_bytes=_shm_free(),
            open_files=_open_files(),
            host=settings.host,
            port_base=settings.port_base,
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
            vllm_expected=settings.engine == "vllm",
            driver=driver,
            driver_expected=settings.gpu_kind == "cuda",
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
    lines = [line.strip() for line in (done.stdout or done.stderr).splitlines() if line.strip()]
    if done.returncode:
        errors = [line.strip() for line in (done.stderr or done.stdout).splitlines() if line.strip()]
        return Program(problem=f"{argv[0]} fails: {errors[-1] if errors else f'exit code {done.returncode}'}")
    return Program(version=lines[-1] if lines else argv[0])


def _nats(url: str) -> Program:
    if url:
        return Program(version="not needed here: GLOWPLUG_NATS_URL names a server")
    try:
        return said([str(embedded.find_nats()), "--version"])
    except (NotInstalled, subprocess.TimeoutExpired) as error:
        return Program(problem=str(error))


def _valkey(url: str) -> Program:
    if url:
        return Program(version="not needed here: GLOWPLUG_REDIS_URL names a server")
    try:
        return said([str(embedded.find_valkey()), "--version"])
    except NotInstalled as error:
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
