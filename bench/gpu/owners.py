"""A real owner process with weights in it, for bench/gpu."""

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.gpu.buffers import host_digest, pinned
from bench.gpu.children import memory_of
from bench.gpu.report import Place
from glowplug_lab.gpu_slots.copies import Copier
from glowplug_lab.gpu_slots.gpu_memory import Access, GpuMemory
from glowplug_lab.gpu_slots.owner_client import OwnerClient
from glowplug_lab.gpu_slots.slots import Slot
from glowplug_lab.gpu_slots.switch import Source, prewarm

NAME = "weights"
START_S = 120.0  # to create 110 GiB of chunks


@dataclass
class Served:
    """An owner, and this process as the loader that filled it with weights."""

    place: Place
    path: Path
    memory: GpuMemory
    num_bytes: int = 0
    digest: str = ""
    processes: list["subprocess.Popen[bytes]"] = field(default_factory=list)

    @property
    def of_child(self) -> dict[str, Any]:
        """Arguments for a child that attaches them."""
        common = {"device": self.place.device, "chunk_bytes": self.place.chunk_bytes}
        return {"kind": self.place.kind, "path": str(self.path), "name": NAME, **common}

    def start_owner(self) -> None:
        """Start `python -m glowplug_lab.gpu_slots.owner`."""
        command = [sys.executable, "-m", "glowplug_lab.gpu_slots.owner", str(self.path), *self.place.owner_args()]
        self.processes.append(subprocess.Popen(command))

    def kill_owner(self) -> None:
        self.processes[-1].kill()
        self.processes[-1].wait(timeout=60)

    def load(self, client: OwnerClient, num_bytes: int) -> Slot:
        """Load random weights into a slot and publish them."""
        slot = Slot(self.memory, NAME, -(-num_bytes // self.memory.chunk_bytes) * self.memory.chunk_bytes)
        with pinned(self.memory, num_bytes) as source:
            prewarm(slot, Source(source, num_bytes, lambda: num_bytes), client, Copier(self.memory))
            self.num_bytes, self.digest = num_bytes, host_digest(source, num_bytes)
        slot.protect(Access.READ)
        client.publish(NAME, client.held, num_bytes)
        return slot


@contextmanager
def served(place: Place, num_bytes: int) -> Iterator[tuple[Served, OwnerClient, Slot]]:
    """An owner with that many bytes of weights. Raises GpuUnavailable, GpuError and OwnerGone."""
    memory = memory_of(place.kind, place.device, place.chunk_bytes)
    with tempfile.TemporaryDirectory(prefix="gp-bench-") as folder:
        made = Served(place, Path(folder) / "owner.sock", memory)
        made.start_owner()
        try:
            with OwnerClient(memory, made.path, START_S) as client:
                yield made, client, made.load(client, num_bytes)
        finally:
            memory.close()
            for process in made.processes:
                if process.poll() is None:
                    process.kill()
                process.wait(timeout=60)
