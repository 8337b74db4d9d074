"""Every kind of GPU memory behaves alike."""

import ctypes
import faulthandler
import gc
import importlib
import os
import resource
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from bench.gpu.buffers import read, write
from glowplug_lab.gpu_slots.cuda_memory import CudaMemory, load_driver
from glowplug_lab.gpu_slots.gpu_memory import (
    Access,
    Chunk,
    GpuError,
    GpuMemory,
    GpuUnavailable,
    OutOfGpuMemory,
    WrongMapping,
)
from glowplug_lab.gpu_slots.host_memory import HostMemory
from tests.contract.gpu_memory_rig import BACKENDS, KIB, FakeCudaDriver, Status, gpu, mapped

ROOT = Path(__file__).parents[2]


@pytest.fixture(params=BACKENDS)
def memory(request: pytest.FixtureRequest) -> Iterator[GpuMemory]:
    with gpu(request.param) as made:
        yield made


@pytest.fixture(params=("host", "faked driver"))
def small(request: pytest.FixtureRequest) -> Iterator[GpuMemory]:
    with gpu(request.param, num_chunks=8) as made:
        yield made


def test_what_is_written_is_read_and_moves_with_its_chunk(memory: GpuMemory) -> None:
    size = memory.chunk_bytes
    here, there = memory.reserve(8 * size), memory.reserve(8 * size)
    mapped(memory, here, 4)
    write(memory, here, b"".join(bytes([number]) * size for number in range(4)))
    moved = [memory.unmap(here + number * size, size)[0] for number in (3, 1)]
    for number, chunk in enumerate(moved):
        memory.map(there + number * size, chunk)
    memory.set_access(there, 2 * size, Access.READ)
    assert read(memory, there, 2 * size) == b"\3" * size + b"\1" * size
    assert read(memory, here, 1) == b"\0" and read(memory, here + 2 * size, 1) == b"\2"
    with pytest.raises(WrongMapping):
        read(memory, here, 2 * size)


def test_one_chunk_behind_two_addresses_is_the_same_memory(memory: GpuMemory) -> None:
    size = memory.chunk_bytes
    here, there = memory.reserve(size), memory.reserve(size)
    (chunk,) = mapped(memory, here, 1)
    memory.map(there, chunk)
    memory.set_access(there, size, Access.READ)
    write(memory, here + 100, b"seen")
    assert read(memory, there + 100, 4) == b"seen"
    with pytest.raises(WrongMapping):
        write(memory, there, b"x")


def test_a_run_needs_one_grant_and_gives_its_chunks_back_in_order(memory: GpuMemory) -> None:
    here = memory.reserve(6 * memory.chunk_bytes)
    chunks = mapped(memory, here, 6)
    assert memory.unmap(here, 6 * memory.chunk_bytes) == chunks


Refused = Callable[[GpuMemory, int, Chunk], object]


