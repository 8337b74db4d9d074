"""Virtual token counters: dispatch order, slots left free, and refusals."""

from typing import Any

import pytest

from glowplug.domain.access import Priority
from glowplug.policies.fairness.port import Claim, FairnessParams
from glowplug.policies.fairness.vtc import Vtc

PLENTY = (100, 100)  # slots, free ones


class Line:
    """A discipline with a clock and requests of 10 prompt and 10 answer tokens: 30 weighted."""

    def __init__(self, **params: float) -> None:
        self.vtc = Vtc(FairnessParams(**params))  # type: ignore[arg-type]
        self.claims: dict[int, Claim] = {}
        self.now_s = 1000.0

    def hold(
        self,
        tenant: str,
        num: int = 1,
        *,
        weight: float = 1.0,
        priority: Priority = Priority.STANDARD,
        prompt: int = 10,
        expected: int = 10,
    ) -> list[int]:
        found = []
        for _ in range(num):
            ticket = len(self.claims) + 1
            claim = Claim(ticket, tenant, weight, priority, self.now_s, prompt, expected)
            self.claims[ticket] = claim
            self.vtc.hold(claim, self.now_s)
            found.append(ticket)
        return found

    def next(self, num_slots: int = 100, num_free: int = 100) -> int | None:
        return self.vtc.next(num_slots, num_free, self.now_s)

    def take(self, num: int = 1) -> str:
        """Dispatch `num` requests; return their tenants' initials."""
        taken = ""
        for _ in range(num):
            ticket = self.next()
            if ticket is None:
                break
            self.vtc.sent(self.claims[ticket], self.now_s)
            taken += self.claims[ticket].tenant[0]
        return taken


def test_tenants_take_turns_however_many_requests_each_has() -> None:
    """Section 4.1."""
    line = Line()
    line.hold("flood", 6)
    line.hold("light", 2)
    assert line.take(8) == "flflffff"


def test_a_tenant_with_long_requests_has_fewer_of_them() -> None:
    """Section 4.1."""
    line = Line()
    line.hold("long", 4, prompt=70)  # 90 weighted tokens, as three short ones
    line.hold("short", 9)
    assert line.take(12).count("l") == 3


def test_a_weight_of_two_has_twice_the_tokens() -> None:
    """Section 4.3."""
    line = Line()
    line.hold("a", 20)
    line.hold("b", 20, weight=2.0)
    assert line.take(12).count("b") == 8


def test_absence_earns_no_credit() -> None:
    """Algorithm 2, lines 7 to 13: lifted to the least counter of those that wait."""
    line = Line()
    flood = line.hold("flood", 40)
    line.take(10)
    for ticket in flood[:10]:
        line.vtc.left(ticket, 10, line.now_s, comes_back=False)
    line.hold("new", 10)
    assert line.take(10).count("n") == 5


def test_what_runs_counts_against_its_tenant_when_another_arrives() -> None:
    line = Line()
    line.hold("flood", 40)
    line.take(4)
    line.hold("new", 10)
    assert line.take(8) == "nnnnfnfn"


def test_a_longer_answer_than_expected_is_charged_at_its_end() -> None:
    line = Line()
    line.hold("a", 10)
    line.hold("b", 10)
    assert line.take(2) == "ab"
    line.vtc.left(1, 100, line.now_s, comes_back=False)  # 210 weighted tokens instead of 30
    line.vtc.left(11, 10, line.now_s, comes_back=False)
    assert line.take(7) == "bbbbbba"


def test_a_request_that_comes_back_is_charged_once_and_keeps_its_place() -> None:
    line = Line()
    line.hold("a", 3)
    line.hold("b", 3)
    assert line.take(1) == "a"
    line.vtc.left(1, 0, line.now_s, comes_back=True)
    line.vtc.hold(line.claims[1], line.now_s)
    assert line.next() == 1
    assert line.take(6) == "ababab"


def test_a_stream_that_goes_on_is_before_all() -> None:
    line = Line()
    line.hold("a", 2)
    line.vtc.hold(Claim(9, "b", 1.0, Priority.BATCH, line.now_s, 10, 10, goes_on=True), line.now_s)
    assert line.vtc.next(8, 1, line.now_s) == 9 and line.vtc.order(line.now_s)[0] == 9


