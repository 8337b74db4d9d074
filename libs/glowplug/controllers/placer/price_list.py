"""The price list of one GPU: the worth of each holder of its memory, and the order of leaving.

An estimate: it uses the worths (`holdings.py`), the eviction policy and the reasons to stay of a placement without free
memory, and changes nothing. Replicas leave first, the least worth first; then instances, for a start that no request
awaits.
"""

from dataclasses import dataclass, replace

from glowplug.controllers.placer.fleet import Fleet
from glowplug.controllers.placer.holdings import Holdings
from glowplug.controllers.placer.placing import Placing
from glowplug.domain.errors import NotFound
from glowplug.domain.hardware import Gpu
from glowplug.domain.instance import Instance, InstanceState
from glowplug.fleet.status import rung_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Priced:
    """One holder. `asked`: requests expected to need it before it could be reloaded, a probability unless requests wait
    now; `climb_s`: extra wait of each without it; `saves_s`: their product; `worth`: `saves_s` over its bytes, in
    seconds a byte. `shared_bytes`: of weights that others read too, not freed by its leaving. `order`: 1 leaves first,
    0 stays for the reason in `why`."""

    instance_id: str
    model: str
    rung: str
    num_bytes: int
    shared_bytes: int = 0
    asked: float
    climb_s: float
    saves_s: float
    worth: float
    state: str = ""
    order: int = 0
    why: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuPrices:
    """The holders of one GPU, those that save least a byte first."""

    gpu_id: str
    total_bytes: int
    free_bytes: int
    holders: tuple[Priced, ...] = ()


class PriceList:
    def __init__(self, fleet: Fleet, placing: Placing) -> None:
        self.fleet, self._placing = fleet, placing

    def of(self, gpu_id: str, now_s: float) -> GpuPrices:
        """Return the price list of a GPU. Raises NotFound for a GPU of no node."""
        gpu = self._gpu(gpu_id)
        if gpu is None:
            raise NotFound(f"no GPU {gpu_id!r}", param="gpu")
        here, holdings = self.fleet.capacity.on_gpu.get(gpu_id, {}), Holdings(self.fleet, now_s)
        shared = {holder: one.num_bytes for one in gpu.shared if one.counts for holder in one.holders}
        found = {
            name: self._priced(here[name], num_bytes, shared.get(name, 0), holdings)
            for name, num_bytes in self.fleet.capacity.granted(gpu_id).items()
            if name in here
        }
        copies = [name for name in found if _gives_way(here[name])]
        copies.sort(key=lambda name: (self.fleet.scores.get(name, 0.0), name))
        order, held = self._placing.leaving_order(gpu_id, now_s)
        places = {name: at for at, name in enumerate([*copies, *order], start=1)}
        holders = [
            replace(one, order=places.get(name, 0), why=_why(here[name], held.get(name, ""), name in places))
            for name, one in found.items()
        ]
        holders.sort(key=lambda one: (one.order or len(found) + 1, one.worth, one.instance_id))
        free = self.fleet.capacity.free_bytes(gpu_id)
        return GpuPrices(gpu_id=gpu_id, total_bytes=gpu.total_bytes, free_bytes=free, holders=tuple(holders))

    def _gpu(self, gpu_id: str) -> Gpu | None:
        node = self.fleet.nodes.by_id.get(gpu_id.rpartition("/")[0])
        return next((gpu for gpu in node.gpus if gpu.gpu_id == gpu_id), None) if node else None

    def _priced(self, row: Instance, own_bytes: int, shared_bytes: int, holdings: Holdings) -> Priced:
        model, rung = self.fleet.models.get(row.model_key), rung_of(row)
        holding = holdings.of(row)
        return Priced(
            instance_id=row.instance_id,
            model=model.name if model else row.model_key,
            rung=rung.value if rung else "",
            num_bytes=own_bytes + shared_bytes,
            shared_bytes=shared_bytes,
            asked=round(holding.asked, 4),
            climb_s=round(holding.climb_s, 4),
            saves_s=round(holding.saves_s, 4),
            worth=holding.worth,
            state=row.state.value,
        )


def _gives_way(row: Instance) -> bool:
    return row.replica or row.state is InstanceState.PREWARMED


def _why(row: Instance, held: str, goes: bool) -> str:
    if row.state is InstanceState.DRAINING:
        return "it drains"
    if row.state is InstanceState.SWAPPED_OUT:
        return "it is asleep, and gives way to whatever starts"
    return "" if goes else held or "it gives way to whatever starts there"
