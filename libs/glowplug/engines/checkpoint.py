"""A sleep for engines that have none: the CUDA driver moves a process' GPU memory to host memory, then it is frozen.

SwapServeLLM does this to whole containers. Here: lock each CUDA process of the engine, checkpoint it (the device memory
is free then), and freeze all of its processes (freezer.py); to wake, thaw, restore, unlock. A thread of the target
copies, so it is frozen after the checkpoint. What is known of the driver: x86-64 alone, no managed memory, and before
driver 610 no memory shared between processes by CUDA's IPC, so no engine of several GPUs. Host memory must hold all
that the engine had on its GPUs, KV cache included. Not measured yet (docs/gpu.md).
"""

import contextlib
import importlib
import subprocess
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any, Protocol

LOCK_S = 5.0  # until what runs on the GPU has ended
_LEAST_CUDA = 12080
_LEAST_BRANCH = 570  # of the driver: before, there was no lock that ends in time
_COMMAND = "cuda-checkpoint"
_COMMAND_S = 120.0


class CheckpointFailed(RuntimeError):
    """The engine could not be moved; the message says where it stands."""


class State(Enum):
    """Where a process is. NONE: it does not use CUDA, or cannot be asked."""

    NONE = "none"
    RUNNING = "running"
    LOCKED = "locked"
    CHECKPOINTED = "checkpointed"
    FAILED = "failed"


class Checkpoints(Protocol):
    """One process at a time. Each call blocks, for seconds where gigabytes move, and raises CheckpointFailed."""

    def state(self, pid: int) -> State: ...

    def said(self, pid: int) -> str:
        """What the driver says of its state, in its words."""

    def lock(self, pid: int) -> None: ...

    def checkpoint(self, pid: int) -> None: ...

    def restore(self, pid: int) -> None: ...

    def unlock(self, pid: int) -> None: ...


class DriverCheckpoints:
    """By the functions of the CUDA driver (cuda.bindings.driver, 12.8 and newer)."""

    def __init__(self, driver: Any) -> None:
        self._driver = driver

    def state(self, pid: int) -> State:
        status, *values = self._driver.cuCheckpointProcessGetState(pid)
        if status != self._driver.CUresult.CUDA_SUCCESS:
            return State.NONE
        name = values[0].name.removeprefix("CU_PROCESS_STATE_")
        return State[name] if name in State.__members__ else State.FAILED

    def said(self, pid: int) -> str:
        return str(self._driver.cuCheckpointProcessGetState(pid)[0].name)

    def lock(self, pid: int) -> None:
        args = self._driver.CUcheckpointLockArgs()
        args.timeoutMs = int(LOCK_S * 1000)
        self._call("cuCheckpointProcessLock", pid, args)

    def checkpoint(self, pid: int) -> None:
        self._call("cuCheckpointProcessCheckpoint", pid, None)

    def restore(self, pid: int) -> None:
        self._call("cuCheckpointProcessRestore", pid, None)

    def unlock(self, pid: int) -> None:
        self._call("cuCheckpointProcessUnlock", pid, None)

    def _call(self, name: str, pid: int, args: Any) -> None:
        (status,) = getattr(self._driver, name)(pid, args)
        if status != self._driver.CUresult.CUDA_SUCCESS:
            raise CheckpointFailed(f"{name} of process {pid}: {status.name}")


Run = Callable[[Sequence[str]], tuple[int, str]]


def _run(argv: Sequence[str]) -> tuple[int, str]:
    """Exit status and what it printed."""
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=_COMMAND_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CheckpointFailed(f"{argv[0]}: {error}") from error
    return done.returncode, (done.stdout + done.stderr).strip()