def test_a_more_urgent_class_costs_less() -> None:
    line = Line()
    line.hold("now", 20, priority=Priority.INTERACTIVE)
    line.hold("soon", 20)
    assert line.take(10).count("n") == 8


def test_batch_goes_only_where_nothing_more_urgent_waits() -> None:
    line = Line(reserve=0.0, unread_tokens=0)
    line.hold("batch", 2, priority=Priority.BATCH)
    line.hold("chat", 2)
    assert line.take(4) == "ccbb"


@pytest.mark.parametrize("priority", [Priority.INTERACTIVE, Priority.STANDARD])
def test_batch_that_has_waited_long_enough_goes_whatever_the_others_send(priority: Priority) -> None:
    """The docstring's bound: one request of each, where its tenant was served nothing meanwhile."""
    line = Line(patience_s=30.0)
    line.hold("batch", 1, priority=Priority.BATCH)
    line.hold("flood", 200, priority=priority)
    assert "b" not in line.take(50)
    line.now_s += 29.0
    assert "b" not in line.take(20)
    line.now_s += 1.0
    line.hold("flood", 20, priority=priority)
    assert "b" in line.take(2)


def test_within_a_tenant_the_more_urgent_goes_first_until_the_other_has_waited_long() -> None:
    line = Line(patience_s=30.0)
    (old,) = line.hold("a", 1, priority=Priority.BATCH)
    (urgent,) = line.hold("a", 1, priority=Priority.INTERACTIVE)
    assert line.next() == urgent
    line.now_s += 30.0
    assert line.next() == old


def test_a_tenant_above_its_share_leaves_a_slot_free_while_another_was_active() -> None:
    line = Line(active_s=60.0, most_recalls=0)
    (light,) = line.hold("light", 1)
    line.vtc.sent(line.claims[light], line.now_s)
    line.vtc.left(light, 10, line.now_s, comes_back=False)
    line.hold("flood", 20)
    assert line.take(4) == "ffff"
    assert line.next(8, 2) is not None and line.next(8, 1) is None
    (again,) = line.hold("light", 1)
    assert line.next(8, 1) == again, "the slot is for others"
    line.vtc.remove(again)
    line.now_s += 61.0
    line.hold("flood", 1)
    assert line.next(8, 1) is not None, "nobody else was active of late"


def test_a_model_of_few_slots_keeps_none_free() -> None:
    line = Line(unread_tokens=0)
    line.hold("light", 1)
    line.hold("flood", 5)
    line.take(4)
    assert line.next(2, 1) is not None


def test_batch_leaves_the_reserve_free_while_more_urgent_requests_come() -> None:
    line = Line(most_recalls=0)
    (chat,) = line.hold("chat", 1)
    line.vtc.sent(line.claims[chat], line.now_s)
    line.vtc.read(chat, line.now_s)
    line.hold("batch", 1, priority=Priority.BATCH)
    assert line.next(8, 1) is None and line.next(8, 2) is not None


def test_long_prompts_leave_slots_for_those_that_were_served_less_even_below_their_share() -> None:
    line = Line()
    for light in line.hold("light", 4):
        line.vtc.sent(line.claims[light], line.now_s)
        line.vtc.read(light, line.now_s)
    *sent, long = line.hold("far", 3, prompt=5000)
    for ticket in sent:
        assert line.next(8, 4) == ticket
        line.vtc.sent(line.claims[ticket], line.now_s)
        line.vtc.read(ticket, line.now_s)
    assert line.next(8, 2) == long and line.next(8, 1) is None, "one is for those with less"
    for more in line.hold("light", 1, expected=20_000):  # now above the long one
        line.vtc.sent(line.claims[more], line.now_s)
        line.vtc.read(more, line.now_s)
    assert line.next(8, 1) == long


def test_long_prompts_take_every_slot_where_nobody_else_was_active() -> None:
    line = Line()
    for num_free, long in zip(range(8, 0, -1), line.hold("far", 8, prompt=5000), strict=True):
        assert line.next(8, num_free) == long
        line.vtc.sent(line.claims[long], line.now_s)
        line.vtc.read(long, line.now_s)


