"""A node's GPUs and their byte ledgers."""

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from glowplug.domain.errors import OutOfMemory
from glowplug.domain.hardware import Gpu, GpuRole, GrantOwner
from glowplug.memory import discovery
from glowplug.memory.discovery import HardwareUnavailable, budgeted_gpus, cuda_bytes, cuda_gpus, discover
from glowplug.memory.ledger import grant

GIB = 1 << 30


class FakeNvml:
    """NVML over (total, free) pairs."""

    class NVMLError(Exception):
        pass

    def __init__(self, memories: list[tuple[int, int]], failure: str = "") -> None:
        self.memories, self.failure, self.is_open = memories, failure, False

    def nvmlInit(self) -> None:
        if self.failure:
            raise self.NVMLError(self.failure)
        self.is_open = True

    def nvmlShutdown(self) -> None:
        self.is_open = False

    def nvmlDeviceGetCount(self) -> int:
        return len(self.memories)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetComputeRunningProcesses(self, index: int) -> list[Any]:
        """NVML does not know the bytes of 7."""
        return [SimpleNamespace(pid=5, usedGpuMemory=GIB << index), SimpleNamespace(pid=7, usedGpuMemory=None)]

    def nvmlDeviceGetMemoryInfo(self, index: int) -> Any:
        total, free = self.memories[index]
        return SimpleNamespace(total=total, free=free)


@pytest.mark.parametrize(("pids", "num_bytes"), [({5}, 3 * GIB), ({7}, 0), ({5, 7, 9}, 3 * GIB), (set(), 0)])
def test_what_processes_hold_is_summed_over_devices(pids: set[int], num_bytes: int) -> None:
    nvml = FakeNvml([(GIB, 0), (GIB, 0)])
    assert cuda_bytes(pids, nvml) == num_bytes and not nvml.is_open


def test_what_processes_hold_is_not_known_without_a_driver() -> None:
    with pytest.raises(HardwareUnavailable, match="not loaded"):
        cuda_bytes({5}, FakeNvml([], "not loaded"))


def test_host_budgets_become_gpus() -> None:
    found = budgeted_gpus("node-1", ["1MiB", "2MiB"])
    assert [(g.gpu_id, g.total_bytes, g.kind) for g in found.gpus] == [
        ("node-1/0", 1 << 20, "host"),
        ("node-1/1", 2 << 20, "host"),
    ]
    assert not found.warnings


def test_budgets_beyond_the_machine_are_said() -> None:
    assert "more than" in budgeted_gpus("node-1", ["4000GiB"]).warnings[0]


@pytest.mark.parametrize("budgets", [[], ["0"], ["1GiB", "0MiB"], ["one"]])
def test_bad_budgets_are_refused(budgets: list[str]) -> None:
    with pytest.raises(ValueError):
        budgeted_gpus("node-1", budgets)


def test_cuda_gpus_leave_headroom_and_tell_of_others() -> None:
    nvml = FakeNvml([(100 * GIB, 100 * GIB), (100 * GIB, 60 * GIB)])
    found = cuda_gpus("node-1", headroom_ratio=0.02, nvml=nvml)
    assert [(g.gpu_id, g.kind, g.total_bytes) for g in found.gpus] == [
        ("node-1/0", "cuda", 98 * GIB),
        ("node-1/1", "cuda", 98 * GIB),
    ]
    assert found.warnings == (f"node-1/1: others use {40 * GIB} bytes",)
    assert not nvml.is_open


def test_no_driver_has_a_reason() -> None:
    with pytest.raises(HardwareUnavailable, match="no NVIDIA driver answers: not loaded"):
        cuda_gpus("node-1", nvml=FakeNvml([], "not loaded"))


def test_no_device_has_a_reason() -> None:
    with pytest.raises(HardwareUnavailable, match="there is no GPU"):
        cuda_gpus("node-1", nvml=FakeNvml([]))


def test_missing_library_has_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with pytest.raises(HardwareUnavailable, match="nvidia-ml-py is not installed"):
        cuda_gpus("node-1")


def test_auto_falls_back_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    found = discover("node-1", "auto", ["1MiB"])
    assert found.gpus[0].kind == discovery.HOST and "stands in" in found.warnings[-1]


def test_unknown_kind() -> None:
    with pytest.raises(ValueError, match="unknown GPU kind 'tpu'"):
        discover("node-1", "tpu", ["1MiB"])


def test_emulated_gpus_need_no_memory_and_say_what_they_are() -> None:
    found = discover("node-1", "emulated", ["80GB"] * 200)
    assert {gpu.kind for gpu in found.gpus} == {"emulated"} and len(found.gpus) == 200
    assert found.warnings == ()


GPU = Gpu(gpu_id="n/0", total_bytes=100)


def test_grant_names_holder_and_owner() -> None:
    granted = grant(GPU, "i-1", {GrantOwner.WEIGHTS: 60, GrantOwner.KV: 30})
    assert [(g.holder, g.owner, g.num_bytes) for g in granted.grants] == [("i-1", "weights", 60), ("i-1", "kv", 30)]
    assert granted.free_bytes == 10 and granted.role is GpuRole.DEDICATED
    assert GPU.free_bytes == 100


def test_grant_is_all_or_nothing() -> None:
    with pytest.raises(OutOfMemory, match="100 B of 100 B free, i-1 needs 101 B"):
        grant(GPU, "i-1", {GrantOwner.WEIGHTS: 90, GrantOwner.KV: 11})


@pytest.mark.parametrize("shares", [{GrantOwner.KV: -1}, {GrantOwner.WEIGHTS: 5, GrantOwner.KV: -5}])
def test_negative_bytes_are_refused(shares: dict[GrantOwner, int]) -> None:
    with pytest.raises(ValueError, match="negative"):
        grant(GPU, "i-1", shares)


def test_a_holder_holds_once() -> None:
    with pytest.raises(ValueError, match="holds bytes"):
        grant(grant(GPU, "i-1", {GrantOwner.KV: 1}), "i-1", {GrantOwner.KV: 1})


def test_roles_follow_owners() -> None:
    prewarmed = grant(GPU, "r-1", {GrantOwner.PREWARM: 10})
    assert prewarmed.role is GpuRole.UNIVERSAL
    assert grant(prewarmed, "i-1", {GrantOwner.WEIGHTS: 10}).role is GpuRole.DEDICATED
