"""T6 to T9: weights of an owner in another process, and which processes survive a fault."""

import time
from collections.abc import Iterator

from bench.gpu.children import Child
from bench.gpu.owners import NAME, Served, served
from bench.gpu.report import GIB, Place, Row, not_measured, torch_on_gpu
from glowplug_lab.gpu_slots.gpu_memory import Access, GpuMemory
from glowplug_lab.gpu_slots.owner_client import OwnerClient
from glowplug_lab.gpu_slots.slots import Slot


def run(place: Place) -> Iterator[Row]:
    """Group 2."""
    with served(place, place.size(16 * GIB)) as (owner, client, slot):
        yield _attach(owner)
        yield from _faults(owner)
        yield from _kills(owner, client, slot)
    yield _graph(place)


def _attach(owner: Served) -> Row:
    """T6. The digest is read through the mapping; a matrix product over the same tensor is vLLM's to do (T16)."""
    child = Child("attach", **owner.of_child)
    said = child.ask()
    child.end()
    is_equal = said.get("digest") == owner.digest
    shown = f"{said['seconds'] * 1000:.1f} ms; bytes {'equal' if is_equal else 'DIFFER'}" if said else "it ended"
    what = f"another process attaches {owner.num_bytes / GIB:.3g} GiB"
    return Row("T6", what, "50 ms", "bytes equal", shown, is_equal, {"seconds": said.get("seconds", -1.0)})


def _faults(owner: Served) -> Iterator[Row]:
    """T8: a process that touches memory out of bounds dies alone."""
    bystander = Child("attach", **owner.of_child)
    bystander.ask()
    for how in ("read only", "unmapped"):
        victim = Child("fault", **owner.of_child, how=how)
        said = [victim.ask(), victim.ask()]
        ended = victim.process.wait(timeout=60)
        victim.end()
        is_fine = bystander.ask("check").get("digest") == owner.digest
        is_met = said[0] == {"ready": True} and said[1] == {} and ended != 0 and is_fine
        shown = f"it ended with {ended}; another engine {'goes on' if is_fine else 'IS HARMED'}"
        yield Row("T8", f"a write to {how} memory", "error 700, that process alone", "the others go on", shown, is_met)
    bystander.end()


def _kills(owner: Served, client: OwnerClient, slot: Slot) -> Iterator[Row]:
    """T7: engine and owner are killed; memory comes back once all of its holders are gone."""
    engine = Child("attach", **owner.of_child)
    engine.ask()
    engine.end()
    again = Child("attach", **owner.of_child)
    is_equal = again.ask().get("digest") == owner.digest
    yield Row("T7", "an engine is killed, another attaches", "as before", "bytes equal", _shown(is_equal), is_equal)

    owner.kill_owner()
    computes = again.ask("check").get("digest") == owner.digest
    owner.start_owner()
    rejoined = again.ask("rejoin").get("digest") == owner.digest
    client.rejoin(120.0)
    num_chunks = slot.num_chunks
    known = client.holdings()
    is_known = known["num_shared"] == num_chunks
    shown = (
        f"the engine {_shown(computes and rejoined)}; the next owner knows {known['num_shared']} of {num_chunks} chunks"
    )
    yield Row(
        "T7", "the owner is killed and started again", "engines go on", "all held memory is known again", shown,
        computes and rejoined and is_known,
    )  # fmt: skip

    again.end()
    client.give(NAME, slot.close())
    total, deadline = known["num_free"] + known["num_held"], time.monotonic() + 10
    while (free := client.num_free) < total and time.monotonic() < deadline:
        time.sleep(0.01)
    yield Row(
        "T7", "memory after all who had it are gone", "all of it", "all of it", f"{free} of {total} chunks are free",
        free == total,
    )  # fmt: skip


def _shown(is_equal: bool) -> str:
    return "reads equal bytes" if is_equal else "READS OTHER BYTES"


def _graph(place: Place) -> Row:
    """T9: a CUDA graph over a slot's addresses, whose chunks are exchanged under it."""
    texts = ("T9", "a CUDA graph over addresses whose chunks are exchanged", "same result", "bit-equal")
    if not place.is_gpu:
        return not_measured(*texts, "host memory has no CUDA graphs")
    torch, why = torch_on_gpu()
    if why:
        return not_measured(*texts, why)
    with place.memory() as memory:
        slot = Slot(memory, "graph", 2 * memory.chunk_bytes)
        slot.grow([memory.create()])
        tensor = torch.from_dlpack(memory.tensor(slot.address, 1 << 20, slot)).view(torch.float32).view(512, 512)
        tensor.copy_(torch.randn(512, 512, device=tensor.device))
        kept, out = tensor.clone(), torch.empty_like(tensor)
        torch.matmul(tensor, tensor, out=out)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            torch.matmul(tensor, tensor, out=out)
        graph.replay()
        torch.cuda.synchronize()
        before = out.clone()
        _exchange(memory, slot)
        tensor.copy_(kept)
        out.zero_()
        graph.replay()
        torch.cuda.synchronize()
        is_equal = bool(torch.equal(before, out))
        del tensor
    return Row(*texts, "bit-equal" if is_equal else "DIFFERS", is_equal)


def _exchange(memory: GpuMemory, slot: Slot) -> None:
    """Put other chunks behind the same addresses."""
    memory.synchronize()
    old = slot.cut(0)
    slot.grow([memory.create()], Access.READ_WRITE)
    for chunk in old:
        memory.release(chunk)
