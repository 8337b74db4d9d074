"""Virtual token counters: dispatch order, slots left free, and refusals."""

import math
from typing import Any

import pytest

from glowplug.domain.access import Priority
from glowplug.policies.fairness.port import Claim, FairnessParams
from glowplug.policies.fairness.vtc import UnreadPrompts, Vtc, _above

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


@pytest.mark.parametrize(
    ("prompt", "read_s", "each_s", "num_instances"),
    [(10, 0.0, 2.0, 1), (200, 1.0, 30.0, 1), (200, 1.0, 15.0, 2)],
)
def test_what_runs_for_long_gives_way_again(prompt: int, read_s: float, each_s: float, num_instances: int) -> None:
    """In the second case 200 tokens take a second to read, so that a prompt of 200 and an answer of 400 take three of
    each of two slots: it gives way once in thirty; in the third case, each instance has one of the slots.
    """
    line = Line(most_recalls=1)
    stays, flood = _full(line, "flood", 2, prompt=prompt, expected=400 if read_s else 10)
    line.vtc.stays(stays)
    made_s = [0.0]
    while len(made_s) < 4:
        line.now_s += read_s
        line.vtc.read(flood, line.now_s)
        began_at, (light,) = line.now_s, line.hold("light")
        while line.vtc.recall(2, 0, line.now_s, num_instances) is None:
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


def test_a_prompt_counts_as_unread_for_twice_the_time_that_all_unread_ones_take() -> None:
    """At 0.02 s a token, and 0.2 s more."""
    unread = UnreadPrompts(512)
    unread.sent(1, "a", 100, 10.0)
    unread.read(1, 12.0)
    unread.sent(2, "a", 100, 20.0)  # until 24.2
    unread.sent(3, "b", 50, 21.0)  # until 27.2
    unread.sent(4, "c", 0, 21.0)
    assert unread.tickets(24.1) == [2, 3]
    assert [unread.tokens(at) for at in (24.1, 24.3, 27.1)] == [150, 50, 50]
    unread.sent(5, "c", 600, 27.3)  # alone by then: until 51.5
    assert (unread.num_long, unread.tickets(51.4), unread.tickets(51.6), unread.num_long) == (1, [5], [], 0)
    for ticket, at in ((6, 60.0), (7, 70.0), (8, 80.0)):
        unread.sent(ticket, "a", 500, at)
    ends = [unread.prompts[ticket].until for ticket in (6, 7, 8)]
    assert [unread.is_full("a", 600, 1, at) for at in (ends[0] - 0.1, ends[2])] == [True, False]
    for ticket, at in ((6, 160.0), (7, 170.0), (8, 180.0)):
        unread.sent(ticket, "a", 512, at)
    ends = [unread.prompts[ticket].until for ticket in (6, 7, 8)]
    assert unread.num_long == 0 and [unread.tickets(at) for at in ends] == [[7, 8], [8], []] and unread.num_long == 0


def test_reading_is_measured_by_prompts_of_some_length_from_the_end_of_the_one_before() -> None:
    unread, seen = UnreadPrompts(512), []
    for ticket, tokens, at in ((1, 64, 0.0), (2, 100, 10.0), (3, 100, 10.0), (4, 63, 20.0), (5, 100, 30.0)):
        unread.sent(ticket, "a", tokens, at)
    for ticket, at in ((9, 0.0), (1, 6.4), (2, 11.0), (3, 13.0), (4, 29.0), (5, 40.0)):
        unread.read(ticket, at)
        seen.append(unread.token_s)
    assert seen == pytest.approx([0.0, 0.1, 0.082, 0.0696, 0.0696, 0.0696 + 0.2 * (0.1 - 0.0696)])
    unread.sent(6, "a", 100, 50.0)
    until_s = 2 * 100 * unread.token_s + 0.2
    unread.read(6, 50.0 + until_s)
    assert unread.token_s == seen[-1], "it counted as read by then"


