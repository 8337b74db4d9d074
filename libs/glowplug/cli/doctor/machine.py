"""Can a fleet run on this machine? Pure: facts in, findings out."""

from collections.abc import Iterator
from dataclasses import dataclass

from glowplug.cli.doctor.findings import Finding, Findings
from glowplug.domain.units import show_bytes
from glowplug.runtime.supervisor.settings import SHM_NEEDED_BYTES

PYTHON_OLDEST = (3, 11)
MEMORY_NEEDED_BYTES = 1200 << 20  # the whole local fleet without engines stays below (README)
DISK_WARN_BYTES = 1 << 30
FILES_NEEDED = 1024  # sockets of one router at rest; its own bound is GLOWPLUG_MAX_CONNECTIONS
FILES_WANTED = 10_000
PIDS_NEEDED = 512
DRIVER_OLDEST = 525  # the first branch with CUDA 12
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
    """What was found. Bytes; None where it could not be read or does not exist."""

    python: tuple[int, int, int]
    wrong_setting: str = ""  # the first GLOWPLUG_* variable of `up` that is out of range
    state_dir: str
    state_dir_problem: str = ""  # why it cannot be written
    disk_free_bytes: int
    min_free_bytes: int  # below it `up` refuses to start
    memory_available_bytes: int
    memory_limit_bytes: int | None = None  # of the cgroup
    cpu_limit: float | None = None  # of the cgroup, in cores
    pids_limit: int | None = None
    num_cpus: int = 1
    shm_free_bytes: int | None = None
    open_files: int = 0  # soft limit
    host: str = "127.0.0.1"
    port_base: int = 8000
    ports_taken: tuple[TakenPort, ...] | None = None  # None: a fleet runs, here or elsewhere
    ipv4_loopback: str = ""  # "" or why it does not work
    ipv6_loopback: str = ""
    localhost: tuple[str, ...] = ()  # what the name resolves to
    proxy: str = ""  # the variable that would send loopback requests through a proxy
    clock_synchronised: bool | None = None
    nats: Program
    valkey: Program
    llamacpp: Program
    vllm: Program
    vllm_expected: bool = False  # the fleet's settings use it
    driver: Program
    driver_expected: bool = False  # GLOWPLUG_GPU_KIND is cuda
    cuda: str = ""
    gpus: tuple[GpuFacts, ...] = ()
    container: Program
    container_has_gpu: bool | None = None


def check(facts: MachineFacts) -> list[Finding]:
    """Every finding about the machine, the most basic first."""
    groups = (_python, _room, _limits, _network, _servers, _engines, _gpus, _containers)
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


