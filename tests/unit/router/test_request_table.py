"""What makes a router ready."""

from glowplug.controllers.router.controller import RouterController, RouterParams
from services.router.exchange import Exchange
from services.router.request_table import RequestTable, Stage


def test_a_router_of_a_new_fleet_is_ready_when_it_has_reached_the_bus_or_given_up_on_it() -> None:
    now_s = 100.0
    table = RequestTable[Exchange](RouterController(RouterParams()), clock=lambda: now_s)
    table.await_bus(5.0)
    assert "table" in table.not_ready()
    table.restore("models", {})
    assert table.not_ready() == "connecting to the bus"
    now_s = 105.0
    assert table.not_ready() == ""
    now_s = 101.0
    table.bus_reached()
    assert table.not_ready() == ""
    table.stage = Stage.LEAVING
    assert table.not_ready() == "stopping"