def test_only_a_whole_answer_to_a_prompt_of_some_length_measures_reading_and_only_the_first() -> None:
    unread, seen = UnreadPrompts(512), []
    for ticket, tokens, took_s, is_over in (
        (1, 63, 9.0, True),
        (2, 64, 6.4, False),
        (3, 64, 6.4, True),
        (4, 64, 9, True),
    ):
        unread.sent(ticket, "a", tokens, 10.0 * ticket)
        unread.left(ticket, 10.0 * ticket + took_s, is_over=is_over)
        seen.append(unread.token_s)
    unread.left(9, 99.0, is_over=True)
    assert seen == pytest.approx([0.0, 0.0, 0.1, 0.1]) and not unread.prompts and not unread.tokens(50.0)


@pytest.mark.parametrize(
    ("own", "tokens", "num_instances", "is_full"),
    [
        ([400], 112, 1, False),
        ([400], 113, 1, True),
        ([], 5000, 1, False),
        ([1000], 100, 2, False),
        ([1000, 10], 14, 2, False),
        ([1000, 10], 15, 2, True),
    ],
)
def test_a_tenants_prompts_are_full_by_its_own_unread_ones(
    own: list[int], tokens: int, num_instances: int, *, is_full: bool
) -> None:
    unread = UnreadPrompts(512)
    unread.sent(1, "other", 900, 0.0)
    for number, prompt in enumerate(own):
        unread.sent(number + 2, "a", prompt, 0.0)
    assert unread.is_full("a", tokens, num_instances, 0.0) == is_full
    unread.left(1, 0.0, is_over=False)
    assert unread.is_full("a", tokens, num_instances, 0.0) == is_full
    assert (unread.is_long(512), unread.is_long(513)) == (False, True)
    assert not UnreadPrompts(0).is_long(10**9)


def test_a_prompt_is_young_until_half_of_it_is_read_after_those_before_it() -> None:
    """At 0.01 s a token."""
    unread = UnreadPrompts(512)
    unread.sent(1, "a", 1000, 0.0)
    assert unread.is_young(1, 10**6), "nobody knows how fast this engine reads"
    unread.read(1, 10.0)
    unread.sent(2, "a", 1000, 20.0)
    unread.sent(3, "a", 500, 22.0)
    ages = {2: (24.9, 25.0), 3: (32.4, 32.5)}
    assert [unread.is_young(ticket, at) for ticket in ages for at in ages[ticket]] == [True, False] * 2
    unread.read(2, 30.0)
    assert [unread.is_young(3, at) for at in (32.4, 32.5)] == [True, False]


def counters(line: Line) -> dict[str, float]:
    return {name: tenant.counter for name, tenant in line.vtc._tenants.items()}


def send(line: Line, tenant: str, **of: Any) -> int:
    """Dispatch a request that never waited, and note that its prompt was read."""
    ticket = len(line.claims) + 1
    claim = Claim(ticket, tenant, of.pop("weight", 1.0), of.pop("priority", Priority.STANDARD), line.now_s, 10, 10)
    line.claims[ticket] = claim = claim._replace(**of)
    line.vtc.sent(claim, line.now_s)
    line.vtc.read(ticket, line.now_s)
    return ticket


@pytest.mark.parametrize(
    ("of", "charge", "corrected"),
    [
        ({"prompt_tokens": 70, "expected_tokens": 20}, 110.0, 130.0),
        ({"prompt_tokens": 0, "expected_tokens": 20}, 41.0, 61.0),
        ({"prompt_tokens": 69, "expected_tokens": 0}, 469.0, 129.0),
        ({"weight": 0.5}, 60.0, 140.0),
        ({"priority": Priority.INTERACTIVE}, 7.5, 17.5),
        ({"priority": Priority.BATCH, "weight": 2.0}, 60.0, 140.0),
    ],
)
def test_a_request_is_charged_by_its_tokens_the_weight_and_the_class(
    of: dict[str, Any], charge: float, corrected: float
) -> None:
    """At its end for 30 tokens of an answer."""
    for response_tokens, wanted in ((30, corrected), (0, charge)):
        line = Line()
        ticket = send(line, "a", **of)
        assert counters(line) == {"a": charge} and line.vtc._tenants["a"].pending == charge
        line.vtc.left(ticket, response_tokens, line.now_s, comes_back=False)
        assert counters(line) == {"a": pytest.approx(wanted)} and line.vtc._tenants["a"].pending == 0.0
    line = Line()
    ticket = send(line, "a", **of)
    send(line, "a")
    pending = line.vtc._tenants["a"].pending
    line.vtc.left(ticket, 0, line.now_s, comes_back=True)
    assert line.vtc._tenants["a"].pending == pending - charge and counters(line) == {"a": pending - charge}


