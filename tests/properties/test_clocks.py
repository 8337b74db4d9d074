"""However a machine's clock is set, a process's clock never steps; whatever others' clocks say, nothing is from the
future."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from glowplug.events.commands import PlaceInstance
from glowplug.fleet.clocks import AHEAD_S, Clocks
from glowplug.runtime.clock import MAX_GAP_S, SLEW, SteadyClock
from tests.fleet_builder import a_model, an_event

NEAR = 1e-6
STEPS = st.lists(st.tuples(st.floats(0, 100), st.just(0.0) | st.floats(-1e5, 1e5)), max_size=30)


@given(STEPS)
def test_a_clock_never_steps(steps: list[tuple[float, float]]) -> None:
    monotonic_s, set_by_s = 0.0, 1e6
    clock = SteadyClock(lambda: monotonic_s, lambda: monotonic_s + set_by_s, max_gap_s=MAX_GAP_S)
    before_s = clock.now_s()
    for passed_s, by_s in steps:
        monotonic_s, set_by_s = monotonic_s + passed_s, set_by_s + by_s
        went_s, before_s = clock.now_s() - before_s, clock.now_s()
        runs_s = passed_s if passed_s <= MAX_GAP_S else 0.0
        assert (1 - SLEW) * runs_s - NEAR <= went_s <= (1 + SLEW) * runs_s + NEAR


@given(st.lists(st.tuples(st.floats(0, 20), st.floats(0, 5), st.just(0.0) | st.floats(-1e4, 1e4)), max_size=30))
def test_nothing_is_from_the_future(
    messages: list[tuple[float, float, float]],
) -> None:
    """Each comes some time after the last, is late, and its sender's clock has been set by so much."""
    clocks, now_s, ahead_s = Clocks(), 1e6, 0.0
    for after_s, late_s, by_s in messages:
        now_s, ahead_s = now_s + after_s, ahead_s + by_s
        sent_s = now_s - late_s
        command = PlaceInstance(instance_id="i", model=a_model(), reason="asked", wanted_at=sent_s + ahead_s)
        event = replace(an_event(command), occurred_at=sent_s + ahead_s)
        assert clocks.laid(event, now_s).data.wanted_at <= now_s + AHEAD_S + NEAR
