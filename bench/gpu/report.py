"""The arguments of a bench/gpu script, and the rows it returns."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.measured.data import markdown
from glowplug_lab.gpu_slots.cuda_memory import CudaMemory
from glowplug_lab.gpu_slots.gpu_memory import GpuMemory
from glowplug_lab.gpu_slots.host_memory import HostMemory

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
GB = 10**9


@dataclass(frozen=True)
class Row:
    """One measurement. `is_met` is None if the criterion only asks for a record, or nothing was measured."""

    id: str
    what: str
    expected: str
    criterion: str
    measured: str
    is_met: bool | None = None
    figures: Mapping[str, float | str] = field(default_factory=dict)

    @property
    def verdict(self) -> str:
        return {True: "met", False: "NOT MET", None: ""}[self.is_met]


@dataclass(frozen=True)
class Place:
    """Where to measure. Rows shrink their sizes to fit."""

    kind: str  # host | cuda
    device: int = 0
    most_bytes: int = 64 * MIB  # of the GPU, for anything
    folder: Path = Path()
    weights: Path | None = None  # of a model for vLLM

    @property
    def is_gpu(self) -> bool:
        return self.kind == "cuda"

    @property
    def chunk_sizes(self) -> tuple[int, ...]:
        return tuple(n * MIB for n in (2, 8, 32, 64, 256)) if self.is_gpu else tuple(n * KIB for n in (64, 256, 512))

    @property
    def chunk_bytes(self) -> int:
        return 32 * MIB if self.is_gpu else 256 * KIB

    def met(self, is_right: bool, *, in_time: bool = True) -> bool | None:
        """Whether a criterion is met. Times of host memory tell nothing about a GPU, so there only bytes count."""
        if not is_right:
            return False
        return in_time if self.is_gpu else None

    def size(self, on_a_gpu: int) -> int:
        """The bytes to use where a GPU gets `on_a_gpu`: host memory plays a GPU of 110 GiB at a smaller scale."""
        wanted = on_a_gpu if self.is_gpu else on_a_gpu * self.most_bytes // (110 * GIB)
        size = min(wanted, self.most_bytes)
        return max(self.chunk_sizes[-1], size // self.chunk_sizes[-1] * self.chunk_sizes[-1])

    @contextmanager
    def memory(self, chunk_bytes: int = 0) -> Iterator[GpuMemory]:
        """A GPU's memory, closed at the end. Raises GpuUnavailable."""
        chunk = chunk_bytes or self.chunk_bytes
        made: GpuMemory = CudaMemory(self.device, chunk) if self.is_gpu else HostMemory(self.most_bytes, chunk)
        try:
            yield made
        finally:
            made.close()

    def owner_args(self) -> list[str]:
        """Arguments for `python -m glowplug_lab.gpu_slots.owner`."""
        size = ["--chunk", str(self.chunk_bytes), "--total", str(self.most_bytes)]
        return ["--kind", self.kind, "--device", str(self.device), *size]


def torch_on_gpu() -> tuple[Any, str]:
    """(the module, why it cannot be used: "" if it can)."""
    try:
        import torch
    except ImportError:
        return None, "torch is not installed"
    return torch, "" if torch.cuda.is_available() else "torch has no GPU"


def not_measured(id_: str, what: str, expected: str, criterion: str, why: str) -> Row:
    """A row that this machine cannot measure."""
    return Row(id_, what, expected, criterion, f"not measured: {why}")


def table(rows: Iterable[Row], place: Place) -> str:
    """Rows as Markdown, with the place in the heading."""
    where = "one GPU" if place.is_gpu else "host memory, not a GPU"
    head = ("#", f"measure ({where})", "expected", "criterion", "measured", "")
    return markdown(head, ((r.id, r.what, r.expected, r.criterion, r.measured, r.verdict) for r in rows))
