"""The state of the engines as one router knows it, for policies that look ahead.

Each instance has a look-ahead map (PreServe section 4.3.1) of its requests, and a count of steps. A router does not see
the engine's steps (erratum E33): a busy instance is assumed to do one every TPOT seconds, the mean seconds per token of
its answers, newest weighed most; before the model's first answer the engine's measure (Instance.step_s) or a constant.
A request not yet prefilled is in the map already (erratum E34). Other routers' requests are known only by reports, half
a second late: their peaks are added to ours.

Departure: without first tokens (answers not streamed) a prompt counts as queued until the end, and the answer's whole
time counts for its steps.
"""

from dataclasses import dataclass, field

from msgspec import Struct

from glowplug.domain.snapshot import Outlook, Target
from glowplug.policies.decisions import RouteDecision
from glowplug.policies.prediction.answer_lengths import AnswerLengths
from glowplug.policies.prediction.preserve_anticipator import LookAhead
from glowplug.policies.routing.port import BalancerParams
from glowplug.policies.routing.prefix_index import Prefix

NOTHING = Outlook(peak_ratio=0.0, over_share=0.0)
TPOT_WEIGHT = 0.2
TPOT_BOUNDS_S = (1e-4, 10.0)
READING_WEIGHT = 0.2
MOSTLY = 0.9
PATIENCE = 4.0
LONG = 4.0


@dataclass(slots=True)
class PromptPace:
    """One instance's unread prompts, sent no faster than running answers can bear (`would_stall`).

    Ours, not a paper's. An engine reads all its prompts before continuing answers (vLLM's default scheduler), so in a
    burst an answer's second token waits for all. Holding prompts for part of the TPOT objective lets the engine step
    between two, and delays none. Each router paces by itself.

    Where one prompt takes longer than `LONG` stretches, prompts are sent at once: holding them cost HydraServe's
    workload two points of its TTFT attainment (simulated). None is held while fewer than `MOSTLY` of the answers report
    first tokens, nor for longer than `PATIENCE` times the reading it waits for."""

    num_prompts: int = 0
    num_tokens: int = 0
    since_s: float = 0.0
    token_s: float = 0.0  # seconds per prompt token; 0: unknown
    reporting: float = 0.0  # share of answers with a reported first token

    def sent(self, prompt_tokens: int, now_s: float) -> int:
        if not self.num_prompts:
            self.since_s = now_s
        self.num_prompts += 1
        self.num_tokens += prompt_tokens
        return self.num_tokens

    def read(self, prompt_tokens: int, token_s: float | None = None) -> None:
        """Note that a prompt is read, or lost. `token_s`: measured seconds a token."""
        self.num_prompts -= 1
        self.num_tokens -= prompt_tokens
        if token_s is not None:
            self.token_s += READING_WEIGHT * (token_s - self.token_s) if self.token_s else token_s

    def answered(self, has_reported: bool) -> None:
        self.reporting += READING_WEIGHT * (has_reported - self.reporting) if self.reporting else float(has_reported)

    def would_stall(self, now_s: float, longest_s: float) -> bool:
        """Return whether one more prompt would make the engine read longer than `longest_s` without a decode step."""
        if not self.num_prompts or not self.token_s or self.reporting < MOSTLY:
            return False
        each_s = self.num_tokens / self.num_prompts * self.token_s
        if each_s > LONG * longest_s:
            return False
        left_s = self.num_tokens * self.token_s + each_s
        read_s = now_s - self.since_s
        return longest_s < read_s + left_s and read_s < PATIENCE * max(longest_s, left_s)


@dataclass(slots=True, eq=False)
class Tracked:
    instance_id: str
    look: LookAhead
    max_concurrency: int
    num_in_flight: int  # of all routers
    at_s: float  # time of `steps`
    steps: float = 0.0
    tpot_s: float = 0.0  # 0: unknown before the first answer
    reading: PromptPace = field(default_factory=PromptPace)
    others: Outlook = NOTHING
    is_open: bool = True
    as_the_only_one: RouteDecision = field(init=False)

    def __post_init__(self) -> None:
        self.as_the_only_one = RouteDecision(self.instance_id, "it is the only one")

    @property
    def queued_tokens(self) -> int:
        return self.reading.num_tokens

    @property
    def other_kv_tokens(self) -> int:
        return int(self.others.peak_ratio * self.look.kv_tokens)


class SentRequest(Struct, eq=False):
    """`first_at` is -1 before the first token."""

    at: Tracked
    prompt_tokens: int
    expected_tokens: int
    at_s: float
    unread_tokens: int  # of its prompt, to be read by its instance
    to_read_tokens: int = 0  # ... with those of the prompts before it
    found_tokens: int = 0  # of its prompt, expected in the cache
    first_at: float = -1.0


