"""A node's GPUs and their byte ledgers."""

import sys
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from glowplug.domain.errors import OutOfMemory
from glowplug.domain.hardware import Gpu, GpuRole, GrantOwner
from glowplug.memory import discovery
from glowplug.memory.discovery import HardwareUnavailable, budgeted_gpus, cuda_bytes, cuda_gpus, discover
from glowplug.memory.ledger import ByteLedger, grant, release, shrink

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


def test_budgets_as_large_as_the_machine_are_no_matter() -> None:
    installed = psutil.virtual_memory().total
    assert budgeted_gpus("node-1", [f"{installed - 1}B", "1B"]).warnings == ()
    assert len(budgeted_gpus("node-1", [f"{installed}B", "1B"]).warnings) == 1


@pytest.mark.parametrize("budgets", [[], ["0"], ["1GiB", "0MiB"], ["one"]])
def test_bad_budgets_are_refused(budgets: list[str]) -> None:
    with pytest.raises(ValueError):
        budgeted_gpus("node-1", budgets)


def test_cuda_gpus_leave_headroom_and_tell_of_others() -> None:
    nvml = FakeNvml([(100 * GIB, 98 * GIB), (100 * GIB, 60 * GIB)])
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
    assert discover("node-1", "host", ["1MiB"]).warnings == ()
    with pytest.raises(HardwareUnavailable):
        discover("node-1", "cuda", ["1MiB"])


def test_auto_is_the_hardware_where_it_can_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml([(100 * GIB, 100 * GIB)]))
    for kind in ("auto", "cuda"):
        (gpu,) = discover("node-1", kind, ["1MiB"]).gpus
        assert (gpu.kind, gpu.total_bytes) == ("cuda", 98 * GIB)


def test_a_device_that_cannot_be_read_has_a_reason() -> None:
    nvml = FakeNvml([(GIB, GIB)])
    with pytest.raises(HardwareUnavailable, match="NVML cannot read the GPUs"), discovery._devices("the GPUs", nvml):
        raise nvml.NVMLError("lost")
    assert not nvml.is_open


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


W, KV, PREWARM, SLEEPER = GrantOwner.WEIGHTS, GrantOwner.KV, GrantOwner.PREWARM, GrantOwner.SLEEPER


@pytest.mark.parametrize(
    ("shares", "role"),
    [
        ({W: 1}, GpuRole.DEDICATED),
        ({KV: 1}, GpuRole.DEDICATED),
        ({PREWARM: 1, KV: 1}, GpuRole.DEDICATED),
        ({PREWARM: 1}, GpuRole.UNIVERSAL),
        ({GrantOwner.RESERVATION: 1}, GpuRole.IDLE),
        ({SLEEPER: 1}, GpuRole.IDLE),
        ({W: 0}, GpuRole.IDLE),
    ],
)
def test_a_role_is_by_what_is_held(shares: dict[GrantOwner, int], role: GpuRole) -> None:
    granted = grant(GPU, "i-1", shares)
    assert granted.role is role and [g.num_bytes for g in granted.all_grants] == [n for n in shares.values() if n]
    assert release(granted, "i-1") == GPU and release(granted, "i-2") is granted


@pytest.mark.parametrize(
    ("shares", "fits"),
    [
        ({W: 40}, True),
        ({W: 41}, False),
        ({SLEEPER: 40}, True),
        ({SLEEPER: 41}, False),
        ({W: 10, SLEEPER: 30}, True),
        ({W: 10, SLEEPER: 31}, False),
    ],
)
def test_what_is_granted_fits_beside_the_others_though_one_that_sleeps_counts_as_free(
    shares: dict[GrantOwner, int], fits: bool
) -> None:
    gpu = grant(grant(GPU, "i-1", {W: 60}), "s-1", {SLEEPER: 40})
    assert (gpu.free_bytes, gpu.lacking_bytes) == (40, 0)
    if fits:
        assert grant(gpu, "i-2", shares).free_bytes == 40 - shares.get(W, 0)
    else:
        with pytest.raises(OutOfMemory):
            grant(gpu, "i-2", shares)
    with pytest.raises(ValueError, match="holds bytes"):
        grant(gpu, "s-1", shares)
    assert release(gpu, "s-1").sleepers == ()


def held(gpu: Gpu) -> dict[str, list[int]]:
    return {name: [g.num_bytes for g in gpu.grants if g.holder == name] for name in {g.holder for g in gpu.grants}}