def test_answers_of_unknown_length_are_expected_as_the_newest_were() -> None:
    line = Line(default_tokens=200, default_s=3.0)
    ticket = send(line, "a")
    line.now_s += 13.0
    line.vtc.left(ticket, 400, line.now_s, comes_back=False)
    assert (line.vtc._answer_tokens, line.vtc._answer_s) == pytest.approx((210.0, 3.5))
    line.vtc.left(send(line, "a"), 0, line.now_s, comes_back=False)
    line.vtc.left(send(line, "a"), 400, line.now_s, comes_back=True)
    assert (line.vtc._answer_tokens, line.vtc._answer_s) == pytest.approx((210.0, 3.5))
    send(line, "b", expected_tokens=0)
    assert counters(line)["b"] == pytest.approx(counters(line)["a"] + 430.0)


def test_who_comes_is_lifted_to_the_least_that_wait_or_else_to_the_last_that_was_served() -> None:
    line = Line()
    line.hold("b")
    line.hold("c")
    for tenant, expected in (("b", 100), ("c", 50), ("a", 500)):
        line.vtc.left(send(line, tenant, expected_tokens=expected), expected, line.now_s, comes_back=False)
    send(line, "c")
    line.vtc.left(send(line, "a"), 10, line.now_s, comes_back=False)
    send(line, "new")
    assert counters(line) == {"b": 210.0, "c": 140.0, "a": 1150.0, "new": 140.0}
    line = Line()
    first = send(line, "a")
    line.vtc.left(first, 10, line.now_s, comes_back=False)
    send(line, "b")
    send(line, "new")
    assert counters(line) == {"a": 30.0, "b": 60.0, "new": 60.0}, "those of b still run"
    line.hold("a")
    assert counters(line)["a"] == 30.0


def test_of_equal_counters_the_tenant_with_less_running_by_weight_goes_first() -> None:
    line = Line()
    send(line, "b")
    send(line, "a", weight=2.0, prompt_tokens=40)
    assert counters(line) == {"b": 30.0, "a": 30.0}
    line.hold("b")
    line.hold("a", weight=2.0)
    assert line.take() == "a"


def test_unknown_requests_change_nothing() -> None:
    line = Line()
    flood = _full(line, "flood")
    end_at_once(line, "light")
    line.vtc.read(99, line.now_s)
    line.vtc.left(99, 10, line.now_s, comes_back=False)
    line.vtc.remove(99)
    for _ in range(9):
        line.vtc.stays(99)
    line.vtc.left(flood[0], 10, line.now_s, comes_back=False)
    line.hold("flood")
    assert line.next(8, 1) is not None, "nobody was asked and could not give way"


def test_streams_that_go_on_are_the_oldest_first_and_can_be_removed() -> None:
    line = Line()
    for ticket in (8, 7, 9):
        line.vtc.hold(Claim(ticket, "b", 1.0, Priority.BATCH, line.now_s, 10, 10, goes_on=True), line.now_s)
    assert line.next() == 7 and line.vtc.order(line.now_s) == [7, 8, 9]
    line.vtc.remove(7)
    assert line.next() == 8
    line = Line()
    _full(line, "flood")
    line.hold("light")
    line.vtc.hold(Claim(99, "b", 1.0, Priority.BATCH, line.now_s, 10, 10, goes_on=True), line.now_s)
    assert line.vtc.recall(8, 0, line.now_s) is None, "the next slot is for the stream"
    line.vtc.remove(99)
    assert line.vtc.recall(8, 1, line.now_s) is None, "a slot is free"
    assert line.vtc.recall(8, 0, line.now_s) is not None


