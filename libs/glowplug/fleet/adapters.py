"""Adapters beside their base: models that the engines of another model serve (Model.base, Instance.host_id).

What an adapter's requests take of an engine, they take of its base: slots, batch steps and KV cache. So the load of a
base includes that of its adapters, counted at the hosts.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Final

from glowplug.domain.instance import Instance
from glowplug.domain.model import Model
from glowplug.domain.snapshot import ModelLoad, Outlook
from glowplug.fleet.demand import Demand, joined
from glowplug.fleet.tables import InstanceTable

MOST_SLOTS: Final = 8  # adapters that the engine of a base holds at once, at most
LEAST_SLOTS: Final = 4  # ... and at least, once there is any: a few more may be deployed without a restart
RANKS: Final = (8, 16, 32, 64, 128, 256, 320, 512)  # largest ranks that vLLM may be started for (max_lora_rank)
USUAL_RANK: Final = 16  # where no deployed adapter says its rank


class AdapterIndex:
    """The adapters of each base, of the models that one reader knows."""

    def __init__(self) -> None:
        self.bases: dict[str, str] = {}  # adapter -> its base
        self._by_base: dict[str, dict[str, Model]] = {}

    def of(self, base_key: str) -> Mapping[str, Model]:
        """The adapters of a base, by key."""
        return self._by_base.get(base_key, {})

    def put(self, model: Model) -> None:
        """Take a model's row."""
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
        """Take the whole table."""
        for key in [key for key in self.bases if key not in models]:
            self.drop(key)
        for model in models.values():
            if model.base or model.key in self.bases:
                self.put(model)


def slots_for(adapters: Mapping[str, Model]) -> tuple[int, int]:
    """(adapters that an engine of their base should hold at once, the largest rank of those); zeros without any."""
    if not adapters:
        return 0, 0
    num = min(MOST_SLOTS, max(LEAST_SLOTS, 1 << (len(adapters) - 1).bit_length()))
    rank = max(model.adapter_rank for model in adapters.values()) or USUAL_RANK
    return num, next((known for known in RANKS if known >= rank), rank)


def with_adapters(base_key: str, loads: Demand, instances: InstanceTable) -> ModelLoad:
    """The load of a base and of its adapters together."""
    load, num_arrived = loads.of(base_key), loads.arrived_at_adapters(base_key)
    found = [_at_hosts(loads.of(key), instances.of(key)) for key in loads.busy_adapters(base_key)]
    return replace(joined([load, *found]), num_arrived=load.num_arrived + num_arrived)


def _at_hosts(load: ModelLoad, rows: Mapping[str, Instance]) -> ModelLoad:
    """An adapter's load, with its requests counted at the instances of the base that run them."""
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
