"""Relate adapters to their base, whose engines serve them (Model.base, Instance.host_id).

Adapters' requests use slots, batch steps and KV cache of the base, so its load includes theirs, counted at the hosts.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Final

from glowplug.domain.instance import Instance
from glowplug.domain.model import Model
from glowplug.domain.snapshot import ModelLoad, Outlook
from glowplug.fleet.demand import Demand, joined
from glowplug.fleet.tables import InstanceTable

MOST_SLOTS: Final = 8  # most adapters in one engine
LEAST_SLOTS: Final = 4  # least, if any: a few more may be deployed without a restart
RANKS: Final = (8, 16, 32, 64, 128, 256, 320, 512)  # accepted by vLLM (max_lora_rank)
USUAL_RANK: Final = 16  # if no adapter states its rank


class AdapterIndex:
    def __init__(self) -> None:
        self.bases: dict[str, str] = {}
        self._by_base: dict[str, dict[str, Model]] = {}

    def of(self, base_key: str) -> Mapping[str, Model]:
        return self._by_base.get(base_key, {})

    def put(self, model: Model) -> None:
        if self.bases.get(model.key, "") != model.base:
            self.drop(model.key)
        if model.base:
            self.bases[model.key] = model.base
            self._by_base.setdefault(model.base, {})[model.key] = model

    def drop(self, model_key: str) -> None:
        base = self.bases.pop(model_key, "")
        here = self._by_base.get(base, {})
        here.pop(model_key, None)
        if not here:
            self._by_base.pop(base, None)

    def restore(self, models: Mapping[str, Model]) -> None:
        for key in [key for key in self.bases if key not in models]:
            self.drop(key)
        for model in models.values():
            if model.base or model.key in self.bases:
                self.put(model)


def slots_for(adapters: Mapping[str, Model]) -> tuple[int, int]:
    """Return (adapters to hold at once, their largest rank) for an engine of the base; zeros without adapters."""
    if not adapters:
        return 0, 0
    num = min(MOST_SLOTS, max(LEAST_SLOTS, 1 << (len(adapters) - 1).bit_length()))
    rank = max(model.adapter_rank for model in adapters.values()) or USUAL_RANK
    return num, next((known for known in RANKS if known >= rank), rank)


def with_adapters(base_key: str, loads: Demand, instances: InstanceTable) -> ModelLoad:
    load, num_arrived = loads.of(base_key), loads.arrived_at_adapters(base_key)
    found = [_at_hosts(loads.of(key), instances.of(key)) for key in loads.busy_adapters(base_key)]
    return replace(joined([load, *found]), num_arrived=load.num_arrived + num_arrived)


def _at_hosts(load: ModelLoad, rows: Mapping[str, Instance]) -> ModelLoad:
    if not load.num_in_flight:
        return replace(load, in_flight_by_instance={}, outlook_by_instance={}, slots_per_instance=0)

    def host(instance_id: str) -> str:
        row = rows.get(instance_id)
        return row.engine_id if row is not None else instance_id

    outlooks: dict[str, Outlook] = {}
    for instance_id, outlook in load.outlook_by_instance.items():
        known = outlooks.get(host(instance_id))
        outlooks[host(instance_id)] = outlook if known is None else known.joined(outlook)
    classes = {
        name: replace(one, in_flight_by_instance=_counted(one.in_flight_by_instance, host))
        for name, one in load.by_class.items()
    }
    return replace(
        load,
        in_flight_by_instance=_counted(load.in_flight_by_instance, host),
        outlook_by_instance=outlooks,
        by_class=classes,
        slots_per_instance=0,
    )


def _counted(running: Mapping[str, int], host: Callable[[str], str]) -> dict[str, int]:
    found: dict[str, int] = {}
    for instance_id, num in running.items():
        found[host(instance_id)] = found.get(host(instance_id), 0) + num
    return found
