"""The control plane against a hostile world, over many seeds."""

from collections import Counter

import pytest

from glowplug.controllers import operator
from glowplug.controllers.agent.messages import AgentParams, StopEngine
from glowplug.domain.instance import InstanceState
from glowplug_lab.simulator.hardware.engine import Origin
from glowplug_lab.simulator.run import digest_of
from tests.simulation.chaos import Fleet
from tests.simulation.seeds import seeds

SEEDS = seeds()
LEADERS = ["autoscaler", "placer", "predictor"]


def a_service(fleet):
    fleet.control.restart(fleet.random.choice(sorted(fleet.control.services)))


def a_leader(fleet):
    fleet.control.elect(fleet.random.choice(LEADERS))


def a_leader_or_the_store(fleet):
    leader = fleet.random.choice([*LEADERS, ""])
    if leader:
        fleet.control.elect(leader)
    else:
        fleet.control.empty_store()


def the_store(fleet):
    fleet.control.empty_store()


def an_engine(fleet):
    engines = [(node, instance_id) for node in fleet.nodes.values() for instance_id in node.engines]
    if engines:
        node, instance_id = fleet.random.choice(engines)
        node.kill(instance_id, "killed")


def a_sleeper(fleet):
    dormant = [
        (node, engine.instance_id)
        for node in fleet.nodes.values()
        for engine in node.engines.values()
        if engine.is_swapped or engine.is_replica
    ]
    if dormant:
        node, instance_id = fleet.random.choice(dormant)
        node.kill(instance_id, "killed in its sleep")


def harmed(fleet, harm, *, seconds=60.0, per_second=3.0, every_s=5, settle_s=90.0):
    """In the end all are answered and all is free. Returns how requests ended."""
    fleet.load(seconds, per_second)
    for second in range(every_s, int(seconds), every_s) if harm else ():
        fleet.kernel.after(second, harm, fleet)
    fleet.advance(seconds)
    fleet.settle(settle_s)
    return fleet.ends()


@pytest.mark.parametrize(
    ("num_models", "harm", "well", "fields"),
    [
        pytest.param(6, None, 0.5, {"per_second": 4.0}, id="more models than memory"),
        pytest.param(4, a_service, 0.4, {}, id="services killed"),
        pytest.param(4, a_leader_or_the_store, 0.5, {}, id="leaders replaced and stores emptied"),
        pytest.param(3, an_engine, 0.0, {"seconds": 40.0, "per_second": 4.0, "every_s": 4}, id="engines killed"),
    ],
)
@pytest.mark.parametrize("seed", SEEDS)
def test_over_a_bad_bus_everybody_is_answered_and_most_of_them_well(seed, num_models, harm, well, fields):
    ends = harmed(Fleet(seed, num_models), harm, **fields)
    assert ends["200"] > well * ends.total(), f"seed {seed}: {ends}"


@pytest.mark.parametrize("harm", [a_service, a_leader, the_store])
@pytest.mark.parametrize("seed", seeds(1))
def test_dormant_engines_while_services_are_killed_and_replaced(seed, harm):
    """Under the union, engines that stop or make way lie dormant."""
    fleet = Fleet(seed, 6, system="union")
    ends = harmed(fleet, harm, settle_s=AgentParams().start_deadline_s + 60.0)  # a pipeline without a stage ends then
    assert ends["200"] > 0.4 * ends.total(), f"seed {seed}: {ends}"
    assert fleet.results.starts.keys() & {Origin.PREWARMED, Origin.SWAPPED}, f"seed {seed}: {fleet.results.starts}"


@pytest.mark.parametrize("seed", seeds(1))
def test_sleepers_that_die_and_wakes_that_fail_leave_nobody_without_an_answer(seed):
    """No command is lost: a missing stage would hold its pipeline's bytes for as long as a start may take."""
    fleet, woken = Fleet(seed, 6, system="union", lose=0.0), Counter()

    def saved(table, row, now_s):
        if table == "instances" and row.source and row.state is InstanceState.LOADING and row.instance_id not in woken:
            woken[row.instance_id] = fleet.random.random() < 0.5
            if woken[row.instance_id]:
                fleet.kernel.after(0.0, fleet.nodes[row.node_id].kill, row.instance_id, "killed while it woke")

    fleet.control.on_save.append(saved)
    ends = harmed(fleet, a_sleeper, settle_s=AgentParams().start_deadline_s + 60.0)
    assert woken, f"seed {seed}: nothing was woken"
    assert ends.keys() <= {"200", "client_left"} and ends["200"] > 0.8 * ends.total(), f"seed {seed}: {ends}"


