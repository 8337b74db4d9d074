"""What makes a router ready."""

from glowplug.controllers.router.controller import RouterController
from glowplug.controllers.router.params import RouterParams
from services.router.desk import Desk


def test_a_router_of_a_new_fleet_is_ready_when_it_has_reached_the_bus_or_given_up_on_it() -> None:
    now_s = 100.0
    desk = Desk(RouterController(RouterParams()), clock=lambda: now_s)
    desk.bus_awaited_until = now_s + 5.0
    assert "table" in desk.not_ready()
    desk.restore("models", {})
    assert desk.not_ready() == "connecting to the bus"
    now_s = 105.0
    assert desk.not_ready() == ""
    now_s, desk.bus_awaited_until = 101.0, 0.0
    assert desk.not_ready() == ""
    desk.leaving = True
    assert desk.not_ready() == "stopping"
