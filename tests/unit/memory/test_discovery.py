"""What GPUs a node has, with and without hardware."""

from types import SimpleNamespace
from typing import Any

import pytest

from glowplug.memory import discovery
from glowplug.memory.discovery import HardwareUnavailable, budgeted_gpus, cuda_gpus, discover

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

    def nvmlDeviceGetMemoryInfo(self, index: int) -> Any:
        total, free = self.memories[index]
        return SimpleNamespace(total=total, free=free)


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
    monkeypatch.setitem(__import__("sys").modules, "pynvml", None)
    with pytest.raises(HardwareUnavailable, match="nvidia-ml-py is not installed"):
        cuda_gpus("node-1")


def test_auto_falls_back_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "pynvml", None)
    found = discover("node-1", "auto", ["1MiB"])
    assert found.gpus[0].kind == discovery.HOST and "stands in" in found.warnings[-1]


def test_unknown_kind() -> None:
    with pytest.raises(ValueError, match="unknown GPU kind 'tpu'"):
        discover("node-1", "tpu", ["1MiB"])


def test_emulated_gpus_need_no_memory_and_say_what_they_are() -> None:
    found = discover("node-1", "emulated", ["80GB"] * 200)
    assert {gpu.kind for gpu in found.gpus} == {"emulated"} and len(found.gpus) == 200
    assert found.warnings == ()