def test_a_request_may_be_recalled_while_a_long_prompt_is_unread() -> None:
    line = Line(unread_tokens=512)
    assert not line.vtc.may_recall
    short, long = line.hold("a", prompt=512), line.hold("b", prompt=513)
    for ticket in (*short, *long):
        assert not line.vtc.may_recall
        line.vtc.sent(line.claims[ticket], line.now_s)
    assert line.vtc.may_recall
    line.vtc.read(long[0], line.now_s)
    assert not line.vtc.may_recall
    line.vtc.left(short[0], 0, line.now_s, comes_back=False)
    assert not line.vtc.may_recall
    line = Line(unread_tokens=512)
    first, second, third = (unread(line, "b", 513, 0.0) for _ in range(3))
    line.vtc.left(first, 0, line.now_s, comes_back=False)
    line.vtc.read(second, line.now_s)
    assert line.vtc.may_recall
    unread(line, "b", 513, 0.0)
    line.vtc.left(third, 0, line.now_s, comes_back=False)
    assert line.vtc.may_recall


def test_what_leaves_leaves_nothing() -> None:
    line = Line()
    flood = _full(line, "flood")
    (light,) = line.hold("light")
    ticket = line.vtc.recall(8, 0, line.now_s)
    assert ticket == flood[-1]
    line.vtc.stays(flood[0])
    line.vtc.left(flood[1], 10, line.now_s, comes_back=False)
    assert line.vtc.recall(8, 0, line.now_s) is None, "one is still giving way"
    _leave(line, ticket)
    assert line.vtc._recalls
    line.vtc.remove(ticket)
    assert not line.vtc._recalls
    assert line.take() == "l"
    assert line.vtc.recall(8, 0, line.now_s) is None
    line.hold("light")
    ticket = line.vtc.recall(8, 0, line.now_s)
    assert ticket == flood[-2]
    line.vtc.left(ticket, 10, line.now_s, comes_back=False)
    (urgent,) = line.hold("light", priority=Priority.INTERACTIVE)
    assert line.next(8, 1) == urgent, "it has ended, and promised nothing"
    line.take(2)
    line.hold("light")
    ticket = line.vtc.recall(8, 0, line.now_s)
    assert ticket is not None
    _leave(line, ticket)
    line.vtc.sent(line.claims[ticket], line.now_s)
    line.vtc.left(ticket, 0, line.now_s, comes_back=False)
    assert not line.vtc._recalls
    for number in (light, *flood, *range(1, 99)):
        line.vtc.left(number, 0, line.now_s, comes_back=False)
        line.vtc.remove(number)
    vtc = line.vtc
    assert not (vtc._recalls or vtc._staying or vtc._running or vtc._busy or vtc._waiting or vtc._backlog)
    assert vtc._num_urgent == 0


def test_the_promised_slot_is_for_the_one_it_was_promised_to() -> None:
    line = Line()
    flood = _full(line, "flood")
    (light,) = line.hold("light")
    assert line.vtc.recall(8, 0, line.now_s) == flood[-1]
    _leave(line, flood[-1])
    line.hold("light", priority=Priority.INTERACTIVE)
    assert (line.next(8, 0), line.next(8, 1)) == (None, light)
    assert line.vtc.recall(8, 0, line.now_s) is None


@pytest.mark.parametrize(("num_staying", "num_given", "keeps"), [(3, 0, False), (4, 0, True), (4, 1, False)])
def test_slots_are_left_free_once_most_of_the_newest_could_not_give_way(
    num_staying: int, num_given: int, *, keeps: bool
) -> None:
    line = Line()
    flood = _full(line, "flood")
    (light,) = line.hold("light")
    for _ in range(num_staying):
        ticket = line.vtc.recall(8, 0, line.now_s)
        assert ticket is not None
        line.vtc.stays(ticket)
    for _ in range(num_given):
        ticket = line.vtc.recall(8, 0, line.now_s)
        assert ticket is not None
        _leave(line, ticket)
    line.vtc.remove(light)
    line.vtc.left(flood[0], 10, line.now_s, comes_back=False)
    line.hold("flood")
    assert (line.next(8, 1) is None) == keeps


def test_one_that_came_back_may_be_asked_again_to_give_way() -> None:
    line = Line()
    (flood,) = _full(line, "flood", 1)
    line.hold("light")
    assert line.vtc.recall(1, 0, line.now_s) is None, "it has its share without it"
    (other,) = _full(line, "flood", 1)
    line.take()
    for ticket in (flood, other):
        line.vtc.stays(ticket)
    line.hold("light")
    assert line.vtc.recall(2, 0, line.now_s) is None


