"""Virtual token counters: Sheng, Cao, Li, Zhu, Li, Zhuo, Gonzalez, Stoica, "Fairness in Serving Large Language Models",
OSDI 2024, section 4.1 (Algorithm 2), with weights (section 4.3) and predicted answer lengths (section 4.4).

Each tenant u has a counter c_u of the tokens served to it:

    c_u += (w_p n_p + w_q n_q) / (weight_u x factor of the class)      n_p, n_q: tokens of prompt and answer

The smallest counter with waiting requests is served next; within a tenant the more urgent class, then the oldest. An
arrival at a tenant with none waiting lifts its counter, so that absence earns no credit:

    c_u <- max(c_u, min {c_v - p_v : v waits}),  or where nobody waits max(c_u, c_l - p_l), l the one dispatched last

where p_v is the charge of v's running requests.

Departures.
- Requests are charged at dispatch for the expected answer, corrected at its end (the paper charges each token as it is
  made, so p_v is roughly the part it has not charged yet). An unfinished answer stays charged as expected.
- Of equal counters the tenant with fewer running requests per weight goes first (the paper leaves ties open), so that
  one arriving beside a flood gets the next slot.
- A tenant and its counter are forgotten `active_s` after its last arrival.
- The paper never takes a slot back, so a small tenant waits for an answer of the flood to end: t / S seconds for
  answers of t seconds in S slots. Here a running request gives way (`recall`): it waits again, and its stream resumes
  where it ended. The next request in order must be of a tenant below its share of the slots; the one that gives way, of
  no more urgent class and a tenant that keeps its share without it: furthest above its share, then fewest recalls, then
  newest; each a limited number of times.
- Unread prompts count too. One above `unread_tokens` is sent while fewer are unread than there are instances, and while
  unread gives way to a shorter one of a tenant served less.
- A request with a long prompt already read gives way once, since it is read again, then as said below, and only if no
  other can. So a tenant leaves slots free for such requests while another with a smaller counter was active within
  `active_s`: k, the least number that requests of those tenants, Poisson with their rate, reach within t / S seconds
  with a probability of at most `missed`; at least 1, at most `reserve` of S, none below `least_slots` or while the
  tenant runs nothing. So it does for all requests where most asked to give way could not. Otherwise the discipline is
  work-conserving.

Classes multiply the weight (worth.py). Batch also gives way: it is not dispatched while a more urgent request of any
tenant waits, and a running one gives its slot to that. With more urgent arrivals within `active_s`, none is sent while
prompts are unread at every instance, and of 2 `least_slots` or more batch leaves one free; where it cannot give way, k
by the rate of all more urgent requests, at most `batch_reserve` of S.

Bound. A batch request that has waited `patience_s` without another dispatch of batch in its tenant counts as standard,
goes first in its tenant and does not give way as batch. From then on no other tenant v is served more than weight_v x
factor_v x (c_u - c_v) weighted tokens, plus one request, before it: the counter of a tenant served nothing is among the
smallest, and gets the next slot that it need not leave free. A request that has given way `most_recalls` times, or four
times as often as batch, does so once more per `again_s` of answer made, or, if longer, per five times the cost to all
slots of an engine of reading its prompt and answer anew: at most a sixth of its time.

Counters live in one router and restart with it; each router is fair among its own requests. A tenant that uses more
routers than another may get more, by at most the ratio of their numbers; behind a balancer that spreads each tenant
alike the shares hold. A choice costs a look at each waiting tenant, an arrival at most one sort of the queue.
"""

import math
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from glowplug.domain.access import Priority
from glowplug.policies.fairness.port import Claim, Discipline, FairnessParams

_NEWEST_TIMES = 0.2  # of the newest prompt
# Unread prompts at the engines. An engine reads prompts in order and answers little meanwhile, so a free slot is of no
# use behind three long prompts. A prompt is read at its answer's first token. Unstreamed answers count after twice the
# measured reading time, or at the end before any measurement: engines differ a hundredfold.

_LEAST_TOKENS = 64  # for a measurement
_SLACK_S = 0.2


@dataclass(slots=True)
class _Prompt:
    tenant: str
    tokens: int
    sent_at: float
    until: float