@pytest.mark.parametrize("seed", SEEDS)
def test_corrupt_weights_are_never_served_and_everybody_is_answered(seed):
    fleet = Fleet(seed, 2, num_nodes=1)
    fleet.nodes["node-1"].fetching.failing[digest_of(fleet.models["m0"].model.weights)] = "weights_corrupt"
    fleet.advance(3.0)
    tickets = [fleet.come("m0") for _ in range(20)]
    good = [fleet.come("m1") for _ in range(5)]
    fleet.advance(70.0)
    assert {fleet.outcome[t] for t in tickets} <= {"503 weights_corrupt"}, f"seed {seed}"
    assert {fleet.outcome[t] for t in good} == {"200"}, f"seed {seed}"
    fleet.settle()


@pytest.mark.parametrize("seed", seeds(2))
@pytest.mark.parametrize("num_bad", [2, 3])
def test_weights_that_some_nodes_cannot_have_are_had_on_another(seed, num_bad):
    """A request is refused only after each node has been tried."""
    fleet = Fleet(seed, 1, num_nodes=3)
    digest = digest_of(fleet.models["m0"].model.weights)
    for number in range(1, num_bad + 1):
        fleet.nodes[f"node-{number}"].fetching.failing[digest] = "no_space"
    fleet.advance(3.0)
    tickets = [fleet.come("m0") for _ in range(10)]
    fleet.advance(40.0)
    assert {fleet.outcome[t] for t in tickets} == {"200" if num_bad < 3 else "503 no_space"}, f"seed {seed}"
    tried = [decision.node_id for decision in fleet.decisions if decision.kind == "place"]
    assert set(tried) == {"node-1", "node-2", "node-3"} or num_bad < 3, f"seed {seed}: {tried}"
    fleet.settle()


def test_a_thousand_at_once_for_one_cold_model_cause_one_start():
    fleet = Fleet(7, 1, lose=0.0, double=0.0, max_queue=2000)
    fleet.advance(3.0)
    tickets = [fleet.come("m0") for _ in range(1000)]
    fleet.advance(59.0)
    assert {fleet.outcome[t] for t in tickets} == {"200"}
    assert len([d for d in fleet.decisions if d.kind == "place"]) == 1


@pytest.mark.parametrize("seed", SEEDS)
def test_two_models_that_exclude_each_other_both_get_their_turn(seed):
    """peers.md T17: A/B/A/B on one GPU, both always wanted: no starvation."""
    fleet = Fleet(seed, 2, mib=250, num_nodes=1, lose=0.0)
    fleet.load(100.0, 6.0)
    fleet.advance(100.0)
    by_model = Counter(decision.model_key for decision in fleet.decisions if decision.kind == "place")
    ends = fleet.ends()
    assert min(by_model["m0"], by_model["m1"]) >= 2, f"seed {seed}: {by_model}"
    assert ends["503 wait_timeout"] == 0, f"seed {seed}: {ends}"
    fleet.settle()


def test_a_model_no_gpu_can_hold_is_refused_at_once_with_the_reason():
    fleet = Fleet(1, 1, mib=500, lose=0.0)
    fleet.advance(5.0)
    tickets = [fleet.come("m0") for _ in range(3)]
    fleet.advance(5.0)
    assert {fleet.outcome[t] for t in tickets} == {"503 no_capacity"}
    assert fleet.outcome[fleet.come("m0")] == "503 no_capacity"


def test_a_drained_model_answers_what_waits_and_what_comes_until_it_is_loaded():
    fleet = Fleet(2, 1, lose=0.0)
    fleet.advance(3.0)
    held = fleet.come("m0")
    fleet.control.give("autoscaler", operator.Suspend("m0"))
    fleet.advance(2.0)
    assert fleet.outcome[held] == "503 model_suspended"
    assert fleet.outcome[fleet.come("m0")] == "503 model_suspended"
    fleet.control.give("autoscaler", operator.Load("m0"))
    fleet.advance(5.0)
    again = fleet.come("m0")
    fleet.advance(10.0)
    assert fleet.outcome[again] == "200"


class Forgetful:
    """It decides to end engines but does not ask for it."""

    def __init__(self, controller):
        self._controller = controller

    def handle(self, stimulus, now_s):
        return [e for e in self._controller.handle(stimulus, now_s) if not isinstance(e, StopEngine)]

    def __getattr__(self, name):
        return getattr(self._controller, name)


def test_a_broken_controller_is_found_and_its_seed_is_named():
    fleet = Fleet(3, 2)
    fleet.control.services["node-1"] = Forgetful(fleet.control.services["node-1"])
    fleet.load(20.0, 4.0)
    with pytest.raises(AssertionError, match="seed 3"):
        fleet.advance(20.0)
        fleet.settle()


def test_one_seed_is_one_run():
    def run(seed):
        fleet, seen = Fleet(seed, 3), []
        fleet.control.on_event.append(lambda event: seen.append((event.type, event.occurred_at)))
        fleet.load(10.0, 4.0)
        fleet.advance(10.0)
        return seen

    assert run(5) == run(5) != run(6)