def test_batch_that_can_give_way_leaves_one_of_many_slots_while_people_are_there() -> None:
    line = Line()
    (chat,) = line.hold("chat")
    line.vtc.sent(line.claims[chat], line.now_s)
    line.vtc.read(chat, line.now_s)
    line.hold("batch", 1, priority=Priority.BATCH)
    assert line.next(8, 1) is None and line.next(8, 2) is not None and line.next(7, 1) is not None
    line.vtc.left(chat, 10, line.now_s, comes_back=False)
    line.now_s += 61.0
    assert line.next(8, 1) is not None, "nobody was there for a minute"


def test_batch_waits_while_a_prompt_is_unread_and_people_are_there() -> None:
    line = Line()
    (chat,) = line.hold("chat")
    line.vtc.sent(line.claims[chat], line.now_s)
    line.hold("batch", 1, priority=Priority.BATCH)
    assert line.next(8, 7) is None and line.vtc.next(16, 14, line.now_s, num_instances=2) is not None
    line.vtc.read(chat, line.now_s)
    assert line.next(8, 7) is not None


def test_a_long_prompt_that_was_read_gives_way_once_and_after_all_others() -> None:
    line = Line()
    (long,) = line.hold("far", prompt=5000)
    line.take()
    line.vtc.read(long, line.now_s)
    short = _full(line, "far", 1)[0]
    for expected in (short, short, short, long):
        (light,) = line.hold("light")
        assert line.vtc.recall(2, 0, line.now_s) == expected
        line.vtc.left(expected, 0, line.now_s, comes_back=True)
        line.vtc.remove(light)
        line.vtc.sent(line.claims[expected], line.now_s)
        line.vtc.read(expected, line.now_s)
    line.hold("light")
    assert line.vtc.recall(2, 0, line.now_s) is None


def _full(line: Line, tenant: str, num: int = 8, **of: Any) -> list[int]:
    tickets = line.hold(tenant, num, **of)
    line.take(num)
    return tickets


def _leave(line: Line, ticket: int) -> None:
    line.vtc.left(ticket, 0, line.now_s, comes_back=True)
    line.vtc.hold(line.claims[ticket], line.now_s)


def test_the_newest_of_a_tenant_above_its_share_gives_way_and_the_other_has_its_slot() -> None:
    line = Line()
    flood = _full(line, "flood")
    (light,) = line.hold("light")
    assert line.vtc.recall(8, 0, line.now_s) == flood[-1]
    assert line.vtc.recall(8, 0, line.now_s) is None, "one at a time"
    _leave(line, flood[-1])
    assert line.next(8, 1) == light


def test_nobody_gives_way_for_a_tenant_that_has_its_share_or_to_one_with_as_little() -> None:
    line = Line()
    _full(line, "a", 4)
    _full(line, "b", 4)
    line.hold("a")
    assert line.vtc.recall(8, 0, line.now_s) is None, "four of eight are its share"
    many = Line()
    for number in range(8):
        _full(many, f"t{number}", 1)
    many.hold("new")
    assert many.vtc.recall(8, 0, many.now_s) is None, "nobody has a slot more than its share"


def test_a_request_gives_way_a_limited_number_of_times_and_then_another_one_does() -> None:
    line = Line(most_recalls=2)
    _full(line, "flood", 2)
    given = []
    for _ in range(5):
        (light,) = line.hold("light")
        ticket = line.vtc.recall(2, 0, line.now_s)
        given.append(ticket)
        if ticket is not None:
            _leave(line, ticket)
            assert line.take() == "l"
            line.vtc.left(light, 10, line.now_s, comes_back=False)
            assert line.take() == "f"
        line.vtc.remove(light)
    assert given == [2, 1, 2, 1, None]