def num_left_free(line: Line, num_slots: int = 32) -> int:
    return sum(line.next(num_slots, num_free) is None for num_free in range(1, num_slots // 2 + 1))


def end_at_once(line: Line, tenant: str, num: int = 1, **of: Any) -> None:
    for _ in range(num):
        line.vtc.left(send(line, tenant, **of), 0, line.now_s, comes_back=False)


@pytest.mark.parametrize("mean", [-1.0, 0.0, 0.05, 0.052, 0.36, 1.0, 3.0, 20.0])
def test_the_number_of_slots_is_the_least_that_is_reached_rarely(mean: float) -> None:
    number = _above(mean, 0.05)

    def reached(least: int) -> float:
        return 1 - sum(math.exp(-mean) * mean**num / math.factorial(num) for num in range(least))

    assert _above(10.0**6, 0.05) == 1001, "the most"
    assert number == 1 if mean < 0 else reached(number) <= 0.05 and (number == 1 or reached(number - 1) > 0.05)


def test_slots_are_left_free_for_the_requests_that_others_send_of_late() -> None:
    """A slot is held for 960 s, so that 32 slots meet a request per 30 s: as many as were sent at once."""
    line = Line(reserve=1.0, default_s=960.0, most_recalls=0)
    end_at_once(line, "light", 3)
    line.hold("flood", 2)
    assert num_left_free(line) == 0, "it runs nothing"
    line.take()
    assert num_left_free(line) == _above(3.0, 0.05) == 7
    line.now_s -= 9.0
    assert num_left_free(line) == 7, "a clock that is set back makes no requests"
    line.now_s += 39.0
    assert num_left_free(line) == _above(3 / math.e, 0.05) == 4
    end_at_once(line, "light", 3)
    send(line, "more", expected_tokens=10_000)
    end_at_once(line, "more", 9)
    assert num_left_free(line) == _above(3 / math.e + 3, 0.05) == 9, "more has more than flood"
    line.now_s += 61.0
    send(line, "more")
    assert num_left_free(line) == 0, "nobody with less was active"


@pytest.mark.parametrize(
    ("params", "wanted"),
    [({}, 7), ({"reserve": 0.1}, 4), ({"reserve": 0.0}, 0), ({"most_recalls": 3}, 0), ({"missed": 0.1}, 6)],
)
def test_the_slots_left_free_are_bounded(params: dict[str, float], wanted: int) -> None:
    line = Line(**({"default_s": 960.0, "most_recalls": 0} | params))
    end_at_once(line, "light", 3)
    line.hold("flood", 2)
    line.take()
    assert num_left_free(line) == wanted


@pytest.mark.parametrize(
    ("params", "of_32", "of_8"),
    [
        ({}, 7, 4),
        ({"batch_reserve": 0.1}, 4, 1),
        ({"batch_reserve": 0.0}, 0, 0),
        ({"most_recalls": 3}, 1, 1),
        ({"reserve": 0.0}, 7, 4),
    ],
)
def test_batch_leaves_slots_for_all_that_is_more_urgent(params: dict[str, float], of_32: int, of_8: int) -> None:
    line = Line(**({"default_s": 960.0, "most_recalls": 0} | params))
    end_at_once(line, "light", 3)
    end_at_once(line, "batch", 3, priority=Priority.BATCH)
    (batch,) = line.hold("batch", priority=Priority.BATCH)
    assert (num_left_free(line), num_left_free(line, 8)) == (of_32, of_8)
    line.vtc.remove(batch)
    line.now_s += 60.0
    line.hold("batch", priority=Priority.BATCH)
    assert num_left_free(line) == 0


def test_an_answer_that_has_ended_no_longer_counts_as_of_one_that_has_more() -> None:
    line = Line(most_recalls=0)
    end_at_once(line, "light", expected_tokens=1000)
    ticket = send(line, "flood", weight=1000.0)
    line.hold("flood", weight=1000.0)
    assert counters(line)["flood"] < counters(line)["light"] + 1 and num_left_free(line) == 1
    line.vtc.left(ticket, 10, line.now_s, comes_back=False)
    assert num_left_free(line) == 0


def test_batch_waits_for_its_patience_since_the_last_batch_of_its_tenant() -> None:
    line = Line(patience_s=30.0)
    first, second = line.hold("b", 2, priority=Priority.BATCH)
    line.now_s += 31.0
    end_at_once(line, "chat", 9)
    line.hold("chat", 9)
    assert line.next() == first
    line.take()
    line.now_s += 29.9
    line.hold("chat")
    assert line.take() == "c"
    line.now_s += 0.1
    assert line.next() == second


def test_a_standard_request_that_waited_long_goes_first_whatever_batch_its_tenant_had() -> None:
    line = Line(patience_s=30.0)
    (old,) = line.hold("a")
    line.now_s += 29.9
    end_at_once(line, "a", priority=Priority.BATCH)
    (urgent,) = line.hold("a", priority=Priority.INTERACTIVE)
    assert line.next() == urgent
    line.now_s += 0.1
    assert line.next() == old


def test_batch_waits_while_one_more_urgent_request_waits_though_it_has_had_less() -> None:
    line = Line(unread_tokens=0)
    end_at_once(line, "chat", 3)
    (chat,) = line.hold("chat")
    batch = line.hold("batch", 2, priority=Priority.BATCH)
    line.vtc._tenants["batch"].counter = 0.0
    assert line.next() == chat
    line.vtc.remove(batch[1])
    assert line.next() == chat
    line.vtc.remove(chat)
    assert line.next() == batch[0]


def test_who_was_not_active_for_a_minute_is_forgotten_unless_something_of_it_is_here() -> None:
    line = Line(active_s=60.0)
    running = send(line, "runs", weight=4.0)
    line.hold("waits", weight=8.0)
    end_at_once(line, "again", weight=2.0)
    end_at_once(line, "idle")
    end_at_once(line, "last")
    line.now_s += 59.0
    end_at_once(line, "again", weight=3.0)
    line.vtc.left(send(line, "last"), 10, line.now_s, comes_back=False)
    line.now_s += 1.0
    line.vtc.is_shared(line.now_s)
    assert set(line.vtc._tenants) == {"runs", "waits", "again", "last"}
    assert set(line.vtc._urgent) == {"again", "last"} and line.vtc._urgent_weight == 4.0
    line.now_s += 59.0
    line.vtc.left(running, 10, line.now_s, comes_back=False)
    line.vtc.is_shared(line.now_s)
    assert set(line.vtc._tenants) == {"runs", "waits", "last"} and line.vtc._urgent_weight == 0.0
    line.now_s += 60.0
    line.vtc.is_shared(line.now_s)
    assert set(line.vtc._tenants) == {"waits", "last"}


def test_a_model_is_shared_while_two_tenants_or_classes_were_here_of_late() -> None:
    for other, priority in (("b", Priority.STANDARD), ("a", Priority.BATCH)):
        line = Line(active_s=60.0)
        running = send(line, "a")
        assert not line.vtc.is_shared(line.now_s)
        line.hold("a")
        assert not line.vtc.is_shared(line.now_s)
        line.now_s += 70.0
        end_at_once(line, other, priority=priority)
        line.now_s += 59.9
        assert line.vtc.is_shared(line.now_s), "one runs"
        line.now_s += 0.1
        assert not line.vtc.is_shared(line.now_s)
        (waiting,) = line.hold(other, priority=priority)
        line.now_s += 70.0
        assert line.vtc.is_shared(line.now_s), "the other waits"
        line.vtc.remove(waiting)
        line.vtc.left(running, 10, line.now_s, comes_back=False)
        line.hold(other, priority=priority)
        line.now_s += 70.0
        assert line.vtc.is_shared(line.now_s), "both wait"


def test_a_tenant_whose_prompts_are_unread_is_passed_over_for_another() -> None:
    line = Line(unread_tokens=512)
    (unread,) = line.hold("a", prompt=400)
    line.take()
    (own,) = line.hold("a", prompt=113)
    assert line.next() is None
    (other,) = line.hold("b", prompt=113)
    line.vtc._tenants["b"].counter = 10_000.0
    assert line.next() == other
    line.vtc.read(unread, line.now_s)
    assert line.next() == own


def test_a_request_goes_at_once_where_it_would_wait_for_no_prompt() -> None:
    line = Line(unread_tokens=512)

    def going() -> list[bool]:
        asked = (("a", 112), ("a", 113), ("b", 113), ("b", 512), ("b", 513))
        return [line.vtc.goes_at_once(tenant, prompt, 1, line.now_s) for tenant, prompt in asked]

    assert going() == [True] * 5
    line.hold("a", prompt=400)
    line.take()
    assert going() == [True, False, True, True, False]
    line.now_s += 4.0
    line.vtc.read(1, line.now_s)  # 0.01 s a token
    assert going() == [True] * 5
    line.hold("a", prompt=400)
    line.take()
    line.now_s += 9.0
    assert going() == [True] * 5, "it must be read by now"
    line.hold("a", prompt=513)
    line.take()
    assert going() == [False] * 5


@pytest.mark.parametrize(
    ("priority", "most_recalls", "num"),
    [(Priority.STANDARD, 1, 1), (Priority.STANDARD, 3, 3), (Priority.BATCH, 1, 4), (Priority.BATCH, 0, 0)],
)
def test_a_request_gives_way_so_often_and_batch_four_times_as_often(
    priority: Priority, most_recalls: int, num: int
) -> None:
    line, given = Line(most_recalls=most_recalls, again_s=0.0), 0
    stays, flood = _full(line, "flood", 2, priority=priority)
    line.vtc.stays(stays)
    while True:
        line.vtc.read(flood, line.now_s)
        line.now_s += 20.0
        (light,) = line.hold("light")
        ticket = line.vtc.recall(2, 0, line.now_s)
        line.vtc.remove(light)
        if ticket is None:
            break
        given += 1
        line.vtc.left(flood, 0, line.now_s, comes_back=True)
        line.vtc.sent(line.claims[flood], line.now_s)
    assert given == num


def test_nobody_gives_way_however_long_it_runs_where_nobody_is_to() -> None:
    line = Line(most_recalls=0, again_s=2.0)
    for flood in _full(line, "flood", 2):
        line.vtc.read(flood, line.now_s)
    line.now_s += 99.0
    line.hold("light")
    assert line.vtc.recall(2, 0, line.now_s) is None


def test_the_expected_order_is_by_counters_class_and_tickets() -> None:
    line = Line(default_tokens=200)
    line.hold("a", 3)  # 0, 30, 60
    line.hold("b", 3, weight=2.0, prompt=0, expected=0)  # 0, 200.5, 401
    line.hold("c", 3, priority=Priority.INTERACTIVE, prompt=180, expected=20)  # 0, 55, 110
    line.hold("d", 2, priority=Priority.BATCH)
    assert line.vtc.order(line.now_s) == [1, 4, 7, 2, 8, 3, 9, 5, 6, 10, 11]
    line.now_s += 30.0
    assert line.vtc.order(line.now_s) == [1, 4, 7, 10, 2, 8, 3, 9, 11, 5, 6]


def test_the_queue_is_pressed_by_numbers_over_weight_and_class() -> None:
    line = Line()
    batch = line.hold("batch", 2, priority=Priority.BATCH)  # 8
    heavy = line.hold("heavy", 10, weight=2.0)  # 5
    chat = line.hold("chat", 16, priority=Priority.INTERACTIVE)  # 4
    mixed = [*line.hold("mixed", 3), *line.hold("mixed", 1, priority=Priority.BATCH)]  # 7
    other = line.hold("other", 5)  # 5
    above_chat = [*batch[::-1], *mixed[::-1], *heavy[::-1], *other[::-1]]
    assert list(line.vtc.before(chat[0])) == above_chat
    assert list(line.vtc.before(heavy[0])) == [*batch[::-1], *mixed[::-1]]
    assert list(line.vtc.before(mixed[0])) == [*batch[::-1], mixed[-1]]


def unread(line: Line, tenant: str, prompt: int, counter: float, priority: Priority = Priority.STANDARD) -> int:
    (ticket,) = line.hold(tenant, prompt=prompt, priority=priority)
    line.vtc.sent(line.claims[ticket], line.now_s)
    line.vtc._tenants[tenant].counter = counter
    return ticket


@pytest.mark.parametrize(
    ("tenant", "prompt", "counter", "priority", "gives_way"),
    [
        ("b", 10, 50.0, Priority.STANDARD, True),
        ("b", 512, 49.0, Priority.INTERACTIVE, True),
        ("a", 10, 50.0, Priority.STANDARD, False),
        ("b", 513, 50.0, Priority.STANDARD, False),
        ("b", 10, 51.0, Priority.STANDARD, False),
        ("b", 10, 50.0, Priority.BATCH, False),
    ],
)
def test_a_long_unread_prompt_gives_way_to_a_later_short_one_of_another_that_was_served_no_more(
    tenant: str, prompt: int, counter: float, priority: Priority, *, gives_way: bool
) -> None:
    line = Line(unread_tokens=512)
    unread(line, "b", 10, 0.0)
    long = unread(line, "a", 5000, 50.0)
    assert line.vtc.recall(8, 6, line.now_s) is None, "the short one came before"
    unread(line, tenant, prompt, counter, priority)
    assert line.vtc.recall(8, 5, line.now_s) == (long if gives_way else None)
    line.vtc.stays(long)
    assert line.vtc.recall(8, 5, line.now_s) is None


def runs(line: Line, **num_by_tenant: int) -> dict[str, int]:
    """The newest of each."""
    found = {name: [send(line, name) for _ in range(num)] for name, num in num_by_tenant.items()}
    return {name: tickets[-1] for name, tickets in found.items()}


def test_shares_of_the_slots_are_by_weight() -> None:
    for own, others in ((3, 4), (4, 3)):
        line = Line()
        newest = runs(line, b=others, c=1)
        for _ in range(own):
            send(line, "a", weight=2.0)
        line.hold("a", weight=2.0)
        assert line.vtc.recall(8, 0, line.now_s) == (newest["b"] if own == 3 else None), "its share is four of eight"
    for flood, light in ((6, 2), (7, 1)):
        line = Line()
        for _ in range(flood):
            newest = {"flood": send(line, "flood", weight=2.0)}
        runs(line, light=light)
        line.hold("light")
        assert line.vtc.recall(8, 0, line.now_s) == (newest["flood"] if flood == 7 else None), "its share is 5.3"


def test_a_tenant_at_its_share_takes_no_slot_of_one_above() -> None:
    line = Line()
    runs(line, a=3, b=5, c=1)
    line.hold("a")
    assert line.vtc.recall(9, 0, line.now_s) is None


def test_batch_takes_a_slot_of_batch_once_it_waited_for_its_patience_and_is_below_its_share() -> None:
    for num, has_share in ((7, False), (8, True)):
        line = Line(patience_s=30.0)
        send(line, "b", priority=Priority.BATCH)
        own = [send(line, "c", priority=Priority.BATCH) for _ in range(num)]
        line.hold("c", priority=Priority.BATCH)
        assert line.vtc.recall(8, 0, line.now_s) is None
        line.now_s += 29.9
        assert line.vtc.recall(8, 0, line.now_s) is None
        line.now_s += 0.1
        assert line.vtc.recall(8, 0, line.now_s) == (None if has_share else own[-1])


def test_batch_gives_way_before_a_tenant_above_its_share() -> None:
    line = Line()
    batch = send(line, "a", priority=Priority.BATCH)
    flood = runs(line, flood=7)["flood"]
    line.hold("light")
    assert line.vtc.recall(8, 0, line.now_s) == batch
    line.vtc.stays(batch)
    assert line.vtc.recall(8, 0, line.now_s) == flood


def test_batch_goes_beside_unread_prompts_while_nobody_else_is_there() -> None:
    line = Line()
    line.hold("batch", 2, priority=Priority.BATCH)
    line.take()
    assert line.next(8, 7) is not None
    end_at_once(line, "chat")
    assert line.next(8, 7) is None
    line.now_s += 60.0
    assert line.next(8, 7) is not None
