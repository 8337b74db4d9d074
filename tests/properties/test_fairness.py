"""A model shared by tenants: nobody starves, nothing idles, weights hold."""

from collections import Counter
from copy import deepcopy
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from glowplug.domain.access import Priority
from glowplug.policies.fairness.port import Claim, FairnessParams
from glowplug.policies.fairness.vtc import Vtc


class Engine:
    """One step a second: prefill takes one per 1,000 tokens, one prompt at a time; decoding, one per token. A request
    that gives way returns in the same step."""

    def __init__(self, num_slots: int, *, can_leave: bool = True, **params: float) -> None:
        self.vtc = Vtc(FairnessParams(**params))  # type: ignore[arg-type]
        self.num_slots, self.can_leave = num_slots, can_leave
        self.claims: dict[int, Claim] = {}
        self.left: dict[int, list[int]] = {}  # remaining steps of prompt and answer
        self.waiting: dict[int, int] = {}  # ticket -> steps waited
        self.waited: dict[int, int] = {}
        self.tokens: Counter[str] = Counter()
        self.now_s = 0.0

    def arrive(
        self, tenant: str, priority: Priority = Priority.STANDARD, weight: float = 1.0, prompt: int = 100
    ) -> int:
        ticket = len(self.claims) + 1
        claim = self.claims[ticket] = Claim(ticket, tenant, weight, priority, self.now_s, prompt, 8)
        if not self.waiting and self.num_free > self.num_slots // 2:
            self._check_at_once(claim)
        self._wait(ticket)
        return ticket

    def _check_at_once(self, claim: Claim) -> None:
        """The shortcut is for requests that the full procedure would dispatch with nobody giving way."""
        vtc = deepcopy(self.vtc)
        if vtc.goes_at_once(claim.tenant, claim.prompt_tokens, 1, self.now_s):
            vtc.hold(claim, self.now_s)
            assert vtc.next(self.num_slots, self.num_free, self.now_s) == claim.ticket
            vtc.sent(claim, self.now_s)
            assert vtc.recall(self.num_slots, self.num_free - 1, self.now_s) is None

    def _wait(self, ticket: int) -> None:
        self.vtc.hold(self.claims[ticket], self.now_s)
        self.waiting.setdefault(ticket, self.waited.get(ticket, 0))

    @property
    def num_free(self) -> int:
        return self.num_slots - len(self.left)

    def pump(self) -> None:
        while True:
            ticket = self.vtc.next(self.num_slots, self.num_free, self.now_s)
            if ticket is not None and self.num_free > 0:
                self.vtc.sent(self.claims[ticket], self.now_s)
                self.waited[ticket] = self.waiting.pop(ticket)
                self.left[ticket] = [-(-self.claims[ticket].prompt_tokens // 1000), 8]
                continue
            ticket = self.vtc.recall(self.num_slots, self.num_free, self.now_s)
            if ticket is None:
                return
            assert ticket in self.left
            if self.can_leave:
                del self.left[ticket]
                self.vtc.left(ticket, 0, self.now_s, comes_back=True)
                self._wait(ticket)
            else:
                self.vtc.stays(ticket)

    def step(self) -> None:
        self.pump()
        assert self.num_free >= 0
        self.now_s += 1.0
        for ticket in self.waiting:
            self.waiting[ticket] += 1
        unread = [ticket for ticket, (prompt, _) in self.left.items() if prompt]
        for ticket in unread[:1]:
            self.left[ticket][0] -= 1
            if not self.left[ticket][0]:
                self.vtc.read(ticket, self.now_s)
        for ticket in [ticket for ticket, (prompt, _) in self.left.items() if not prompt and ticket not in unread]:
            self.left[ticket][1] -= 1
            if not self.left[ticket][1]:
                del self.left[ticket]
                self.vtc.left(ticket, 8, self.now_s, comes_back=False)
                self.tokens[self.claims[ticket].tenant] += self.claims[ticket].prompt_tokens + 16


arrivals = st.lists(
    st.tuples(
        st.integers(0, 5),
        st.sampled_from("abc"),
        st.sampled_from(Priority),
        st.sampled_from((50, 400, 5000)),
    ),
    max_size=40,
)


@given(arrivals, st.integers(1, 8), st.booleans())
def test_whoever_asks_every_request_ends_and_no_slot_stays_idle(
    asked: list[Any], num_slots: int, can_leave: bool
) -> None:
    engine = Engine(num_slots, can_leave=can_leave)
    for steps, tenant, priority, prompt in asked:
        for _ in range(steps):
            engine.step()
        engine.arrive(tenant, priority, prompt=prompt)
    for _ in range(200 + 60 * len(asked)):
        if not (engine.waiting or engine.left):
            break
        engine.pump()
        assert engine.left, "something runs wherever something waits"
        engine.step()
    assert not engine.waiting and not engine.left


@given(st.sampled_from(Priority), st.integers(2, 8), st.integers(1, 3), *2 * [st.sampled_from((50, 5000))])
def test_nobody_starves_beside_floods_of_others(
    priority: Priority, num_slots: int, num_floods: int, prompt: int, own: int
) -> None:
    """An endless flood of any class and length."""
    for flood in Priority:
        engine = Engine(num_slots)
        engine.arrive("light", priority, prompt=own)
        for step in range(400):
            for number in range(num_floods):
                if sum(engine.claims[t].tenant == f"f{number}" for t in engine.waiting) < 3:
                    engine.arrive(f"f{number}", flood, prompt=prompt)
            engine.step()
            if 1 not in engine.waiting and 1 not in engine.left and step:
                break
        assert 1 not in engine.waiting and 1 not in engine.left, "it has ended"


@given(st.integers(2, 16), st.sampled_from(Priority))
def test_a_tenant_alone_has_every_slot(num_slots: int, priority: Priority) -> None:
    """A minute after the last request of another one."""
    engine = Engine(num_slots)
    engine.arrive("light")
    for _ in range(20):
        engine.step()
    engine.now_s += 60.0
    for _ in range(4 * num_slots):
        engine.arrive("heavy", priority, prompt=10)
    engine.pump()
    assert not engine.num_free


@settings(max_examples=10)
@given(st.floats(0.5, 4.0), st.integers(2, 16), st.booleans())
def test_two_tenants_with_work_enough_have_tokens_by_their_weights(weight: float, slots: int, can_leave: bool) -> None:
    engine = Engine(slots, can_leave=can_leave, unread_tokens=0, reserve=0.0)
    for _ in range(3000):
        for tenant, own in (("a", weight), ("b", 1.0)):
            if sum(engine.claims[ticket].tenant == tenant for ticket in engine.waiting) < slots:
                engine.arrive(tenant, weight=own)
        engine.step()
    assert abs(engine.tokens["a"] / engine.tokens["b"] / weight - 1) <= 0.05


def test_ten_thousand_tenants_leave_nothing() -> None:
    vtc = Vtc(FairnessParams())
    for ticket in range(1, 10_001):
        now_s = ticket * 0.05
        claim = Claim(ticket, f"t{ticket}", 1.0, Priority.STANDARD, now_s, 5000 if ticket % 3 else 50, 10)
        vtc.hold(claim, now_s)
        chosen = vtc.next(8, 8, now_s)
        if chosen == ticket:
            vtc.sent(claim, now_s)
            vtc.left(ticket, 10, now_s, comes_back=False)
        else:
            vtc.remove(ticket)
    assert len(vtc._tenants) <= 60 / 0.05 + 2
    assert not vtc._running and not vtc._recalls and not vtc._staying and not vtc._reading.tickets(now_s)
