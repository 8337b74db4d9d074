"""A base and its adapters share one engine, slot count and queue."""

from glowplug.controllers.effects import Tick
from glowplug.controllers.router.messages import RequestEnded
from glowplug.domain.instance import InstanceState
from glowplug.domain.snapshot import ModelLoad
from tests.fleet_builder import load_report
from tests.router_steps import Run, dispatched, model, rejected


def shared(**params) -> Run:
    """A base with i-1, which runs two requests at once, and two adapters in it."""
    run = Run(model("m"), model("a", base="m"), model("b", base="m"), **params)
    run.instance("i-1")
    for key in ("a", "b"):
        run.instance(f"i-{key}", model_key=key, host_id="i-1", url="http://i-1:1")
    return run


def test_requests_of_all_models_of_an_engine_take_its_slots():
    run = shared()
    assert dispatched(run.arrive("m")) == [(1, "i-1")]
    assert dispatched(run.arrive("a")) == [(2, "i-a")], "it goes to the adapter's own instance"
    assert [dispatched(run.arrive(name)) for name in ("m", "a", "b")] == [[], [], []], "two run, of two"
    assert run.controller.eta_s("b", run.now_s) > 0


def test_a_slot_goes_to_who_waited_longest_whatever_model_it_names():
    run = shared()
    for name in ("m", "m", "b", "a", "m"):
        run.now_s += 1
        run.arrive(name)
    order = [dispatched(run.handle(RequestEnded(ticket, took_s=1.0))) for ticket in (1, 2, 3)]
    assert order == [[(3, "i-b")], [(4, "i-a")], [(5, "i-1")]]


def test_other_routers_requests_of_any_of_the_models_count():
    run = shared()
    run.handle(load_report("router-2", a=ModelLoad(num_in_flight=1, in_flight_by_instance={"i-a": 1})))
    assert dispatched(run.arrive("b")) == [(1, "i-b")]
    assert dispatched(run.arrive("m")) == []
    assert dispatched(run.handle(load_report("router-2", a=ModelLoad()))) == [(2, "i-1")]


def test_an_adapter_that_drains_still_takes_slots_until_its_requests_end():
    run = shared()
    run.arrive("a")
    run.instance("i-a", InstanceState.DRAINING, model_key="a", host_id="i-1", revision=2)
    assert dispatched(run.arrive("m")) == [(2, "i-1")]
    assert dispatched(run.arrive("m")) == []
    assert dispatched(run.handle(RequestEnded(1, took_s=1.0))) == [(3, "i-1")]
    run.instance("i-a", InstanceState.STOPPED, model_key="a", host_id="i-1", revision=3)
    run.instance("i-b", InstanceState.STOPPED, model_key="b", host_id="i-1", revision=3)
    run.handle(Tick())
    assert run.controller.balances.hosts.riders == {}, "nothing is kept of adapters that are gone"


def test_an_adapter_whose_base_is_drained_by_its_operator_is_refused_with_that_reason():
    run = Run(model("m"), model("a", base="m"))
    assert rejected(run.arrive("a")) == []
    run.controller.restore("models", {"m": model("m", suspended=True, revision=2)}, run.now_s)
    assert run.controller.queues["a"].waiting == {}
    assert rejected(run.arrive("a")) == [(2, 503, "model_suspended")]
