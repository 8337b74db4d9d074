"""What routers hold and run, summed over those heard of lately."""

from collections.abc import Mapping
from typing import Final

from glowplug.domain.snapshot import ModelLoad
from glowplug.events.facts import RouterLoadReported
from glowplug.fleet.demand import LoadReports

LOAD_LEASE_S: Final = 3.0  # silence after which a router's load no longer counts
NOTHING: Final = ModelLoad()


class Loads:
    """`refresh` says which models and instances have another load than before."""

    def __init__(self) -> None:
        self._reports = LoadReports()
        self._by_router: dict[str, tuple[float, Mapping[str, ModelLoad]]] = {}  # router id -> (heard at, loads)
        self._by_model: dict[str, ModelLoad] = {}
        self._by_instance: dict[str, int] = {}
        self._is_stale = False

    def put(self, report: RouterLoadReported, now_s: float) -> None:
        self._by_router[report.router_id] = (now_s, self._reports.take(report))
        self._is_stale = True

    def model(self, key: str) -> ModelLoad:
        return self._by_model.get(key, NOTHING)

    def instance(self, key: str) -> int:
        """Requests an instance runs."""
        return self._by_instance.get(key, 0)

    def refresh(self, now_s: float) -> tuple[set[str], set[str]]:
        """(model keys, instance ids) that changed. Routers silent for LOAD_LEASE_S are forgotten."""
        silent = [r for r, (heard_at, _) in self._by_router.items() if now_s - heard_at > LOAD_LEASE_S]
        for router_id in silent:
            del self._by_router[router_id]
            self._reports.forget(router_id)
        if not silent and not self._is_stale:
            return set(), set()
        self._is_stale = False
        old_models, old_instances = self._by_model, self._by_instance
        self._by_model, self._by_instance = self._sum()
        models = {
            key
            for key in old_models.keys() | self._by_model.keys()
            if _shown(old_models.get(key, NOTHING)) != _shown(self._by_model.get(key, NOTHING))
        }
        instances = {
            key
            for key in old_instances.keys() | self._by_instance.keys()
            if old_instances.get(key, 0) != self._by_instance.get(key, 0)
        }
        return models, instances

    def _sum(self) -> tuple[dict[str, ModelLoad], dict[str, int]]:
        models: dict[str, ModelLoad] = {}
        instances: dict[str, int] = {}
        for _, loads in self._by_router.values():
            for key, load in loads.items():
                known = models.get(key)
                models[key] = load if known is None else _add(known, load)
                for instance_id, num in load.in_flight_by_instance.items():
                    instances[instance_id] = instances.get(instance_id, 0) + num
        return models, instances


def _add(a: ModelLoad, b: ModelLoad) -> ModelLoad:
    return ModelLoad(
        num_waiting=a.num_waiting + b.num_waiting,
        num_in_flight=a.num_in_flight + b.num_in_flight,
        last_active_at=max(a.last_active_at, b.last_active_at),
    )


def _shown(load: ModelLoad) -> tuple[int, int]:
    return load.num_waiting, load.num_in_flight
