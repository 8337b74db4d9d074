"""First come, first served, whoever the tenants are."""

from glowplug.domain.access import Priority
from glowplug.policies.fairness.fifo import fifo
from glowplug.policies.fairness.port import Claim


def claim(ticket: int, tenant: str = "a", priority: Priority = Priority.STANDARD) -> Claim:
    return Claim(ticket, tenant, 1.0, priority, 0.0)


def test_requests_go_by_ticket_and_one_that_comes_back_has_its_place() -> None:
    line = fifo()
    for ticket in (1, 2, 4, 5, 3):
        line.hold(claim(ticket, f"t{ticket % 2}"), 0.0)
    assert (line.next(8, 8, 0.0), line.order(0.0)) == (1, [1, 2, 3, 4, 5])
    line.sent(claim(1), 0.0)
    line.remove(4)
    line.remove(9)
    assert (line.next(8, 7, 0.0), line.order(0.0)) == (2, [2, 3, 5])
    line.left(1, 0, 1.0, comes_back=True)
    line.hold(claim(1), 1.0)
    assert line.next(8, 8, 1.0) == 1
    assert fifo().next(8, 8, 0.0) is None


def test_nobody_gives_way_or_is_refused_for_another() -> None:
    line = fifo()
    line.sent(claim(1, priority=Priority.BATCH), 0.0)
    line.stays(1)
    line.read(1, 0.0)
    line.hold(claim(2, "b", Priority.INTERACTIVE), 0.0)
    assert line.goes_at_once("b", 10**6, 1, 0.0) and not line.may_recall
    assert line.recall(1, 0, 0.0) is None and not list(line.before(2))


def test_a_model_is_shared_while_two_tenants_or_classes_wait_or_run() -> None:
    for other in (claim(2, "b"), claim(2, priority=Priority.BATCH)):
        line = fifo()
        line.hold(claim(1), 0.0)
        line.hold(claim(3), 0.0)
        assert not line.is_shared(0.0)
        line.hold(other, 0.0)
        line.sent(other, 0.0)
        assert line.is_shared(0.0)
        line.left(2, 10, 1.0, comes_back=False)
        line.left(9, 10, 1.0, comes_back=False)
        assert not line.is_shared(1.0)
