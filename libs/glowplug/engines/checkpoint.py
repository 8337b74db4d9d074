"""A sleep for engines that have none: the CUDA driver moves a process' GPU memory to host memory, then it is frozen.

SwapServeLLM does this to whole containers. Here: lock each CUDA process of the engine, checkpoint it (the device memory
is free then), and freeze all of its processes (freezer.py); to wake, thaw, restore, unlock. A thread of the target
copies, so it is frozen after the checkpoint. What is known of the driver: x86-64 alone, no managed memory, and before
driver 610 no memory shared between processes by CUDA's IPC, so no engine of several GPUs. Host memory must hold all
that the engine had on its GPUs, KV cache included. Not measured yet (docs/gpu.md).
"""

import contextlib
import importlib
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any

LOCK_S = 5.0  # until what runs on the GPU has ended
_LEAST_CUDA = 12080


class CheckpointFailed(RuntimeError):
    """The engine could not be moved; the message says where it stands."""


class State(Enum):
    """Where a process is. NONE: it does not use CUDA, or cannot be asked."""

    NONE = "none"
    RUNNING = "running"
    LOCKED = "locked"
    CHECKPOINTED = "checkpointed"
    FAILED = "failed"


class Checkpoints:
    """The driver's functions (cuda.bindings.driver, 12.8 and newer), for one process at a time. Each call blocks, for
    seconds where gigabytes move, and raises CheckpointFailed."""

    def __init__(self, driver: Any) -> None:
        self._driver = driver

    def state(self, pid: int) -> State:
        status, *values = self._driver.cuCheckpointProcessGetState(pid)
        if status != self._driver.CUresult.CUDA_SUCCESS:
            return State.NONE
        name = values[0].name.removeprefix("CU_PROCESS_STATE_")
        return State[name] if name in State.__members__ else State.FAILED

    def said(self, pid: int) -> str:
        """What the driver says of its state, in its words."""
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
    """What this machine has, else the reason why engines cannot be checkpointed here."""
    try:
        driver = load("cuda.bindings.driver")
        success = driver.CUresult.CUDA_SUCCESS
        if driver.cuInit(0)[0] != success or driver.cuDeviceGetCount() == (success, 0):
            return None, "the NVIDIA driver has no GPU"
        version = int(driver.cuDriverGetVersion()[1])
    except (ImportError, RuntimeError, OSError) as error:  # no package, or no library of the driver
        return None, f"no CUDA driver can be asked: {error}"
    if version < _LEAST_CUDA:
        return None, f"the driver's CUDA is {version // 1000}.{version % 1000 // 10}: checkpoints came with 12.8"
    if not hasattr(driver, "cuCheckpointProcessLock"):
        return None, "this cuda-python has no checkpoints: they came with 12.8"
    return Checkpoints(driver), ""


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