def _room(facts: MachineFacts) -> Iterator[Finding]:
    free = show_bytes(facts.disk_free_bytes)
    if facts.state_dir_problem:
        yield _M.fail("disk", facts.state_dir_problem, "choose another place with --state-dir (GLOWPLUG_STATE_DIR)")
    elif facts.disk_free_bytes < facts.min_free_bytes:
        needed = f"{free} free for {facts.state_dir}, and the fleet needs {show_bytes(facts.min_free_bytes)}"
        yield _M.fail("disk", needed, "make room, or choose another place with --state-dir (GLOWPLUG_STATE_DIR)")
    elif facts.disk_free_bytes < DISK_WARN_BYTES:
        yield _M.warn(
            "disk", f"only {free} free for {facts.state_dir}", "make room: logs, JetStream and Valkey write there"
        )
    else:
        yield _M.ok("disk", f"{free} free for {facts.state_dir}")
    memory = show_bytes(facts.memory_available_bytes)
    if facts.memory_available_bytes < MEMORY_NEEDED_BYTES:
        yield _M.warn(
            "memory",
            f"{memory} available; a fleet without engines takes up to {show_bytes(MEMORY_NEEDED_BYTES)}",
            "end other programs, or start fewer nodes: glowplug up --nodes 1",
        )
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
        yield _M.warn(
            "open files",
            f"at most {facts.open_files} per process: a router takes 10000 connections (GLOWPLUG_MAX_CONNECTIONS)",
            "ulimit -n 65536 before starting",
        )
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
        yield _M.warn(
            "loopback",
            f"`localhost` is {', '.join(facts.localhost) or 'not resolved'}, and services listen on 127.0.0.1",
            "use 127.0.0.1 in addresses, or mend /etc/hosts",
        )
    else:
        yield _M.ok("loopback", "127.0.0.1 works and is what `localhost` means")
    if facts.ipv6_loopback:
        yield _M.skipped(
            "ipv6", f"::1 does not work ({facts.ipv6_loopback}); nothing needs it unless GLOWPLUG_HOST=::1"
        )
    else:
        yield _M.ok("ipv6", "::1 works")
    if facts.proxy:
        yield _M.warn(
            "proxy",
            f"{facts.proxy} is set and does not spare 127.0.0.1: curl and OpenAI clients would ask the proxy",
            "export NO_PROXY=127.0.0.1,localhost",
        )
    if facts.ports_taken is None:
        yield _M.skipped("ports", "the running fleet has its own")
    elif facts.ports_taken:
        first = facts.ports_taken[0]
        more = f", and {len(facts.ports_taken) - 1} more" if len(facts.ports_taken) > 1 else ""
        holder = f" by {first.holder}" if first.holder else ""
        yield _M.fail(
            "ports",
            f"port {first.port} on {facts.host}, needed by {first.owner}, is taken{holder}{more}",
            "free it, or choose other ports with --port-base (GLOWPLUG_PORT_BASE); 0 finds a free block",
        )
    else:
        yield _M.ok("ports", f"those of a fleet at {facts.port_base} are free on {facts.host}")
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
    if facts.vllm.problem and facts.vllm_expected:
        yield _M.fail("vllm", facts.vllm.problem, "make vllm-env")
    elif facts.vllm.absent:
        yield _M.skipped("vllm", facts.vllm.problem)
    elif facts.vllm.problem:
        yield _M.warn("vllm", f"it is installed and does not work: {facts.vllm.problem}", "make vllm-env")
    else:
        yield _M.ok("vllm", facts.vllm.version)


def _gpus(facts: MachineFacts) -> Iterator[Finding]:
    if facts.driver.problem:
        make = _M.fail if facts.driver_expected else _M.skipped
        yield make("gpu", facts.driver.problem, "install the NVIDIA driver, or set GLOWPLUG_GPU_KIND=host")
        return
    major = facts.driver.version.partition(".")[0]
    if major.isdecimal() and int(major) < DRIVER_OLDEST:
        yield _M.warn(
            "gpu driver", f"NVIDIA driver {facts.driver.version} is older than CUDA 12", "install driver 525 or newer"
        )
    else:
        yield _M.ok("gpu driver", f"NVIDIA driver {facts.driver.version}, CUDA {facts.cuda or 'unknown'}")
    if not facts.gpus:
        yield _M.fail(
            "gpu", "the NVIDIA driver answers but there is no GPU", "nvidia-smi -L; is it given to this container?"
        )
    for index, gpu in enumerate(facts.gpus):
        says = f"{gpu.name}, {show_bytes(gpu.total_bytes)}, {show_bytes(gpu.used_bytes)} used"
        if gpu.used_bytes > gpu.total_bytes // 2:
            yield _M.warn(
                f"gpu {index}",
                f"{says}: most of it is taken",
                "nvidia-smi shows by whom; an agent plans with all of it",
            )
        else:
            yield _M.ok(f"gpu {index}", says)


def _containers(facts: MachineFacts) -> Iterator[Finding]:
    if facts.container.problem:
        yield _M.skipped("containers", facts.container.problem)
    elif facts.gpus and facts.container_has_gpu is False:
        yield _M.warn(
            "containers",
            f"{facts.container.version} has no NVIDIA runtime: containers do not see the GPUs",
            "install nvidia-container-toolkit and run nvidia-ctk runtime configure",
        )
    else:
        yield _M.ok("containers", facts.container.version)
