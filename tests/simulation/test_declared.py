"""Models declared anew again and again, over a bad bus and while leaders change."""

from dataclasses import replace

import pytest

from glowplug.controllers import operator
from glowplug.domain.instance import InstanceState
from tests.simulation.chaos import Fleet
from tests.simulation.seeds import seeds

SEEDS = seeds(2)
CHANGES = (  # of the model's n-th declaration; engines see all but the last two
    lambda n: {"context_tokens": 1024 + n % 3},
    lambda n: {"engine_args": {"n": n % 3}},
    lambda n: {"max_concurrency": 4 + n % 2},
    lambda n: {"priority": n % 3},
    lambda n: {"aliases": (f"alias-{n}",)},
)


class Declared(Fleet):
    """`without`: models that had a READY instance and lost the last one."""

    def __init__(self, seed, num_models, **fields):
        super().__init__(seed, num_models, system="union", min_instances=1, **fields)
        self.without, self._have = set(), set()
        self.control.on_save.append(self._saved)

    def _saved(self, table, row, now_s):
        if table == "instances":
            rows = [r for r in self.control.tables["instances"].values() if r.instance_id != row.instance_id]
            ready = {r.model_key for r in (*rows, row) if r.state is InstanceState.READY and r.serves}
            self.without |= self._have - ready
            self._have |= ready

    def declare(self, number):
        autoscaler = self.control.services["autoscaler"]
        model = autoscaler.models[self.random.choice(sorted(autoscaler.models))]
        fields = self.random.choice(CHANGES)(number)
        aliases = tuple(f"{model.key}-{alias}" for alias in fields.get("aliases", model.aliases))
        self.control.give("autoscaler", operator.Deploy(model=replace(model, **fields | {"aliases": aliases})))

    def changed(self, seconds, every_s):
        at_s, number = 0.0, 0
        while (at_s := at_s + self.random.uniform(0.1, 2 * every_s)) < seconds:
            self.kernel.after(at_s, self.declare, number := number + 1)
        self.advance(seconds)

    def outdated(self):
        models = self.control.services["autoscaler"].models
        living = [row for row in self.control.tables["instances"].values() if not row.state.is_gone]
        return [row.instance_id for row in living if row.is_outdated(models[row.model_key])]

    def ready(self):
        rows = self.control.tables["instances"].values()
        return sorted(row.model_key for row in rows if row.state is InstanceState.READY and row.serves)


@pytest.mark.parametrize("every_s", [0.7, 6.0])
@pytest.mark.parametrize("seed", SEEDS)
def test_where_there_is_room_a_model_is_served_throughout_and_in_the_end_as_declared(seed, every_s):
    fleet = Declared(seed, 3, num_nodes=3)
    fleet.advance(15.0)
    fleet.load(40.0, 3.0)
    for second in range(7, 40, 17):
        fleet.kernel.after(second, fleet.control.elect, fleet.random.choice(["autoscaler", "placer"]))
    fleet.changed(40.0, every_s)
    fleet.advance(60.0)
    assert (fleet.without, fleet.outdated()) == (set(), []), f"seed {seed}"
    assert set(fleet.ready()) == set(fleet.names), f"seed {seed}"
    ends = fleet.ends()
    assert ends["200"] + ends["client_left"] > 0.97 * ends.total(), f"seed {seed}: {ends}"  # a lost fact may cost one


@pytest.mark.parametrize("seed", SEEDS)
def test_where_there_is_none_instances_change_places_and_in_the_end_all_are_as_declared(seed):
    fleet = Declared(seed, 2, num_nodes=1, mib=140)
    fleet.advance(15.0)
    fleet.changed(60.0, 6.0)
    fleet.advance(90.0)
    assert fleet.outdated() == [] and fleet.ready() == fleet.names, f"seed {seed}"


@pytest.mark.parametrize("seed", SEEDS)
def test_a_declaration_whose_weights_no_node_can_have_leaves_what_serves_alone(seed):
    fleet = Declared(seed, 1, num_nodes=2, mib=140)
    fleet.advance(15.0)
    model = fleet.control.services["autoscaler"].models["m0"]
    weights = replace(model.weights, uri="file:/broken")
    for node in fleet.nodes.values():
        node.fetching.failing[weights.digest] = "weights_corrupt"
    fleet.load(60.0, 2.0)
    fleet.control.give("autoscaler", operator.Deploy(model=replace(model, weights=weights)))
    fleet.advance(60.0)
    assert fleet.without == set() and fleet.ends().keys() <= {"200", "client_left", "open"}, (
        f"seed {seed}: {fleet.ends()}"
    )
    assert len(fleet.outdated()) == 1, f"seed {seed}"
    fleet.control.give("autoscaler", operator.Deploy(model=model))
    fleet.advance(40.0)
    assert fleet.without == set() and fleet.outdated() == [], f"seed {seed}"
