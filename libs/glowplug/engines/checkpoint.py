"""A sleep for engines without one: the CUDA driver moves a process's GPU memory to host memory, then it is frozen.

SwapServeLLM does this to whole containers. Here: lock each CUDA process, checkpoint it, and freeze all processes
(freezer.py), in this order since a thread of the target copies; to wake, thaw, restore, unlock. The driver's limits:
x86-64, no managed memory, and before driver 610 no CUDA IPC, so no multi-GPU engine. Host memory must hold all of the
engine's GPU memory. Not measured yet (docs/gpu.md).
"""

import contextlib
import importlib
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any

LOCK_S = 5.0
_LEAST_CUDA = 12080


class CheckpointFailed(RuntimeError):
    """The engine could not be moved; the message gives its state."""


class CheckpointState(Enum):
    """NONE: it does not use CUDA, or cannot be queried."""

    NONE = "none"
    RUNNING = "running"
    LOCKED = "locked"
    CHECKPOINTED = "checkpointed"
    FAILED = "failed"


class Checkpoints:
    """The driver's functions (cuda.bindings.driver, 12.8 and newer). Calls block, for seconds where gigabytes move,
    and raise CheckpointFailed."""

    def __init__(self, driver: Any) -> None:
        self._driver = driver

    def state(self, pid: int) -> CheckpointState:
        status, *values = self._driver.cuCheckpointProcessGetState(pid)
        if status != self._driver.CUresult.CUDA_SUCCESS:
            return CheckpointState.NONE
        name = values[0].name.removeprefix("CU_PROCESS_STATE_")
        return CheckpointState[name] if name in CheckpointState.__members__ else CheckpointState.FAILED

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


def find(load: Callable[[str], Any] = importlib.import_module) -> tuple[Checkpoints | None, str]:
    try:
        driver = load("cuda.bindings.driver")
        success = driver.CUresult.CUDA_SUCCESS
        if driver.cuInit(0)[0] != success or driver.cuDeviceGetCount() == (success, 0):
            return None, "the NVIDIA driver has no GPU"
        version = int(driver.cuDriverGetVersion()[1])
    except (ImportError, RuntimeError, OSError) as error:
        return None, f"the CUDA driver cannot be queried: {error}"
    if version < _LEAST_CUDA:
        return None, f"the driver's CUDA is {version // 1000}.{version % 1000 // 10}: checkpoints came with 12.8"
    if not hasattr(driver, "cuCheckpointProcessLock"):
        return None, "this cuda-python has no checkpoints: they came with 12.8"
    return Checkpoints(driver), ""


def swap_out(checkpoints: Checkpoints, pids: Sequence[int]) -> list[int]:
    """Move GPU memory to host memory; return the processes that had any. Finishes an interrupted swap. Raises
    CheckpointFailed: they run as before then, unless the driver left them in a bad state."""
    using = [pid for pid in pids if checkpoints.state(pid) is not CheckpointState.NONE]
    if not using:
        said = ", ".join(dict.fromkeys(checkpoints.said(pid) for pid in pids)) or "it has none"
        raise CheckpointFailed(f"none of its processes uses a GPU ({said})")
    try:
        for pid in using:
            if checkpoints.state(pid) is CheckpointState.RUNNING:
                checkpoints.lock(pid)
        for pid in using:
            if checkpoints.state(pid) is CheckpointState.LOCKED:
                checkpoints.checkpoint(pid)
    except CheckpointFailed:
        for pid in using:
            with contextlib.suppress(CheckpointFailed):  # the first failure counts
                _back(checkpoints, pid)
        raise
    return using


def swap_in(checkpoints: Checkpoints, pids: Sequence[int], moved: Sequence[int] = ()) -> None:
    """Restore GPU memory; skip processes without any, unless `moved` out. Raises CheckpointFailed: such a process is
    unusable."""
    for pid in pids:
        if (state := checkpoints.state(pid)) is CheckpointState.FAILED:
            raise CheckpointFailed(f"process {pid} is {state.value}")
        if state is CheckpointState.NONE and pid in moved:
            raise CheckpointFailed(f"process {pid} was moved out, and the driver says {checkpoints.said(pid)}")
        _back(checkpoints, pid)


def _back(checkpoints: Checkpoints, pid: int) -> None:
    if checkpoints.state(pid) is CheckpointState.CHECKPOINTED:
        checkpoints.restore(pid)
    if checkpoints.state(pid) is CheckpointState.LOCKED:
        checkpoints.unlock(pid)
