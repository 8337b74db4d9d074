"""Adapters and their bases: how many instances each needs.

A base runs the requests of its adapters, so its demand includes theirs. An adapter's own instances only hold it in the
engines of its base: there are at most as many as instances of the base that are READY, or one, which waits for the
first of them. While requests of an adapter wait, whatever its hosts run takes the slots that these wait for, and counts
as its own: so it spreads to another host once its hosts are full, whoever filled them.
"""

from collections.abc import Iterable
from dataclasses import replace

from glowplug.controllers.autoscaler.adapting import on_base
from glowplug.controllers.autoscaler.models import ModelRecord, ModelRecords
from glowplug.domain.errors import Conflict, InvalidModelFile
from glowplug.domain.hardware import Node
from glowplug.domain.model import Model
from glowplug.domain.snapshot import ModelLoad
from glowplug.fleet.adapters import with_adapters
from glowplug.fleet.demand import Demand
from glowplug.fleet.status import is_ready
from glowplug.fleet.tables import InstanceTable

MOST_NAMED = 3  # adapters that an error names


def load_of(record: ModelRecord, models: ModelRecords, loads: Demand, instances: InstanceTable) -> ModelLoad:
    """The reported load that a model's instances have to serve."""
    load, model = loads.of(record.key), record.model
    if model is not None and model.base:
        return _crowded(load, record, models, loads, instances) if load.num_waiting else load
    return with_adapters(record.key, loads, instances) if models.adapters_of(record.key) else load


def _crowded(
    load: ModelLoad, record: ModelRecord, models: ModelRecords, loads: Demand, instances: InstanceTable
) -> ModelLoad:
    """The load of an adapter that requests wait for, with all that its hosts run."""
    hosts = {row.host_id for row in instances.living(record.key).values() if is_ready(row)}
    if not hosts or record.model is None:
        return load
    together = load_of(models.of(record.model.base), models, loads, instances).in_flight_by_instance
    return replace(load, num_in_flight=max(load.num_in_flight, sum(together.get(host, 0) for host in hosts)))


def as_hosted(model: Model, models: ModelRecords, instances: InstanceTable) -> Model:
    """An adapter as its base lets it be: with no more instances than there are hosts, and drained with its base."""
    base = models.find(model.base)
    num_hosts = sum(row.is_whole and is_ready(row) for row in instances.living(model.base).values())
    most = min(model.max_instances, max(1, num_hosts))
    return replace(
        model,
        suspended=model.suspended or (base is not None and base.suspended),
        max_instances=most,
        min_instances=min(model.min_instances, most),
    )


def following(base: Model, models: ModelRecords, nodes: Iterable[Node]) -> list[Model]:
    """The adapters of a base as its new declaration lets them be. Raises Conflict where one cannot follow."""
    found, nodes = [], list(nodes)
    for adapter in models.adapters_of(base.key).values():
        try:
            found.append(on_base(adapter, {base.key: base}, nodes))
        except InvalidModelFile as error:
            why = f"its adapter {adapter.name} cannot follow: {error.message}; undeploy it first"
            raise Conflict(why, param=error.param) from error
    return found


def check_no_adapters_of(model: Model, models: ModelRecords) -> None:
    """Raise Conflict where a model that is to be deployed as an adapter has adapters itself."""
    if model.base and models.adapters_of(model.key):
        raise Conflict(f"{model.name} has adapters, and so becomes no adapter itself", param="base")


def check_no_adapters(model: Model, models: ModelRecords) -> None:
    """Raise Conflict where a model that is to be undeployed still has adapters."""
    names = sorted(one.name for one in models.adapters_of(model.key).values())
    if names:
        shown = ", ".join(names[:MOST_NAMED]) + (f" and {len(names) - MOST_NAMED} more" if names[MOST_NAMED:] else "")
        raise Conflict(f"{model.name} is the base of {shown}: undeploy its adapters first", param="model")


def check_base_runs(model: Model, models: ModelRecords) -> None:
    """Raise Conflict where an adapter is to be loaded whose base its operator has drained."""
    base = models.find(model.base) if model.base else None
    if base is not None and base.suspended:
        raise Conflict(f"its base {base.name} has been drained by its operator: load {base.name} first", param="model")