class UnreadPrompts:
    """One model's unread prompts by ticket, in dispatch order. Times are seconds."""

    def __init__(self, unread_tokens: int) -> None:
        self.most = unread_tokens or math.inf
        self.prompts: OrderedDict[int, _Prompt] = OrderedDict()
        self._tokens = 0
        self.num_long = 0  # unread prompts above one tenant's bound
        self._due_at = math.inf  # earliest `until`
        self._token_s = 0.0
        self._read_at = 0.0

    @property
    def token_s(self) -> float:
        return self._token_s

    def sent(self, ticket: int, tenant: str, tokens: int, now_s: float) -> None:
        if not tokens:
            return
        unread = self._tokens = (self.tokens(now_s) if now_s >= self._due_at else self._tokens) + tokens
        if tokens > self.most:
            self.num_long += 1
        until = now_s + 2 * unread * self._token_s + _SLACK_S if self._token_s else math.inf
        if until < self._due_at:
            self._due_at = until
        self.prompts[ticket] = _Prompt(tenant, tokens, now_s, until)

    def read(self, ticket: int, now_s: float) -> None:
        prompt = self._drop(ticket)
        if prompt is not None and prompt.tokens >= _LEAST_TOKENS and now_s < prompt.until:
            token_s = (now_s - max(prompt.sent_at, self._read_at)) / prompt.tokens
            self._token_s += (_NEWEST_TIMES if self._token_s else 1.0) * (token_s - self._token_s)
        self._read_at = now_s

    def left(self, ticket: int, now_s: float, *, is_over: bool) -> None:
        """Forget a prompt. `is_over`: with a whole answer."""
        prompt = self._drop(ticket)
        if is_over and prompt is not None and prompt.tokens >= _LEAST_TOKENS and not self._token_s:
            self._token_s = (now_s - prompt.sent_at) / prompt.tokens

    def _drop(self, ticket: int) -> _Prompt | None:
        prompt = self.prompts.pop(ticket, None)
        if prompt is not None:
            self._tokens -= prompt.tokens
            if prompt.tokens > self.most:
                self.num_long -= 1
        return prompt

    def tokens(self, now_s: float) -> int:
        if now_s >= self._due_at:
            for ticket in [ticket for ticket, prompt in self.prompts.items() if prompt.until <= now_s]:
                self._drop(ticket)
            self._due_at = min((prompt.until for prompt in self.prompts.values()), default=math.inf)
        return self._tokens

    def is_long(self, tokens: int) -> bool:
        return tokens > self.most

    def is_full(self, tenant: str, tokens: int, num_instances: int, now_s: float) -> bool:
        most = self.most * num_instances
        if self._tokens + tokens <= most or not self.tokens(now_s):
            return False
        own = [prompt.tokens for prompt in self.prompts.values() if prompt.tenant == tenant]
        return len(own) >= num_instances and sum(own) + tokens > most

    def is_young(self, ticket: int, now_s: float) -> bool:
        """Return whether less than half was read, assuming sequential reading, or that is unknown."""
        began, ahead = math.inf, 0
        for other, prompt in self.prompts.items():
            began = min(began, prompt.sent_at)
            if other == ticket:
                break
            ahead += prompt.tokens
        half_s = (ahead + self.prompts[ticket].tokens / 2) * self._token_s
        return not half_s or now_s - max(began, self._read_at) < half_s

    def tickets(self, now_s: float) -> list[int]:
        self.tokens(now_s)
        return list(self.prompts)


_STANDARD, _BATCH = Priority.STANDARD.rank, Priority.BATCH.rank
_FADES_S = 30.0
_MOST = 1000
_NEWEST = 0.05
_NEWEST_ASKED = 0.2  # of the newest request asked to give way
_MOSTLY = 0.5
_AS_BATCH = 4  # times as many recalls
_AS_READING = 5  # answer time between recalls over all slots' cost of reading again


class _Recalls(NamedTuple):
    num: int = 0
    made_s: float = 0.0


_NONE = _Recalls()


@dataclass(slots=True)
class _Rate:
    per_s: float = 0.0
    counted_at: float = 0.0

    def at(self, now_s: float) -> float:
        return self.per_s * math.exp(min(0.0, self.counted_at - now_s) / _FADES_S)


@dataclass(slots=True, eq=False)
class _Running:
    """`rank`: its class, 1 for batch that waited long enough."""

    tenant: "_Tenant"
    claim: Claim
    expected: float
    charge: float
    sent_at: float
    rank: int
    begun_at: float = math.inf

    def made_s(self, now_s: float) -> float:
        return max(0.0, now_s - self.begun_at)