@pytest.mark.parametrize(("prompt", "read_s", "each_s"), [(10, 0.0, 2.0), (200, 1.0, 30.0)])
def test_what_runs_for_long_gives_way_again(prompt: int, read_s: float, each_s: float) -> None:
    """In the second case 200 tokens take a second to read, so that a prompt of 200 and an answer of 400 take three of
    each of two slots: it gives way once in thirty.
    """
    line = Line(most_recalls=1)
    stays, flood = _full(line, "flood", 2, prompt=prompt, expected=400 if read_s else 10)
    line.vtc.stays(stays)
    made_s = [0.0]
    while len(made_s) < 4:
        line.now_s += read_s
        line.vtc.read(flood, line.now_s)
        began_at, (light,) = line.now_s, line.hold("light")
        while line.vtc.recall(2, 0, line.now_s) is None:
            line.now_s += 0.5
            assert line.now_s < began_at + 40
        made_s.append(made_s[-1] + line.now_s - began_at)
        _leave(line, flood)
        assert line.take() == "l"
        line.vtc.left(light, 10, line.now_s, comes_back=False)
        assert line.take() == "f"
    assert made_s == [0.0, 0.0, each_s, 2 * each_s]


def test_one_that_cannot_give_way_is_not_asked_again_and_slots_are_left_free_where_most_cannot() -> None:
    line = Line()
    flood = _full(line, "flood")
    line.hold("light")
    asked = []
    while (ticket := line.vtc.recall(8, 0, line.now_s)) is not None:
        asked.append(ticket)
        line.vtc.stays(ticket)
    assert asked == flood[::-1]
    line.take()
    line.vtc.left(flood[0], 10, line.now_s, comes_back=False)
    line.hold("flood")
    assert line.next(8, 1) is None


def test_batch_gives_way_to_any_more_urgent_request_and_standard_does_not_give_way_to_batch() -> None:
    line = Line()
    batch = _full(line, "a", 8, priority=Priority.BATCH)
    line.hold("a", 2)
    for ticket in (batch[-1], batch[-2]):
        assert line.vtc.recall(8, 0, line.now_s) == ticket
        _leave(line, ticket)
        assert line.take() == "a"
    other = Line()
    _full(other, "chat")
    other.hold("batch", priority=Priority.BATCH)
    assert other.vtc.recall(8, 0, other.now_s) is None


def test_batch_that_was_sent_after_its_patience_does_not_give_way_as_batch() -> None:
    line = Line(patience_s=30.0)
    line.hold("b", priority=Priority.BATCH)
    line.now_s += 31.0
    assert line.take() == "b"
    line.hold("chat")
    assert line.vtc.recall(1, 0, line.now_s) is None


def test_a_tenants_long_prompts_are_read_one_at_a_time_and_short_ones_are_not_held() -> None:
    line = Line(unread_tokens=512)
    first, second = line.hold("long", 2, prompt=5000)
    assert line.next() == first
    line.take()
    assert line.next() is None and not line.vtc.goes_at_once("short", 10, 1, line.now_s)
    (light,) = line.hold("light", prompt=100)
    assert line.next() == light
    line.vtc.read(first, line.now_s + 0.1)
    assert line.take() == "l" and line.next() is None, "the short one is unread"
    line.vtc.read(light, line.now_s + 0.2)
    assert line.next() == second


def test_each_instance_may_read_a_long_prompt() -> None:
    line = Line(unread_tokens=512)
    tickets = line.hold("long", 4, prompt=5000)
    for ticket in tickets[:3]:
        assert line.vtc.next(8, 8, line.now_s, num_instances=3) == ticket
        line.vtc.sent(line.claims[ticket], line.now_s)
    assert line.vtc.next(8, 8, line.now_s, num_instances=3) is None
    line.vtc.read(tickets[1], line.now_s)
    assert line.vtc.next(8, 8, line.now_s, num_instances=3) == tickets[3]
    line.hold("light", prompt=100)
    line.take()
    assert line.vtc.recall(8, 5, line.now_s, num_instances=3) is None, "one of the instances reads no long prompt"
    assert line.vtc.recall(8, 5, line.now_s, num_instances=2) == tickets[0]


