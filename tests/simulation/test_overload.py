"""More demand than memory, for a while: nobody falls far behind, nobody's start is cancelled, refusals are true."""

import pytest

from glowplug.simulator.world import World
from tests.simulation import fleets

SLOTS = [(4, 4, 4, 4, 8, 4), (4, 4, 4, 4, 4, 4), (2, 4, 8, 4, 16, 4)]
FAIR = 6  # requests


def spread_of(seed, slots, fair_requests):
    """The widest difference in dispatched requests between two models, all of which always wait, after 30 s; and how
    many were dispatched in all."""
    setup, arrivals = fleets.overload(seed, slots=slots, num_each=150, fair_requests=fair_requests)
    world = World(setup, arrivals, label=f"overload seed {seed}")
    queues, worst = world.control.router.queues, [0]

    def look():
        nums = [queue.num_dispatched for queue in queues.values()]
        if all(queue.waiting for queue in queues.values()):
            worst.append(max(nums) - min(nums))
        world.kernel.after(1.0, look)

    world.kernel.at(world.began_s + 30.0, look)
    world.run(150.0, drain_s=0.0)
    return max(worst), sum(queue.num_dispatched for queue in queues.values())


@pytest.mark.parametrize("slots", SLOTS)
def test_turns_bound_how_far_one_waiting_model_is_ahead_of_another(slots):
    for seed in range(2):
        spread, num = spread_of(seed, slots, FAIR)
        before, num_before = spread_of(seed, slots, 0)
        assert spread <= FAIR + 2 * max(slots), "a quantum, and what runs while a turn ends"
        assert len(set(slots)) == 1 or before > FAIR + 2 * max(slots), "without it wide batches run away"
        assert num >= 0.9 * num_before


def test_no_start_is_cancelled_while_a_request_is_held_for_it():
    for seed in range(4):
        setup, arrivals = fleets.overload(seed, num_each=30, seconds=60.0, max_wait_s=600.0)
        world = World(setup, arrivals, label=f"overload seed {seed}")
        cancelled = []

        def decided(decision, world=world, cancelled=cancelled):
            if decision.kind == "scale" and decision.chosen == "cancel":
                oldest = world.control.router.queues[decision.model_key].oldest()
                if oldest is not None and world.kernel.now_s - oldest.arrived_at > 0.01:  # the bus has had its time
                    cancelled.append((decision.model_key, world.kernel.now_s - world.began_s))

        world.control.on_decision.append(decided)
        world.run(60.0, drain_s=300.0)
        assert world.traffic.num_open == 0 and cancelled == [], f"seed {seed}"


def test_overload_is_refused_early_and_what_is_kept_is_answered():
    """Where half can be answered the rest is not kept until its time is over, and hardly anything is answered less."""
    for seed in range(2):
        kept = {}
        for late_ratio in (0.0, 1.2):
            setup, arrivals = fleets.overload(seed, seconds=60.0, num_each=100, max_wait_s=60.0, late_ratio=late_ratio)
            total = World(setup, arrivals, label=f"overload seed {seed}").run(60.0, drain_s=300.0).total()
            assert total.num_finished + sum(total.num_refused.values()) == len(arrivals)
            kept[late_ratio] = total
        refused = kept[1.2].num_refused
        assert kept[0.0].num_refused["wait_timeout"] > 100
        assert refused["wait_too_long"] > 100 and refused.get("wait_timeout", 0) <= 0.05 * len(arrivals)
        assert kept[1.2].num_finished >= 0.8 * kept[0.0].num_finished