class Tracker:
    """A Balancer without the choice. `_changed`: instances with news since the policy last looked."""

    tracks_tokens = True
    reads_prefixes = False

    @property
    def num_blocks(self) -> int:
        return 0

    def __init__(self, params: BalancerParams) -> None:
        self.params = params
        self.instances: dict[str, Tracked] = {}
        self.requests: dict[int, SentRequest] = {}
        self.tpot_s = params.tpot_s
        self.answers = AnswerLengths() if params.learn_lengths else None
        self._is_learned = False
        self._changed: dict[str, Tracked] = {}

    def put(self, target: Target, now_s: float) -> None:
        here = self.instances.get(target.instance_id)
        kv_tokens = max(1, target.kv_tokens)
        if here is None:
            look = LookAhead(kv_tokens, self.params.extend_ratio, self.answers)
            here = Tracked(target.instance_id, look, target.max_concurrency, target.num_in_flight, now_s)
            self.instances[target.instance_id] = here
        here.is_open = True
        here.look.kv_tokens = kv_tokens
        if target.step_s and not self._is_learned:
            self.tpot_s = target.step_s
        here.max_concurrency, here.num_in_flight = target.max_concurrency, target.num_in_flight
        self._changed[here.instance_id] = here

    def filled(self, instance_id: str, num_in_flight: int) -> None:
        here = self.instances.get(instance_id)
        if here is not None:
            here.num_in_flight = num_in_flight
            self._changed[here.instance_id] = here

    def others(self, instance_id: str, outlook: Outlook | None) -> None:
        here = self.instances.get(instance_id)
        if here is not None:
            here.others = outlook or NOTHING
            self._changed[here.instance_id] = here

    def gone(self, instance_id: str) -> None:
        here = self.instances.get(instance_id)
        if here is not None:
            here.is_open = False
            self._changed[here.instance_id] = here
            self._forget_if_over(here)

    def sent(
        self,
        ticket: int,
        instance_id: str,
        prompt_tokens: int,
        expected_tokens: int,
        now_s: float,
        prefix: Prefix = (),
    ) -> None:
        if ticket in self.requests:
            self.ended(ticket, 0, now_s)
        here = self.instances.get(instance_id)
        if here is None:
            return
        self._settle(here, now_s)
        here.look.add(ticket, prompt_tokens, expected_tokens)
        sent = self.requests[ticket] = SentRequest(here, prompt_tokens, expected_tokens, now_s, prompt_tokens)
        self._reads(ticket, sent, prefix)
        sent.to_read_tokens = here.reading.sent(sent.unread_tokens, now_s)
        self._changed[here.instance_id] = here

    def expect(self, ticket: int, expected_tokens: int, now_s: float) -> None:
        sent = self.requests.get(ticket)
        if sent is None:
            return
        sent.expected_tokens = expected_tokens
        self._settle(sent.at, now_s)
        sent.at.look.expect(ticket, expected_tokens)
        self._changed[sent.at.instance_id] = sent.at

    def first_token(self, ticket: int, now_s: float) -> None:
        sent = self.requests.get(ticket)
        if sent is None or sent.first_at >= 0:
            return
        sent.first_at, here = now_s, sent.at
        self._settle(here, now_s)
        here.look.begin(ticket)
        here.reading.read(sent.unread_tokens, (now_s - sent.at_s) / max(1, sent.to_read_tokens))
        self._changed[here.instance_id] = here

    def ended(self, ticket: int, response_tokens: int, now_s: float, cached_tokens: int = -1) -> None:
        sent = self.requests.pop(ticket, None)
        if sent is None:
            return
        here = sent.at
        self._settle(here, now_s)
        if self.answers is not None:
            tokens = response_tokens or here.look.age(ticket)
            self.answers.learn(sent.expected_tokens, tokens, has_ended=response_tokens > 0)
        here.look.end(ticket)
        if sent.first_at < 0:
            here.reading.read(sent.unread_tokens)
        if response_tokens:
            here.reading.answered(sent.first_at >= 0)
        if response_tokens > 1:
            began, num_steps = (
                (sent.first_at, response_tokens - 1) if sent.first_at >= 0 else (sent.at_s, response_tokens)
            )
            self._learn(here, (now_s - began) / num_steps)
        self._changed[here.instance_id] = here
        if not here.is_open:
            self._forget_if_over(here)

    def outlook(self, instance_id: str, now_s: float) -> Outlook | None:
        here = self.instances.get(instance_id)
        if here is None:
            return None
        self._settle(here, now_s)
        look, params = here.look, self.params
        if not look.ramps:
            return NOTHING
        return Outlook(
            peak_ratio=look.peak_ratio(params.num_steps),
            over_share=look.num_steps_above(params.overload_ratio, params.num_steps) / params.num_steps,
            queued_tokens=here.queued_tokens,
            current_tokens=look.tokens_left,
        )

    def _settle(self, here: Tracked, now_s: float) -> None:
        if now_s <= here.at_s:
            return
        look = here.look
        if look.ramps:
            here.steps += (now_s - here.at_s) / (here.tpot_s or self.tpot_s)
            step = int(here.steps)
            if step > look.now_step:
                look.advance(step)
        here.at_s = now_s

    def _learn(self, here: Tracked, tpot_s: float) -> None:
        tpot_s = min(max(tpot_s, TPOT_BOUNDS_S[0]), TPOT_BOUNDS_S[1])
        here.tpot_s += (tpot_s - here.tpot_s) * TPOT_WEIGHT if here.tpot_s else tpot_s
        self._is_learned = True
        self.tpot_s += (tpot_s - self.tpot_s) * TPOT_WEIGHT

    def _is_overloaded(self, here: Tracked) -> bool:
        """Return whether more than a tenth of the steps ahead are too full (PreServe section 4.3.2)."""
        look, params = here.look, self.params
        above = look.num_steps_above(params.hold_ratio - here.others.peak_ratio, params.num_steps)
        return above > params.overload_share * params.num_steps

    def _may_take_one(self, here: Tracked) -> bool:
        if not here.is_open or here.num_in_flight >= here.max_concurrency:
            return False
        longest_s = self.params.stall_ratio * self.params.tpot_slo_s
        if longest_s and here.reading.would_stall(here.at_s, longest_s):
            return False
        return not (self.params.hold_overloaded and here.look.ramps and self._is_overloaded(here))

    def _reads(self, ticket: int, sent: SentRequest, prefix: Prefix) -> None:
        """Note the blocks to be read; without prefixes, all."""

    def _forget_if_over(self, here: Tracked) -> None:
        if not here.look.ramps and self.instances.get(here.instance_id) is here:
            del self.instances[here.instance_id]
            del self._changed[here.instance_id]  # a policy with one instance at a time never looks
