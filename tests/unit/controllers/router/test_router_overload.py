"""Early refusal of requests that cannot be served in time."""

from glowplug.controllers.effects import Tick
from glowplug.controllers.router import messages as msg
from glowplug.domain.instance import InstanceState
from tests.router_steps import Run, dispatched, model, rejected

LATE = 429, "wait_too_long"


def measured(*models, took_s=4.0, **params) -> Run:
    """A router that saw five answers of `m`, `took_s` each; its one instance takes two at once."""
    run = Run(*(models or (model(max_queue=1000),)), late_ratio=1.0, **params)
    run.instance()
    for _ in range(5):
        run.arrive()
        run.handle(msg.RequestEnded(run.ticket, took_s))
    return run


def fill(run, num, name="m"):
    return [effect for _ in range(num) for effect in run.arrive(name)]


def test_who_could_not_be_sent_on_within_the_longest_wait_is_refused_at_arrival():
    """Two at once, 4 s each: five wait for 10 s, the limit."""
    run = measured()
    effects = fill(run, 2 + 6)
    assert rejected(effects) == [] and len([e for e in effects if isinstance(e, msg.Hold)]) == 6
    [refused] = [e for e in run.arrive() if isinstance(e, msg.Reject)]
    assert (refused.error.status, refused.error.code, refused.error.type) == (*LATE, "rate_limit_error")
    assert "10 s" in refused.error.message and refused.ticket not in run.controller.requests


def test_each_refused_request_is_told_to_come_after_those_that_were_refused_before_it():
    run = measured()
    fill(run, 2 + 6)
    told = [e.error.retry_after_s for e in fill(run, 4) if isinstance(e, msg.Reject)]
    assert told == [12.0, 16.0, 16.0, 20.0], "six wait, then one and two ... that were refused before"
    for _ in range(6):
        oldest = next(t for t, r in run.controller.requests.items() if r.instance_id)
        run.handle(msg.RequestEnded(oldest, 4.0), 2.0)
    assert rejected(run.arrive()) == [], "who comes when it was told to is taken"


def test_on_a_guess_nobody_is_refused():
    run = Run(model(max_queue=1000), late_ratio=1.0)
    run.instance()
    assert rejected(fill(run, 200)) == []
    assert rejected(run.handle(msg.HeadDue(150), 2.0)) == [], "there is memory: it may grow, and nothing was measured"
    off = measured()
    off.controller.overload.ratio = 0.0
    assert rejected(fill(off, 200)) == []


def test_slots_that_the_model_may_grow_to_count_while_memory_is_not_short():
    run = measured(model(max_queue=1000, max_instances=4))
    assert rejected(fill(run, 2 + 21)) == [] and rejected(fill(run, 1)) == [(29, *LATE)]


def test_those_who_wait_are_looked_at_again_and_the_last_go_first():
    run = measured(model(max_queue=1000, max_wait_s=60.0), took_s=1.0)
    fill(run, 2 + 40)
    for ticket in (6, 7):
        assert rejected(run.handle(msg.RequestEnded(ticket, 100.0))) == []  # answers slow down from here
    late = rejected(run.handle(Tick(), 0.25))
    assert late and {(status, code) for _, status, code in late} == {LATE}
    tickets = [ticket for ticket, _, _ in late]
    assert tickets == list(range(run.ticket - len(late) + 1, run.ticket + 1))
    assert rejected(run.handle(Tick(), 0.25)) == []


def test_a_stream_is_asked_for_once_more_before_its_head_and_not_after():
    run = measured(took_s=1.0)
    fill(run, 2 + 20)
    last = run.ticket
    assert run.handle(msg.HeadDue(last - 1)) == []
    for ticket in (6, 7):
        run.handle(msg.RequestEnded(ticket, 100.0))
    [refused] = run.handle(msg.HeadDue(last))[:1]
    assert (refused.ticket, refused.error.status, refused.error.code) == (
        last,
        *LATE,
    ) and refused.error.retry_after_s > 1
    assert last - 1 not in [ticket for ticket, _, _ in rejected(run.handle(Tick(), 0.25))], "it has a 200 already"
    assert run.handle(msg.HeadDue(last)) == [] and run.handle(msg.HeadDue(8)) == [], "gone, and dispatched"


def short_of_memory(num_other=40, **params) -> Run:
    """`a` has an instance, `b` waits for memory; five answers of each were seen."""
    models = [model(key, max_queue=1000, max_wait_s=60.0) for key in "ab"]
    run = Run(*models, late_ratio=1.0, **params)
    for key in "ab":
        run.instance(f"i-{key}", model_key=key)
        for _ in range(5):
            run.arrive(key)
            run.handle(msg.RequestEnded(run.ticket, 4.0))
    run.instance("i-b", InstanceState.STOPPED, model_key="b", revision=2)
    fill(run, 2 + num_other, "a")
    fill(run, 1, "b")
    run.handle(Tick(), 1.0)
    return run


def test_while_memory_is_short_a_queue_has_only_its_share_of_it():
    run = short_of_memory(num_other=10)
    overload, b = run.controller.overload, run.controller.fleet.models["b"]
    assert overload.is_short
    assert overload.wait_s(b, 4, run.now_s) == 2 * 8.0, "as much work of a is done meanwhile"
    assert overload.wait_s(b, 20, run.now_s) == 40.0 + 20.0, "a has no more than 20 s of it"
    assert rejected(fill(run, 30, "b"))[0][1:] == LATE


def test_a_stream_at_its_last_chance_is_refused_on_a_guess_while_memory_is_short():
    run = Run(*(model(key, max_queue=1000) for key in "ab"), late_ratio=1.0)
    run.instance("i-a", model_key="a")
    fill(run, 2 + 10, "a")
    effects = fill(run, 40, "b")
    assert rejected(effects) == []
    assert rejected(run.handle(Tick(), 1.0)) == []
    assert rejected(run.handle(msg.HeadDue(run.ticket), 1.0)) == [(run.ticket, *LATE)]
    assert rejected(run.handle(msg.HeadDue(13))) == [], "the first of its queue"


def test_the_pace_of_all_is_measured_while_memory_is_short_and_kept_for_the_next_time():
    run = short_of_memory()
    overload = run.controller.overload
    assert overload.pace == 1.0, "one model has memory"
    for _ in range(160):
        run.handle(Tick(), 0.25)
    assert overload.pace < 0.2, "nothing was dispatched for 40 s"
    run.instance("i-b", model_key="b", revision=3)
    run.handle(Tick(), 0.25)
    assert not overload.is_short
    run.instance("i-b", InstanceState.STOPPED, model_key="b", revision=4)
    fill(run, 1, "b")
    run.handle(Tick(), 1.0)
    assert overload.is_short and 0.2 < overload.pace < 0.4, "the best it had been once it had been measured"


def test_a_queue_that_falls_short_ends_refusing():
    run = measured()
    fill(run, 2 + 6)
    assert rejected(run.arrive())
    for ticket in range(6, 12):
        run.handle(msg.RequestEnded(ticket, 4.0))
    assert rejected(run.arrive()) == [] and dispatched(run.handle(msg.RequestEnded(12, 4.0)))


def test_a_stream_at_its_last_chance_has_to_have_some_reserve_while_memory_is_short():
    """A third below the usual limit: 40 of 60 s."""
    run = short_of_memory(num_other=10)
    overload, b = run.controller.overload, run.controller.fleet.models["b"]
    assert [overload.is_late(b, num, 0.0, run.now_s, last_chance=True) for num in (10, 11)] == [False, True]
    assert [overload.is_late(b, num, 0.0, run.now_s) for num in (20, 21)] == [False, True]
