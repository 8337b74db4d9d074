"""Discover a node's GPUs: a host-memory budget on a laptop, NVIDIA hardware through NVML, or emulated ones."""

import importlib
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import psutil

from glowplug.domain.hardware import Gpu
from glowplug.domain.units import parse_bytes

HOST, CUDA, EMULATED = "host", "cuda", "emulated"


class HardwareUnavailable(RuntimeError):
    """The message gives a person the reason."""


@dataclass(frozen=True, slots=True)
class Discovery:
    """GPUs without grants, and warnings for a person."""

    gpus: tuple[Gpu, ...]
    warnings: tuple[str, ...] = ()


def budgeted_gpus(node_id: str, budgets: Sequence[str], kind: str = HOST) -> Discovery:
    """One GPU of `kind` per budget ("1GiB"). Warns when host GPUs exceed this machine's memory. Raises ValueError
    for a malformed or zero budget."""
    sizes = [parse_bytes(text) for text in budgets]
    if not sizes or min(sizes) <= 0:
        raise ValueError(f"a node needs at least one GPU of more than 0 bytes, got {list(budgets)}")
    gpus = tuple(Gpu(gpu_id=f"{node_id}/{i}", total_bytes=size, kind=kind) for i, size in enumerate(sizes))
    installed = psutil.virtual_memory().total
    if kind != HOST or sum(sizes) <= installed:
        return Discovery(gpus)
    return Discovery(gpus, (f"budgets of {sum(sizes)} bytes are more than the {installed} bytes of memory here",))


def cuda_gpus(node_id: str, *, headroom_ratio: float = 0.02, nvml: Any = None) -> Discovery:
    """One `cuda` GPU per NVIDIA device: its total bytes less `headroom_ratio` (driver and contexts). NVML comes
    through nvidia-ml-py, imported only here. Raises HardwareUnavailable."""
    gpus, warnings = [], []
    with _devices("the GPUs", nvml) as (opened, devices):
        for index, device in enumerate(devices):
            memory = opened.nvmlDeviceGetMemoryInfo(device)
            usable = int(memory.total * (1 - headroom_ratio))
            gpus.append(Gpu(gpu_id=f"{node_id}/{index}", total_bytes=usable, kind=CUDA))
            if memory.free < usable:
                warnings.append(f"{node_id}/{index}: others use {int(memory.total - memory.free)} bytes")
    if not gpus:
        raise HardwareUnavailable("the NVIDIA driver answers but there is no GPU")
    return Discovery(tuple(gpus), tuple(warnings))


def cuda_bytes(pids: Collection[int], nvml: Any = None) -> int:
    """Sum these processes' bytes on all devices. Raises HardwareUnavailable."""
    with _devices("what processes hold", nvml) as (opened, devices):
        used = [one for device in devices for one in opened.nvmlDeviceGetComputeRunningProcesses(device)]
        return sum(int(one.usedGpuMemory or 0) for one in used if one.pid in pids)


@contextmanager
def _devices(what: str, nvml: Any) -> Iterator[tuple[Any, list[Any]]]:
    """`what` is for errors. Raises HardwareUnavailable."""
    nvml = nvml or _nvml()
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        raise HardwareUnavailable(f"no NVIDIA driver answers: {error}") from error
    try:
        yield nvml, [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
    except nvml.NVMLError as error:
        raise HardwareUnavailable(f"NVML cannot read {what}: {error}") from error
    finally:
        nvml.nvmlShutdown()


def _nvml() -> Any:
    try:
        return importlib.import_module("pynvml")
    except ImportError as error:
        raise HardwareUnavailable("nvidia-ml-py is not installed: pip install 'glowplug[gpu]'") from error


def discover(node_id: str, kind: str, budgets: Sequence[str]) -> Discovery:
    """`kind`: "host" or "emulated" (budgets), "cuda", or "auto": cuda if readable, else host with the reason as
    warning.

    Raises ValueError for another kind, HardwareUnavailable for "cuda" without it.
    """
    if kind in (HOST, EMULATED):
        return budgeted_gpus(node_id, budgets, kind)
    if kind == CUDA:
        return cuda_gpus(node_id)
    if kind != "auto":
        raise ValueError(f"unknown GPU kind {kind!r}: one of host, cuda, auto, emulated")
    try:
        return cuda_gpus(node_id)
    except HardwareUnavailable as error:
        found = budgeted_gpus(node_id, budgets)
        return Discovery(found.gpus, (*found.warnings, f"host memory stands in for GPUs: {error}"))