@dataclass(slots=True, eq=False)
class _Tenant:
    name: str
    weight: float = 1.0
    counter: float = 0.0  # c_u
    pending: float = 0.0  # p_u
    num_running: int = 0
    rate: _Rate = field(default_factory=_Rate)
    num_waiting: int = 0
    batch_sent_at: float = -math.inf
    seen_at: list[float] = field(default_factory=lambda: [-math.inf] * len(Priority))  # last arrival, by class
    lines: tuple[OrderedDict[int, Claim], ...] = field(default_factory=lambda: tuple(OrderedDict() for _ in Priority))

    def add(self, claim: Claim) -> None:
        line = self.lines[claim.priority.rank]
        newest = next(reversed(line), 0)
        line[claim.ticket] = claim
        if claim.ticket < newest:
            for ticket in sorted(line):
                line.move_to_end(ticket)
        self.num_waiting += 1

    def head(self, long_ago: float) -> tuple[Claim, int]:
        """Return the next request and its class's rank; batch that arrived by `long_ago` counts as standard, if none
        was dispatched since."""
        heads = [next(iter(line.values())) for line in self.lines if line]
        aged = [claim for claim in heads if self.is_aged(claim, long_ago)]
        if aged:
            oldest = min(aged, key=lambda claim: claim.ticket)
            return oldest, min(oldest.priority.rank, _STANDARD)
        return heads[0], heads[0].priority.rank

    def is_aged(self, claim: Claim, long_ago: float) -> bool:
        """Return whether a request waits since `long_ago`, for batch without a dispatch of its class."""
        return claim.arrived_at <= long_ago and (claim.priority.rank < _BATCH or self.batch_sent_at <= long_ago)


