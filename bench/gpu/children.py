"""Child processes for bench/gpu: to attach weights, to cause a fatal fault, or to hold GPU memory during a checkpoint.
`python -m bench.gpu.children VERB JSON` answers with JSON lines on its output.
"""

import ctypes
import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.gpu.buffers import gpu_digest
from glowplug_lab.gpu_slots.cuda_memory import CudaMemory, check, load_driver
from glowplug_lab.gpu_slots.gpu_memory import Access, GpuMemory
from glowplug_lab.gpu_slots.host_memory import HostMemory
from glowplug_lab.gpu_slots.owner_client import OwnerClient, OwnerGone
from glowplug_lab.gpu_slots.slots import Slot


class Child:
    """A process that answers questions."""

    def __init__(self, verb: str, **args: Any) -> None:
        command = [sys.executable, "-m", "bench.gpu.children", verb, json.dumps(args)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def ask(self, question: str = "") -> dict[str, Any]:
        """The next answer, after `question` if there is one; {} if the process has ended."""
        if question and self.process.stdin:
            self.process.stdin.write(question + "\n")
            self.process.stdin.flush()
        line = self.process.stdout.readline() if self.process.stdout else ""
        answer: dict[str, Any] = json.loads(line) if line else {}
        return answer

    def end(self) -> int:
        """Kill the process if it lives. Returns its exit status."""
        if self.process.poll() is None:
            self.process.kill()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe:
                pipe.close()
        return self.process.wait(timeout=60)


def memory_of(kind: str, device: int, chunk_bytes: int) -> GpuMemory:
    """GPU memory that creates no chunks of its own."""
    return CudaMemory(device, chunk_bytes) if kind == "cuda" else HostMemory(chunk_bytes, chunk_bytes)


def _say(**answer: Any) -> None:
    print(json.dumps(answer), flush=True)


def attach(kind: str, device: int, chunk_bytes: int, path: str, name: str) -> None:
    """Attach weights, and report the time and their digest; repeat at each input line, for "rejoin" after a handover to
    the next owner."""
    memory = memory_of(kind, device, chunk_bytes)
    memory.mem_info()  # creates the context, which an engine already has
    with OwnerClient(memory, Path(path)) as client:
        began = time.perf_counter()
        chunks, num_bytes = client.attach(name)
        slot = Slot(memory, name, len(chunks) * chunk_bytes)
        slot.grow(chunks, Access.READ)
        _say(seconds=time.perf_counter() - began, digest=gpu_digest(memory, slot.address, num_bytes))
        for line in sys.stdin:
            try:
                if line.strip() == "rejoin":
                    client.rejoin()
                _say(digest=gpu_digest(memory, slot.address, num_bytes))
            except OwnerGone as error:
                _say(error=str(error))


def fault(kind: str, device: int, chunk_bytes: int, path: str, name: str, how: str) -> None:
    """Touch memory that is out of bounds."""
    memory = memory_of(kind, device, chunk_bytes)
    with OwnerClient(memory, Path(path)) as client:
        chunks, _ = client.attach(name)
        slot = Slot(memory, name, len(chunks) * chunk_bytes)
        slot.grow(chunks, Access.READ)
        if how == "unmapped":
            slot.cut(0)
        _say(ready=True)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if not isinstance(memory, CudaMemory):
            ctypes.memset(slot.address, 1, 1)
        else:
            memory.enter()
            memory.call("cuMemsetD8Async", slot.address, 1, chunk_bytes, 0)
            memory.synchronize()
        _say(survived=True)


def hold(device: int, num_bytes: int, chunk_bytes: int, path: str = "", name: str = "") -> None:
    """Hold a pattern of so many bytes of plain device memory, with imported chunks of `name` beside them; check it at
    each line. "drop" gives the imported chunks up, "again" attaches them anew."""
    driver = load_driver()
    memory = CudaMemory(device, chunk_bytes, driver)
    memory.mem_info()
    address = int(check(driver, "cuMemAlloc", driver.cuMemAlloc(num_bytes)))
    check(driver, "cuMemsetD32", driver.cuMemsetD32(address, 0x5EED5EED, num_bytes // 4))
    memory.synchronize()
    client = OwnerClient(memory, Path(path)) if path else None
    slot = _imported(client, name) if client else None
    _say(ready=True)
    buffer = ctypes.create_string_buffer(1 << 20)
    for line in sys.stdin:
        if line.strip() == "drop" and client and slot:
            client.give(name, slot.close())
        if line.strip() == "again" and client:
            slot = _imported(client, name)
        equal = True
        for at in (0, num_bytes // 2, num_bytes - len(buffer)):
            check(driver, "cuMemcpyDtoH", driver.cuMemcpyDtoH(ctypes.addressof(buffer), address + at, len(buffer)))
            equal &= buffer.raw == (0x5EED5EED).to_bytes(4, "little") * (len(buffer) // 4)
        _say(equal=equal)


def _imported(client: OwnerClient, name: str) -> Slot:
    chunks, _ = client.attach(name)
    slot = Slot(client.memory, name, len(chunks) * client.memory.chunk_bytes)
    slot.grow(chunks, Access.READ)
    return slot


if __name__ == "__main__":
    parts: dict[str, Callable[..., None]] = {"attach": attach, "fault": fault, "hold": hold}
    parts[sys.argv[1]](**json.loads(sys.argv[2]))
