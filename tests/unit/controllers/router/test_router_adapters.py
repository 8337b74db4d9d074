"""A base and its adapters share one engine, slot count and queue."""

from glowplug.controllers.effects import Tick
from glowplug.controllers.router.messages import RequestEnded
from glowplug.domain.instance import InstanceState
from tests.router_steps import Run, dispatched, model


def shared(**params) -> Run:
    """A base with i-1, which runs two requests at once, and two adapters in it."""
    run = Run(model("m"), model("a", base="m"), model("b", base="m"), **params)
    run.instance("i-1")
    for key in ("a", "b"):
        run.instance(f"i-{key}", model_key=key, host_id="i-1", url="http://i-1:1")
    return run


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