def test_a_prompt_whose_first_token_never_shows_counts_as_read_after_a_while() -> None:
    line = Line(unread_tokens=512)
    first, _, third = line.hold("long", 3, prompt=5000)
    line.take()
    line.now_s += 1000.0
    assert line.next() is None, "nobody knows how fast this engine reads"
    line.vtc.read(first, line.now_s)
    line.take()
    line.now_s += 1999.0
    assert line.next() is None
    line.now_s += 2.0
    assert line.next() == third


def test_an_engine_that_streams_nothing_is_measured_by_its_first_whole_answer() -> None:
    line = Line(unread_tokens=512)
    first, _, third = line.hold("long", 3, prompt=5000)
    line.take()
    line.now_s += 10.0
    line.vtc.left(first, 100, line.now_s, comes_back=False)
    line.take()
    line.now_s += 19.0
    assert line.next() is None
    line.now_s += 2.0
    assert line.next() == third


def test_prompts_behind_the_one_that_is_read_have_not_begun_and_give_way() -> None:
    line = Line(unread_tokens=512)
    (known,) = line.hold("long", prompt=1000)
    line.take()
    line.now_s += 1.0
    line.vtc.read(known, line.now_s)
    first, second = line.hold("long", 2, prompt=5000)
    for ticket in (first, second):  # before another tenant came
        line.vtc.sent(line.claims[ticket], line.now_s)
    line.now_s += 3.0
    line.hold("light", prompt=100)
    line.take()
    assert line.vtc.recall(8, 4, line.now_s) == second, "more than half of the first one is read"
    _leave(line, second)
    assert line.vtc.recall(8, 5, line.now_s) is None and line.next(8, 5) is None, "both wait until they were read"


def test_a_long_unread_prompt_gives_way_to_a_short_one_that_came_behind_it() -> None:
    line = Line(unread_tokens=512)
    (long,) = line.hold("long", prompt=5000)
    line.take()
    (light,) = line.hold("light", prompt=100)
    line.take()
    assert line.vtc.recall(8, 6, line.now_s) == long
    _leave(line, long)
    assert line.next(8, 7) is None, "the short one is read first"
    line.vtc.read(light, line.now_s + 0.1)
    assert line.next(8, 7) == long
    line.take()
    line.hold("light", prompt=100)
    line.now_s += 30.0
    line.take()
    assert line.vtc.recall(8, 5, line.now_s) is None, "more than half of it is read"


def test_the_newest_of_the_tenant_with_most_of_the_queue_is_refused_first() -> None:
    line = Line()
    flood = line.hold("flood", 4)
    (light,) = line.hold("light", 1)
    assert next(line.vtc.before(light)) == flood[-1]
    assert not list(line.vtc.before(flood[-1])), "its own newest is the one that arrives"


def test_a_tenants_own_batch_is_refused_before_its_urgent_request() -> None:
    line = Line()
    batch = line.hold("a", 2, priority=Priority.BATCH)
    (urgent,) = line.hold("a", 1, priority=Priority.INTERACTIVE)
    assert list(line.vtc.before(urgent)) == batch[::-1]


def test_the_expected_order_is_the_one_that_comes() -> None:
    line = Line(unread_tokens=0)
    line.hold("a", 5)
    line.hold("b", 3, weight=2.0)
    line.hold("c", 2, priority=Priority.BATCH)
    line.hold("d", 3, prompt=100)
    expected = line.vtc.order(line.now_s)
    found = []
    while (ticket := line.next()) is not None:
        line.vtc.sent(line.claims[ticket], line.now_s)
        found.append(ticket)
    assert sorted(found) == sorted(expected) and found[-2:] == expected[-2:]
    assert sum(a != b for a, b in zip(found, expected, strict=True)) <= 4, "ties may fall otherwise"


def test_tenants_that_are_gone_are_forgotten() -> None:
    line = Line(active_s=60.0)
    for number in range(50):
        (ticket,) = line.hold(f"t{number}", 1)
        line.vtc.sent(line.claims[ticket], line.now_s)
        line.vtc.left(ticket, 10, line.now_s, comes_back=False)
    assert line.vtc.is_shared(line.now_s)
    line.now_s += 61.0
    assert not line.vtc.is_shared(line.now_s)
    assert len(line.vtc._tenants) <= 1