class CommandCheckpoints:
    """By NVIDIA's `cuda-checkpoint` command, where the driver's functions are not there."""

    def __init__(self, command: str = _COMMAND, run: Run = _run) -> None:
        self._command, self._run = command, run

    def state(self, pid: int) -> State:
        status, said = self._run([self._command, "--get-state", "--pid", str(pid)])
        if status:
            return State.NONE
        return State[said.upper()] if said.upper() in State.__members__ else State.FAILED

    def said(self, pid: int) -> str:
        return self._run([self._command, "--get-state", "--pid", str(pid)])[1][:200]

    def lock(self, pid: int) -> None:
        self._call("lock", pid, "--timeout", str(int(LOCK_S * 1000)))

    def checkpoint(self, pid: int) -> None:
        self._call("checkpoint", pid)

    def restore(self, pid: int) -> None:
        self._call("restore", pid)

    def unlock(self, pid: int) -> None:
        self._call("unlock", pid)

    def _call(self, action: str, pid: int, *more: str) -> None:
        status, said = self._run([self._command, "--action", action, "--pid", str(pid), *more])
        if status:
            raise CheckpointFailed(f"{self._command} {action} of process {pid}: {said[:200]}")


def find(load: Callable[[str], Any] = importlib.import_module, run: Run = _run) -> tuple[Checkpoints | None, str]:
    """What this machine has, else the reason why engines cannot be checkpointed here."""
    try:
        driver = load("cuda.bindings.driver")
        success = driver.CUresult.CUDA_SUCCESS
        if driver.cuInit(0)[0] != success or driver.cuDeviceGetCount() == (success, 0):
            return None, "the NVIDIA driver has no GPU"
        version = int(driver.cuDriverGetVersion()[1])
    except (ImportError, RuntimeError, OSError) as error:  # no package, or no library of the driver
        return _by_command(run, f"no CUDA driver can be asked: {error}")
    if version < _LEAST_CUDA:
        return None, f"the driver's CUDA is {version // 1000}.{version % 1000 // 10}: checkpoints came with 12.8"
    if not hasattr(driver, "cuCheckpointProcessLock"):
        return _by_command(run, "this cuda-python has no checkpoints: they came with 12.8")
    return DriverCheckpoints(driver), ""


def _by_command(run: Run, reason: str) -> tuple[Checkpoints | None, str]:
    """Where command and driver are new enough for what is asked of them; else `reason` and why this does not help."""
    try:
        branch = run(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"])[1].partition(".")[0]
        knows_actions = "--action" in run([_COMMAND, "--help"])[1]
    except CheckpointFailed as error:
        return None, f"{reason}; {error}"
    if not branch.isdigit() or int(branch) < _LEAST_BRANCH or not knows_actions:
        return None, f"{reason}; {_COMMAND} needs a driver of branch {_LEAST_BRANCH} and a release of that age"
    return CommandCheckpoints(_COMMAND), ""


def swap_out(checkpoints: Checkpoints, pids: Sequence[int]) -> list[int]:
    """Move the GPU memory of these processes to host memory; returns those that had any. One that was broken off is
    brought to its end. Raises CheckpointFailed: they run as before then, if the driver kept them in a good state, which
    it does not promise."""
    using = [pid for pid in pids if checkpoints.state(pid) is not State.NONE]
    if not using:
        said = ", ".join(dict.fromkeys(checkpoints.said(pid) for pid in pids)) or "it has none"
        raise CheckpointFailed(f"none of its processes uses a GPU ({said})")
    try:
        for pid in using:
            if checkpoints.state(pid) is State.RUNNING:
                checkpoints.lock(pid)
        for pid in using:
            if checkpoints.state(pid) is State.LOCKED:
                checkpoints.checkpoint(pid)
    except CheckpointFailed:
        for pid in using:
            with contextlib.suppress(CheckpointFailed):  # the first failure is the reason that counts
                _back(checkpoints, pid)
        raise
    return using


def swap_in(checkpoints: Checkpoints, pids: Sequence[int], moved: Sequence[int] = ()) -> None:
    """Give the processes their GPU memory back and let them run; what has none is left alone, unless it was `moved`
    out. Raises CheckpointFailed: such a process cannot be used any more."""
    for pid in pids:
        if (state := checkpoints.state(pid)) is State.FAILED:
            raise CheckpointFailed(f"process {pid} is {state.value}")
        if state is State.NONE and pid in moved:
            raise CheckpointFailed(f"process {pid} was moved out, and the driver says {checkpoints.said(pid)}")
        _back(checkpoints, pid)


def _back(checkpoints: Checkpoints, pid: int) -> None:
    if checkpoints.state(pid) is State.CHECKPOINTED:
        checkpoints.restore(pid)
    if checkpoints.state(pid) is State.LOCKED:
        checkpoints.unlock(pid)
