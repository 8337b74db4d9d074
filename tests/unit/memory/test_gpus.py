"""What GPUs a node has, with and without hardware, and the byte ledger of each, whose owners are named."""

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from glowplug.domain.errors import OutOfMemory
from glowplug.domain.hardware import Gpu, GpuRole, GrantOwner
from glowplug.memory import discovery
from glowplug.memory.discovery import HardwareUnavailable, budgeted_gpus, cuda_bytes, cuda_gpus, discover
from glowplug.memory.ledger import ByteLedger, grant, release, shrink

GIB = 1 << 30


class FakeNvml:
    """NVML's calls over given (total, free) pairs."""

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
        """Each device runs one process of 5, and 7 whose bytes NVML does not know."""
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
    assert found.warnings == (f"node-1/1: {40 * GIB} bytes are taken by others",)
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


def test_exactly_full_fits() -> None:
    assert grant(GPU, "i-1", {GrantOwner.WEIGHTS: 100}).free_bytes == 0


@pytest.mark.parametrize("shares", [{GrantOwner.KV: -1}, {GrantOwner.WEIGHTS: 5, GrantOwner.KV: -5}])
def test_negative_bytes_are_refused(shares: dict[GrantOwner, int]) -> None:
    with pytest.raises(ValueError, match="negative"):
        grant(GPU, "i-1", shares)


def test_a_holder_holds_once() -> None:
    with pytest.raises(ValueError, match="holds bytes"):
        grant(grant(GPU, "i-1", {GrantOwner.KV: 1}), "i-1", {GrantOwner.KV: 1})


def test_release_gives_everything_back_and_is_idempotent() -> None:
    granted = grant(GPU, "i-1", {GrantOwner.WEIGHTS: 60})
    assert release(granted, "i-1") == GPU
    assert release(granted, "i-2") is granted


def test_roles_follow_owners() -> None:
    prewarmed = grant(GPU, "r-1", {GrantOwner.PREWARM: 10})
    assert prewarmed.role is GpuRole.UNIVERSAL
    assert grant(prewarmed, "i-1", {GrantOwner.WEIGHTS: 10}).role is GpuRole.DEDICATED


def test_ledger_of_a_node() -> None:
    ledger = ByteLedger([GPU, Gpu(gpu_id="n/1", total_bytes=50)])
    ledger.exchange((), "i-1", {"n/0": {GrantOwner.WEIGHTS: 10}, "n/1": {GrantOwner.WEIGHTS: 20}})
    assert ledger.holders == {"i-1"} and ledger.held_bytes("i-1") == 30
    assert ledger.release("i-1") == 30 and ledger.release("i-1") == 0
    assert [gpu.used_bytes for gpu in ledger.gpus] == [0, 0]


def test_shrink_frees_what_one_owner_no_longer_needs() -> None:
    granted = grant(GPU, "i-1", {GrantOwner.WEIGHTS: 40, GrantOwner.KV: 50})
    cut = shrink(granted, "i-1", GrantOwner.KV, 20)
    assert [(g.owner, g.num_bytes) for g in cut.grants] == [("weights", 40), ("kv", 20)] and cut.free_bytes == 40
    assert shrink(granted, "i-1", GrantOwner.KV, 50) is granted
    assert [g.owner for g in shrink(granted, "i-1", GrantOwner.KV, 0).grants] == ["weights"]


@pytest.mark.parametrize("num_bytes", [-1, 51])
def test_shrink_never_grows(num_bytes: int) -> None:
    with pytest.raises(ValueError, match="i-1 holds 50 bytes of n/0 for kv"):
        shrink(grant(GPU, "i-1", {GrantOwner.KV: 50}), "i-1", GrantOwner.KV, num_bytes)


def test_ledger_shrinks_one_gpu_of_a_group() -> None:
    ledger = ByteLedger([GPU, Gpu(gpu_id="n/1", total_bytes=50)])
    ledger.exchange((), "i-1", {"n/0": {GrantOwner.KV: 40}, "n/1": {GrantOwner.KV: 40}})
    assert ledger.shrink("n/1", "i-1", GrantOwner.KV, 10) == 30
    assert [gpu.used_bytes for gpu in ledger.gpus] == [40, 10]
    with pytest.raises(ValueError, match="no GPU 'n/7'"):
        ledger.shrink("n/7", "i-1", GrantOwner.KV, 0)


def test_exchange_is_one_step() -> None:
    ledger = ByteLedger([GPU, Gpu(gpu_id="n/1", total_bytes=50)])
    ledger.exchange((), "r-1", {"n/0": {GrantOwner.PREWARM: 60}})
    ledger.exchange((), "r-2", {"n/1": {GrantOwner.PREWARM: 30}})
    before = ledger.gpus
    with pytest.raises(OutOfMemory):
        ledger.exchange(("r-1",), "i-1", {"n/0": {GrantOwner.KV: 90}, "n/1": {GrantOwner.KV: 21}})
    assert ledger.gpus == before
    ledger.exchange(("r-1", "r-2", "r-3"), "i-1", {"n/0": {GrantOwner.KV: 90}, "n/1": {GrantOwner.KV: 21}})
    assert ledger.holders == {"i-1"} and ledger.held_bytes("i-1") == 111


def test_exchange_may_give_a_holder_other_bytes() -> None:
    ledger = ByteLedger([GPU])
    ledger.exchange((), "i-1", {"n/0": {GrantOwner.WEIGHTS: 40, GrantOwner.KV: 60}})
    ledger.exchange(("i-1",), "i-1", {"n/0": {GrantOwner.PREWARM: 40}})
    assert ledger.held_bytes("i-1") == 40 and ledger.gpus[0].role is GpuRole.UNIVERSAL
    with pytest.raises(OutOfMemory, match="no GPU 'n/7'"):
        ledger.exchange((), "i-2", {"n/7": {GrantOwner.KV: 1}})