@pytest.mark.parametrize(
    "refused",
    [
        lambda memory, here, chunk: memory.map(here, chunk),
        lambda memory, here, chunk: memory.map(here + 1, chunk),
        lambda memory, here, chunk: memory.map(here + 2 * memory.chunk_bytes, chunk),
        lambda memory, here, chunk: memory.map(here + memory.chunk_bytes, Chunk(chunk + 1000)),
        lambda memory, here, chunk: memory.set_access(here, 2 * memory.chunk_bytes, Access.READ),
        lambda memory, here, chunk: memory.set_access(here, 0, Access.READ),
        lambda memory, here, chunk: memory.unmap(here + memory.chunk_bytes, memory.chunk_bytes),
        lambda memory, here, chunk: memory.unmap(here, memory.chunk_bytes // 2),
        lambda memory, here, chunk: memory.release(chunk),
        lambda memory, here, chunk: memory.release(Chunk(chunk + 1000)),
        lambda memory, here, chunk: memory.export_fd(Chunk(chunk + 1000)),
        lambda memory, here, chunk: memory.free(here),
        lambda memory, here, chunk: memory.free(here + memory.chunk_bytes),
        lambda memory, here, chunk: memory.tensor(here, 2 * memory.chunk_bytes, None),
    ],
    ids=[
        "mapped already",
        "no whole chunk",
        "outside",
        "no such chunk",
        "access without memory",
        "no bytes",
        "nothing to unmap",
        "part of a mapping",
        "release while mapped",
        "release of no chunk",
        "export of no chunk",
        "free while mapped",
        "free of no range",
        "tensor of what is not mapped",
    ],
)
def test_what_a_gpu_refuses_is_refused_and_changes_nothing(memory: GpuMemory, refused: Refused) -> None:
    here = memory.reserve(2 * memory.chunk_bytes)
    (chunk,) = mapped(memory, here, 1)
    write(memory, here, b"kept")
    before = memory.mem_info()
    with pytest.raises(WrongMapping):
        refused(memory, here, chunk)
    assert read(memory, here, 4) == b"kept" and memory.mem_info() == before


def test_memory_that_is_released_is_free_again(memory: GpuMemory) -> None:
    before, num = memory.mem_info()[0], 8
    chunks = [memory.create() for _ in range(num)]
    taken = before - memory.mem_info()[0]
    for chunk in chunks:
        memory.release(chunk)
    assert taken >= num * memory.chunk_bytes and memory.mem_info()[0] >= before


def test_no_memory_left_is_an_error_of_its_own_and_not_the_end(small: GpuMemory) -> None:
    chunks = [small.create() for _ in range(8)]
    with pytest.raises(OutOfGpuMemory):
        small.create()
    small.release(chunks[0])
    small.create()
    assert small.mem_info() == (0, small.total_bytes)


def test_another_process_has_the_same_memory_by_descriptor(memory: GpuMemory) -> None:
    """On a GPU the other process has its own context, so it is not a fork."""
    size = memory.chunk_bytes
    here = memory.reserve(2 * size)
    chunks = mapped(memory, here, 2)
    write(memory, here, b"a" * size + b"b" * size)
    descriptor, offset = memory.export_fd(chunks[1])
    faked = isinstance(memory, CudaMemory) and isinstance(memory.driver, FakeCudaDriver)
    there = f"""
from bench.gpu.buffers import read, write
from tests.contract.gpu_memory_rig import gpu
from glowplug_lab.gpu_slots.gpu_memory import Access
with gpu({"faked driver" if faked else memory.kind!r}) as memory:
    chunk = memory.import_fd({descriptor}, {offset})
    here = memory.reserve({size})
    memory.map(here, chunk)
    memory.set_access(here, {size}, Access.READ_WRITE)
    assert read(memory, here, {size}) == b"b" * {size}
    write(memory, here, b"c" * {size})
"""
    try:
        subprocess.run([sys.executable, "-c", there], cwd=ROOT, pass_fds=[descriptor], check=True, timeout=60)
    finally:
        os.close(descriptor)
    assert read(memory, here, size + 1) == b"a" * size + b"c"


@pytest.mark.parametrize("backend", ["host", "faked driver"])
@pytest.mark.parametrize(
    ("access", "operation", "dies"),
    [
        (None, "read", True),
        (Access.NONE, "read", True),
        (Access.READ, "read", False),
        (Access.READ, "write", True),
        (Access.READ_WRITE, "write", False),
        ("unmapped", "read", True),
    ],
    ids=["not granted", "taken away", "read", "write of what is read only", "write", "unmapped"],
)
def test_touching_memory_without_access_kills(backend: str, access: object, operation: str, dies: bool) -> None:
    """For a GPU kernel, bench/gpu tries that in its own processes."""
    with gpu(backend) as memory:
        size = memory.chunk_bytes
        here = memory.reserve(size)
        memory.map(here, memory.create())
        if isinstance(access, Access):
            memory.set_access(here, size, access)
        elif access:
            memory.set_access(here, size, Access.READ_WRITE)
            memory.unmap(here, size)
        child = os.fork()
        if not child:
            faulthandler.disable()
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            ctypes.string_at(here, 1) if operation == "read" else ctypes.memset(here, 1, 1)
            os._exit(0)
        ended = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        assert ended == (-signal.SIGSEGV if dies else 0)


def test_a_tensor_is_the_memory_itself_and_keeps_its_owner(small: GpuMemory) -> None:
    numpy = pytest.importorskip("numpy")
    here = small.reserve(small.chunk_bytes)
    mapped(small, here, 1)
    write(small, here, bytes(range(200)))

    class Holder:
        """Stands for a slot."""

    holder = Holder()
    exported = small.tensor(here, 200, holder)
    if small.kind == "cuda":
        assert exported.__dlpack_device__() == (2, 0)
        return
    array = numpy.from_dlpack(exported)
    write(small, here, b"\7")
    assert array.dtype == numpy.uint8 and list(array[:3]) == [7, 1, 2] and array.view(numpy.uint16).shape == (100,)
    alive = weakref.ref(holder)
    del holder, exported
    gc.collect()
    assert alive() is not None
    del array
    gc.collect()
    assert alive() is None


def test_torch_sees_it_too() -> None:
    torch = pytest.importorskip("torch")
    with gpu("host") as memory:
        here = memory.reserve(memory.chunk_bytes)
        mapped(memory, here, 1)
        tensor = torch.from_dlpack(memory.tensor(here, 64, None)).view(torch.bfloat16).view(4, 8)
        tensor.fill_(1.5)
        assert tensor.data_ptr() == here and read(memory, here, 2) == b"\xc0\x3f"


def test_closing_gives_everything_back_and_may_be_done_twice(small: GpuMemory) -> None:
    mapped(small, small.reserve(4 * small.chunk_bytes), 3)
    small.close()
    small.close()
    with pytest.raises(WrongMapping):
        small.unmap(0, small.chunk_bytes)


def test_many_threads_map_at_once(small: GpuMemory) -> None:
    here = small.reserve(8 * small.chunk_bytes)
    chunks = [small.create() for _ in range(8)]
    threads = [
        threading.Thread(target=small.map, args=(here + number * small.chunk_bytes, chunk))
        for number, chunk in enumerate(chunks)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert small.unmap(here, 8 * small.chunk_bytes) == chunks


@pytest.mark.parametrize("chunk_bytes", [0, -1, 1000])
def test_a_chunk_is_whole_pages(chunk_bytes: int) -> None:
    with pytest.raises(ValueError, match="a chunk is"):
        HostMemory(1 << 20, chunk_bytes)
    with pytest.raises(ValueError, match="a chunk is"):
        CudaMemory(chunk_bytes=chunk_bytes, driver=FakeCudaDriver(1 << 20, 64 * KIB))


def test_an_error_of_the_driver_names_the_call_and_its_status() -> None:
    driver = FakeCudaDriver(1 << 20, 64 * KIB)
    memory = CudaMemory(chunk_bytes=64 * KIB, driver=driver)
    driver.cuMemAddressReserve = lambda *_: (Status.CUDA_ERROR_INVALID_VALUE, None)  # type: ignore[method-assign]
    with pytest.raises(GpuError, match=r"cuMemAddressReserve: .*CUDA_ERROR_INVALID_VALUE") as raised:
        memory.reserve(64 * KIB)
    assert raised.value.call == "cuMemAddressReserve" and not isinstance(raised.value, OutOfGpuMemory)


def test_who_only_lends_chunks_makes_no_context() -> None:
    """The owner's process: a device fault ends processes with a context."""
    driver = FakeCudaDriver(1 << 20, 64 * KIB)
    memory = CudaMemory(chunk_bytes=64 * KIB, driver=driver)
    chunk = memory.create()
    os.close(memory.export_fd(chunk)[0])
    memory.release(chunk)
    memory.close()
    assert "cuDevicePrimaryCtxRetain" not in driver.calls


def test_the_context_is_retained_once_and_current_in_each_thread() -> None:
    driver = FakeCudaDriver(1 << 20, 64 * KIB)
    memory = CudaMemory(chunk_bytes=64 * KIB, driver=driver)
    for _ in range(2):
        thread = threading.Thread(target=memory.mem_info)
        thread.start()
        thread.join()
    assert driver.calls.count("cuDevicePrimaryCtxRetain") == 1 and driver.calls.count("cuCtxSetCurrent") == 2
    memory.close()
    assert driver.contexts == 0


def test_without_a_driver_it_says_what_is_missing() -> None:
    try:
        load_driver()
    except GpuUnavailable as error:
        assert "cuda-python" in str(error) or "NVIDIA driver" in str(error)


def test_the_real_driver_has_every_function_that_the_faked_one_has() -> None:
    try:
        real = importlib.import_module("cuda.bindings.driver")
    except ImportError:
        pytest.skip("cuda-python is not installed")
    faked = [name for name in dir(FakeCudaDriver) if name.lower().startswith("cu")]
    assert faked and [name for name in faked if not hasattr(real, name)] == []
    values = {kind: vars(getattr(FakeCudaDriver, kind)) for kind in faked if kind.startswith("CUmem")}
    values = {kind: names for kind, names in values.items() if not kind.endswith(("Prop", "Desc"))}
    assert [one for kind, names in values.items() for one in names if not hasattr(getattr(real, kind), one)] == []


def test_the_real_driver_takes_what_describes_a_chunk_and_its_access() -> None:
    try:
        real = importlib.import_module("cuda.bindings.driver")
    except ImportError:
        pytest.skip("cuda-python is not installed")
    driver = FakeCudaDriver(1 << 20, 64 * KIB)
    for name in dir(driver):
        if name.startswith("CUmem"):
            setattr(driver, name, getattr(real, name))
    memory = CudaMemory(device=0, chunk_bytes=64 * KIB, driver=driver)
    here = memory.reserve(64 * KIB)
    mapped(memory, here, 1, Access.READ)
    assert read(memory, here, 4) == bytes(4)
    with pytest.raises(WrongMapping):
        write(memory, here, b"x")
    memory.close()