def test_shared_weights_are_granted_once_and_the_last_holder_gets_them_back() -> None:
    one = grant(GPU, "a", {W: 40, KV: 5}, ("k", 40))
    assert (one.free_bytes, held(one)) == (55, {"a": [40, 5]})
    other = grant(one, "x", {W: 20}, ("other", 15))
    two = grant(other, "b", {PREWARM: 50}, ("k", 40))
    assert (two.free_bytes, held(two)) == (25, {"a": [0, 5], "x": [20], "b": [10]})
    three = grant(two, "c", {W: 65}, ("k", 40))
    assert (three.free_bytes, held(three)) == (0, {"a": [0, 5], "x": [20], "b": [10], "c": [25]})
    assert {one.key: one.holders for one in three.shared} == {"k": ("a", "b", "c"), "other": ("x",)}
    with pytest.raises(OutOfMemory):
        grant(two, "c", {W: 66}, ("k", 40))
    fewer = release(three, "a")
    assert (fewer.free_bytes, held(fewer)) == (5, {"x": [20], "b": [10], "c": [25]})
    back = release(fewer, "c")
    assert (back.free_bytes, held(back), back.role) == (30, {"x": [20], "b": [50]}, GpuRole.DEDICATED)
    assert release(release(back, "b"), "x") == GPU


@pytest.mark.parametrize(
    ("shares", "shared", "is_refused"),
    [
        ({W: 40}, ("k", 40), False),
        ({W: 40}, ("new", 41), True),
        ({W: 40}, ("new", -1), True),
        ({W: 40}, ("k", 30), True),
        ({W: 40}, ("k", 0), False),
        ({KV: 40}, ("k", 40), True),
        ({W: 40, PREWARM: 1}, ("k", 40), True),
        ({W: 40}, ("new", 1), False),
    ],
)
def test_a_part_of_its_own_weights_is_shared_as_large_as_the_others_share_it(
    shares: dict[GrantOwner, int], shared: tuple[str, int], is_refused: bool
) -> None:
    gpu = grant(GPU, "a", {W: 40}, ("k", 40))
    if is_refused:
        with pytest.raises(ValueError, match="cannot share"):
            grant(gpu, "b", shares, shared)
    else:
        assert len(grant(gpu, "b", shares, shared).grants) == 2


@pytest.mark.parametrize(
    ("holder", "owner", "keep", "expected"),
    [
        ("a", KV, 9, [("a", W, 20), ("a", KV, 9), ("b", W, 20), ("b", KV, 10)]),
        ("a", KV, 0, [("a", W, 20), ("b", W, 20), ("b", KV, 10)]),
        ("a", W, 20, None),
        ("a", PREWARM, 0, None),
        ("a", KV, 11, "holds 10 bytes"),
        ("a", KV, -1, "holds 10 bytes"),
        ("c", KV, 1, "holds 0 bytes"),
        ("b", W, 10, "shares its weights"),
        ("b", KV, 0, [("a", W, 20), ("a", KV, 10), ("b", W, 20)]),
    ],
)
def test_a_grant_is_cut_down_to_what_its_holder_keeps(
    holder: str, owner: GrantOwner, keep: int, expected: list[tuple[str, GrantOwner, int]] | str | None
) -> None:
    gpu = grant(grant(GPU, "a", {W: 20, KV: 10}), "b", {W: 20, KV: 10}, ("k", 5))
    gpu = grant(gpu, "d", {W: 5}, ("other", 5))
    if isinstance(expected, str):
        with pytest.raises(ValueError, match=expected):
            shrink(gpu, holder, owner, keep)
        return
    cut = shrink(gpu, holder, owner, keep)
    assert cut is gpu or [(g.holder, g.owner, g.num_bytes) for g in cut.grants if g.holder != "d"] == expected
    assert (cut is gpu) == (expected is None)


def test_a_gpu_whose_engine_keeps_nothing_is_idle() -> None:
    assert shrink(grant(GPU, "a", {KV: 10}), "a", KV, 0) == GPU


def test_the_ledger_of_a_node_tells_who_holds_what_and_what_came_free() -> None:
    ledger = ByteLedger([GPU, Gpu(gpu_id="n/1", total_bytes=50)])
    ledger.exchange((), "a", {"n/0": {W: 60, KV: 10}, "n/1": {W: 20}})
    ledger.exchange((), "s", {"n/0": {SLEEPER: 30}})
    assert (ledger.holders, ledger.held_bytes("a"), ledger.held_bytes("s")) == ({"a", "s"}, 90, 30)
    before = ledger.gpus
    for bytes_by_gpu in ({"n/1": {W: 31}}, {"n/0": {W: 1}, "n/2": {W: 1}}):
        with pytest.raises(OutOfMemory):
            ledger.exchange(["s"], "b", bytes_by_gpu)
    with pytest.raises(ValueError, match="no GPU"):
        ledger.shrink("n/2", "a", KV, 0)
    assert ledger.gpus == before
    assert ledger.shrink("n/0", "a", KV, 4) == 6 and ledger.held_bytes("a") == 84
    assert (ledger.release("s"), ledger.release("a"), ledger.release("a")) == (0, 84, 0)
    assert ledger.gpus == (GPU, Gpu(gpu_id="n/1", total_bytes=50))
