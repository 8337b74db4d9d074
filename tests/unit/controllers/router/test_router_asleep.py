"""An engine that is put to sleep closes no connection and sends nothing: what it has is taken back."""

import pytest

from glowplug.controllers.router.messages import Dispatch, DispatchFailed, Recall
from glowplug.domain.instance import InstanceState
from tests.unit.controllers.router.test_router_balance import Run, went


@pytest.mark.parametrize("state", [InstanceState.SWAPPED_OUT, InstanceState.PREWARMED])
def test_what_an_engine_has_that_is_put_to_sleep_is_called_back_and_goes_elsewhere(state: InstanceState) -> None:
    run = Run()
    run.instance("i-1")
    assert isinstance(run.arrive()[0], Dispatch)
    run.instance("i-1", InstanceState.DRAINING)
    run.instance("i-2")
    assert run.instance("i-1", state, reason="asleep in host memory") == [Recall(1, "asleep in host memory", True)]
    assert went(run.tell(DispatchFailed(1, False, "asleep in host memory"))) == ["i-2"]


def test_an_engine_that_drains_keeps_what_it_has() -> None:
    run = Run()
    run.instance("i-1")
    run.arrive()
    assert run.instance("i-1", InstanceState.DRAINING) == []