class Vtc:
    def __init__(self, params: FairnessParams) -> None:
        self._params = params
        self._factors = (params.interactive, params.standard, params.batch)
        self._tenants: dict[str, _Tenant] = {}
        self._waiting: dict[int, tuple[_Tenant, Claim]] = {}
        self._first: dict[int, Claim] = {}
        self._backlog: dict[str, _Tenant] = {}
        self._num_urgent = 0
        self._running: dict[int, _Running] = {}
        self._reading = UnreadPrompts(params.unread_tokens)
        self.may_recall = False
        self._recalls: dict[int, _Recalls] = {}
        self._staying: set[int] = set()  # cannot give way
        self._leaving: tuple[int, int] | None = None  # (giving way, waiting for it)
        self._promised = 0  # waiting, promised another's slot
        self._stay_ratio = 0.0
        self._busy: dict[str, _Tenant] = {}
        self._last: _Tenant | None = None
        self._seen: OrderedDict[str, float] = OrderedDict()  # by last arrival
        self._urgent: OrderedDict[str, tuple[float, float]] = OrderedDict()
        self._urgent_weight = 0.0
        self._answer_tokens = float(params.default_tokens)
        self._answer_s = params.default_s
        self._rate = _Rate()

    # the requests

    def hold(self, claim: Claim, now_s: float) -> None:
        tenant = self._tenant(claim, now_s)
        self._waiting[claim.ticket] = (tenant, claim)
        if claim.goes_on:
            self._first[claim.ticket] = claim
            return
        if not tenant.num_waiting:
            self._lift(tenant)
            self._backlog[tenant.name] = tenant
        tenant.add(claim)
        self._num_urgent += claim.priority.rank < _BATCH

    def remove(self, ticket: int) -> None:
        self._recalls.pop(ticket, None)
        self._take_out(ticket)

    def _take_out(self, ticket: int) -> None:
        known = self._waiting.pop(ticket, None)
        if known is None or self._first.pop(ticket, None) is not None:
            return
        tenant, claim = known
        del tenant.lines[claim.priority.rank][ticket]
        self._num_urgent -= claim.priority.rank < _BATCH
        tenant.num_waiting -= 1
        if not tenant.num_waiting:
            del self._backlog[tenant.name]

    def sent(self, claim: Claim, now_s: float) -> None:
        rank = rank_asked = claim.priority.rank
        if claim.ticket in self._waiting:
            tenant = self._waiting[claim.ticket][0]
            if rank == _BATCH and tenant.is_aged(claim, now_s - self._params.patience_s):
                rank = _STANDARD
            self._take_out(claim.ticket)
        else:
            tenant = self._tenant(claim, now_s)
            if not tenant.num_waiting:
                self._lift(tenant)
        if rank_asked == _BATCH:
            tenant.batch_sent_at = now_s
        expected = claim.expected_tokens or self._answer_tokens
        tokens = self._params.input_weight * (claim.prompt_tokens or 1) + self._params.output_weight * expected
        charge = tokens / (claim.weight * self._factors[rank_asked])
        tenant.counter += charge
        tenant.pending += charge
        tenant.num_running += 1
        self._busy[tenant.name] = tenant
        self._running[claim.ticket] = _Running(tenant, claim, expected, charge, now_s, rank)
        self._reading.sent(claim.ticket, tenant.name, claim.prompt_tokens, now_s)
        self.may_recall = self._reading.num_long > 0
        self._last = tenant

    def read(self, ticket: int, now_s: float) -> None:
        if ticket in self._running:
            self._running[ticket].begun_at = now_s
        self._reading.read(ticket, now_s)
        self.may_recall = self._reading.num_long > 0

    def stays(self, ticket: int) -> None:
        if ticket in self._running:
            self._staying.add(ticket)
            self._asked(stayed=True)
        if self._leaving is not None and self._leaving[0] == ticket:
            self._leaving = None

    def _asked(self, *, stayed: bool) -> None:
        self._stay_ratio += _NEWEST_ASKED * (stayed - self._stay_ratio)

    def left(self, ticket: int, response_tokens: int, now_s: float, *, comes_back: bool) -> None:
        one = self._running.pop(ticket, None)
        if one is None:
            return
        tenant = one.tenant
        if ticket in self._reading.prompts:
            self._reading.left(ticket, now_s, is_over=bool(response_tokens))
            self.may_recall = self._reading.num_long > 0
        self._staying.discard(ticket)
        if self._leaving is not None and self._leaving[0] == ticket:
            if comes_back:
                before = self._recalls.get(ticket, _NONE)
                self._recalls[ticket] = _Recalls(before.num + 1, before.made_s + one.made_s(now_s))
                self._promised = self._leaving[1]
                self._asked(stayed=False)
            self._leaving = None
        if not comes_back:
            self._recalls.pop(ticket, None)
        tenant.num_running -= 1
        if not tenant.num_running:
            del self._busy[tenant.name]
        tenant.pending = tenant.pending - one.charge if tenant.num_running else 0.0
        if comes_back:
            tenant.counter -= one.charge
        elif response_tokens:
            more = self._params.output_weight * (response_tokens - one.expected)
            tenant.counter += more / (one.claim.weight * self._factors[one.claim.priority.rank])
            self._answer_tokens += _NEWEST * (response_tokens - self._answer_tokens)
            self._answer_s += _NEWEST * (now_s - one.sent_at - self._answer_s)

    def _cost(self, claim: Claim, response_tokens: float) -> float:
        params = self._params
        tokens = params.input_weight * (claim.prompt_tokens or 1) + params.output_weight * response_tokens
        return tokens / (claim.weight * self._factors[claim.priority.rank])

    def _lift(self, tenant: _Tenant) -> None:
        if self._backlog:
            least = min([other.counter - other.pending for other in self._backlog.values()])
        else:
            least = self._last.counter - self._last.pending if self._last is not None else 0.0
        if least > tenant.counter:
            tenant.counter = least

    # who is active

    def _tenant(self, claim: Claim, now_s: float) -> _Tenant:
        name, rank = claim.tenant, claim.priority.rank
        tenant = self._tenants.get(name) or self._tenants.setdefault(name, _Tenant(name))
        tenant.weight = claim.weight
        tenant.seen_at[rank] = now_s
        self._seen[name] = now_s
        self._seen.move_to_end(name)
        if rank < _BATCH:
            self._urgent_weight += claim.weight - self._urgent.get(name, (0.0, 0.0))[1]
            self._urgent[name] = (now_s, claim.weight)
            self._urgent.move_to_end(name)
            for rate in (self._rate, tenant.rate):
                faded = math.exp(min(0.0, rate.counted_at - now_s) / _FADES_S)
                rate.per_s, rate.counted_at = rate.per_s * faded + 1 / _FADES_S, now_s
        return tenant

    def _forget(self, now_s: float) -> None:
        upto = now_s - self._params.active_s
        while self._urgent and (entry := next(iter(self._urgent.items())))[1][0] <= upto:
            del self._urgent[entry[0]]
            self._urgent_weight = self._urgent_weight - entry[1][1] if self._urgent else 0.0
        while self._seen and (oldest := next(iter(self._seen.items())))[1] <= upto:
            tenant = self._tenants[oldest[0]]
            if tenant.num_running or tenant.num_waiting or tenant is self._last:
                self._seen[oldest[0]] = now_s
                self._seen.move_to_end(oldest[0])
            else:
                del self._seen[oldest[0]], self._tenants[oldest[0]]

    def is_shared(self, now_s: float) -> bool:
        self._forget(now_s)
        upto = now_s - self._params.active_s
        here = {(tenant.name, claim.priority.rank) for tenant, claim in self._waiting.values()}
        here |= {(one.tenant.name, one.claim.priority.rank) for one in self._running.values()}
        for name in self._seen:
            here |= {(name, rank) for rank, at_s in enumerate(self._tenants[name].seen_at) if at_s > upto}
            if len(here) > 1:
                return True
        return len(here) > 1

    # the decisions

    def next(self, num_slots: int, num_free: int, now_s: float, num_instances: int = 1) -> int | None:
        if self._first:
            return min(self._first)
        if self._promised in self._waiting:
            return self._promised if num_free > 0 else None
        self._forget(now_s)
        best = self._best(num_slots, num_free, now_s, num_instances)
        return best.ticket if best is not None else None

    def _best(self, num_slots: int, num_free: int, now_s: float, num_instances: int) -> Claim | None:
        """Return the eligible request with the least counter. While that is a long prompt waiting for others, larger
        counters wait behind it."""
        most = num_slots // 2 if num_slots >= self._params.least_slots else -1
        is_reading = len(self._reading.prompts) >= num_instances and bool(self._reading.tokens(now_s))
        batch_waits = self._num_urgent > 0 or (is_reading and bool(self._urgent) and self._params.unread_tokens > 0)
        best: tuple[float, float, int] | None = None
        found: Claim | None = None
        for tenant in self._backlog.values():
            claim, rank = tenant.head(now_s - self._params.patience_s)
            if rank == _BATCH and batch_waits:
                continue
            is_long = self._reading.is_long(claim.prompt_tokens)
            if num_free <= most and num_free <= self._num_left_free(tenant, rank, num_slots, is_long, now_s):
                continue
            order = (tenant.counter, tenant.num_running / tenant.weight, claim.ticket)
            if best is not None and order > best:
                continue
            if not self._reading.is_full(tenant.name, claim.prompt_tokens, num_instances, now_s):
                best, found = order, claim
        if found is not None and is_reading and self._reading.is_long(found.prompt_tokens):
            return None
        return found

    def goes_at_once(self, tenant: str, prompt_tokens: int, num_instances: int, now_s: float) -> bool:
        reading = self._reading
        if reading.num_long or (prompt_tokens > reading.most and reading.tokens(now_s)):
            return False
        if not reading.prompts:
            return True
        return not reading.is_full(tenant, prompt_tokens, num_instances, now_s)

    # who gives way

    def recall(self, num_slots: int, num_free: int, now_s: float, num_instances: int = 1) -> int | None:
        if self._leaving is not None or self._promised in self._waiting or not self._params.most_recalls:
            return None
        found = self._before_long(num_slots, num_instances, now_s)
        if found is None and num_free <= 0 and not self._first:
            found = self._for_slot(num_slots, num_instances, now_s)
        self._leaving = found
        return found[0] if found is not None else None

    def _may_leave(self, ticket: int, slots: float, now_s: float) -> bool:
        """`slots`: of an instance."""
        one, recalls, params = self._running[ticket], self._recalls.get(ticket, _NONE), self._params
        if ticket in self._staying:
            return False
        most = params.most_recalls * (_AS_BATCH if one.rank == _BATCH else 1)
        if self._is_read_again(ticket):
            most = 1
        if recalls.num < most or not params.again_s:
            return recalls.num < most
        read_s = ((one.claim.prompt_tokens or 1) + one.expected) * self._reading.token_s
        each_s = max(params.again_s, _AS_READING * slots * read_s)
        return recalls.num < most + (recalls.made_s + one.made_s(now_s)) // each_s

    def _is_read_again(self, ticket: int) -> bool:
        return ticket not in self._reading.prompts and self._reading.is_long(self._running[ticket].claim.prompt_tokens)

    def _before_long(self, num_slots: int, num_instances: int, now_s: float) -> tuple[int, int] | None:
        self._reading.tokens(now_s)
        if self._reading.num_long < num_instances:
            return None
        unread = self._reading.tickets(now_s)
        for number, ticket in enumerate(unread):
            long = self._running[ticket]
            if not self._reading.is_long(long.claim.prompt_tokens) or not self._may_leave(
                ticket, num_slots / num_instances, now_s
            ):
                continue
            if not self._reading.is_young(ticket, now_s):
                continue
            for later in unread[number + 1 :]:
                short = self._running[later]
                if (
                    short.tenant is not long.tenant
                    and not self._reading.is_long(short.claim.prompt_tokens)
                    and short.rank <= long.rank
                    and short.tenant.counter <= long.tenant.counter
                ):
                    return ticket, later
        return None

    def _for_slot(self, num_slots: int, num_instances: int, now_s: float) -> tuple[int, int] | None:
        best = self._best(num_slots, num_slots, now_s, num_instances)
        if best is None:
            return None
        tenant = self._waiting[best.ticket][0]
        slots = self._slots_per_weight(tenant, num_slots)
        is_below = tenant.num_running < slots * tenant.weight
        if not (is_below or self._num_urgent):
            return None
        rank = tenant.head(now_s - self._params.patience_s)[1]
        found: tuple[bool, bool, float, int, float, int] | None = None
        for ticket, one in self._running.items():
            other = one.tenant
            gives_way = one.rank == _BATCH > rank
            above = other.num_running - slots * other.weight
            is_above = is_below and other is not tenant and one.rank >= rank and above >= 1
            if (gives_way or is_above) and self._may_leave(ticket, num_slots / num_instances, now_s):
                is_read = self._is_read_again(ticket)
                order = (not gives_way, is_read, -above, self._recalls.get(ticket, _NONE).num, -one.sent_at, -ticket)
                found = order if found is None else min(found, order)
        return (-found[5], best.ticket) if found is not None else None

    def _slots_per_weight(self, tenant: _Tenant, num_slots: int) -> float:
        own = self._urgent[tenant.name][1] if tenant.name in self._urgent else 0.0
        return num_slots / (self._urgent_weight - own + tenant.weight)

    def _num_left_free(self, tenant: _Tenant, rank: int, num_slots: int, is_long: bool, now_s: float) -> int:
        """Return the slots left free for other recently active tenants, as above; -1: none."""
        keeps, per_s = self._stay_ratio > _MOSTLY or not self._params.most_recalls, self._rate.at(now_s)
        if rank == _BATCH:
            most = self._params.batch_reserve
            if not (most and self._urgent):
                return -1
            if not keeps:
                return 1 if num_slots >= 2 * self._params.least_slots else -1
        else:
            most = self._params.reserve
            if not (most and tenant.num_running and (keeps or is_long)):
                return -1
            above = [one for one in self._busy.values() if one.counter >= tenant.counter]
            if len(self._urgent) <= sum(one.name in self._urgent for one in above):
                return -1
            per_s -= sum(one.rate.at(now_s) for one in above)
        return min(math.ceil(num_slots * most), _above(per_s * self._answer_s / num_slots, self._params.missed))

    def before(self, ticket: int) -> Iterator[int]:
        """Tenants with more of the queue by weight, then the tenant's own less urgent requests; less urgent and newest
        first."""
        own, claim = self._waiting[ticket]
        most = {name: self._pressure(tenant) for name, tenant in self._backlog.items()}
        above = sorted((-most[name], name) for name in most if most[name] > most[own.name])
        for _, name in above:
            for line in reversed(self._backlog[name].lines):
                yield from reversed(line)
        for line in reversed(own.lines[claim.priority.rank + 1 :]):
            yield from reversed(line)

    def _pressure(self, tenant: _Tenant) -> float:
        waiting = zip(tenant.lines, self._factors, strict=True)
        return sum(len(line) / factor for line, factor in waiting) / tenant.weight

    def order(self, now_s: float) -> list[int]:
        long_ago = now_s - self._params.patience_s
        tags: list[tuple[bool, float, int]] = []
        for tenant in self._backlog.values():
            counter = tenant.counter
            for line in tenant.lines:
                for claim in line.values():
                    gives_way = claim.priority.rank == _BATCH and not tenant.is_aged(claim, long_ago)
                    tags.append((gives_way, counter, claim.ticket))
                    counter += self._cost(claim, claim.expected_tokens or self._answer_tokens)
        return [*sorted(self._first), *(ticket for _, _, ticket in sorted(tags))]


def _above(mean: float, missed: float) -> int:
    """Return the least number, 1 or more, that a Poisson variable reaches with a probability of at most `missed`."""
    number, chance, below = 0, math.exp(-max(0.0, mean)), 0.0
    while below + chance < 1 - missed and number < _MOST:
        below += chance
        number += 1
        chance *= mean / number
    return number + 1


def vtc(params: FairnessParams = FairnessParams()) -> Discipline:
    return Vtc(params)
