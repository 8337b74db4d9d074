"""What one router knows of the engines it sends requests to, for policies that look ahead.

Each instance has a look-ahead map (PreServe section 4.3.1) of the requests sent there, and a count of its steps. A
router does not see an engine's steps, which the map is indexed by (erratum E33): while an instance has requests it is
taken to do one every TPOT seconds, where TPOT is the mean of what its answers took per token, the newest weighed most;
before the model's first answer it is what the engine has measured of itself (Instance.step_s), and a constant where it
says nothing. What has been sent and not been prefilled is in the map already (erratum E34). Of other routers' requests
only what they report is known, half a second late: their peaks are added to ours.

Departure: where engines report no first tokens (an answer that is no stream) a prompt counts as queued until the
end, and the whole time it took is taken for its steps.
"""

from dataclasses import dataclass, field

from glowplug.domain.snapshot import Outlook, Target
from glowplug.policies.prediction.preserve_anticipator import LookAhead
from glowplug.policies.routing.port import BalancerParams

NOTHING = Outlook(peak_ratio=0.0, over_share=0.0)
TPOT_WEIGHT = 0.2  # of the newest answer
TPOT_BOUNDS_S = (1e-4, 10.0)
READING_WEIGHT = 0.2  # of the newest answer
MOSTLY = 0.9
PATIENCE = 4.0
LONG = 4.0


@dataclass(slots=True)
class Reading:
    """What one instance has been sent and has not read, so that prompts are sent no faster than the answers under way
    can bear (`would_stall`).

    Ours, not a paper's. An engine reads every prompt it has before it goes on with its answers (vLLM's default
    scheduler): after a burst, whose first token comes early waits for all the other prompts before its second. When a
    prompt is held here for part of the objective for tokens the engine takes a step between two readings, and nothing
    is read later than it would have been behind the others. Several routers pace an instance each by itself.

    Where one prompt takes longer than `LONG` stretches no pace helps the answers, and prompts go as they come: held one
    by one, they cost HydraServe's workload two points of its TTFT attainment (simulated). Where engines report no first
    tokens (answers that are no streams) it is not known when a prompt has been read: nothing is held while fewer than
    `MOSTLY` of the answers report theirs, and nothing for longer than `PATIENCE` times the reading it waits for.
    """

    num_prompts: int = 0
    num_tokens: int = 0
    since_s: float = 0.0  # when it began to have any
    token_s: float = 0.0  # seconds a token of a prompt takes; 0: not known
    reporting: float = 0.0  # share of its answers that reported their first token

    def sent(self, prompt_tokens: int, now_s: float) -> int:
        """A prompt goes there. Returns the tokens to read up to its end."""
        if not self.num_prompts:
            self.since_s = now_s
        self.num_prompts += 1
        self.num_tokens += prompt_tokens
        return self.num_tokens

    def read(self, prompt_tokens: int) -> None:
        """A prompt has been read, or is there no more."""
        self.num_prompts -= 1
        self.num_tokens -= prompt_tokens

    def measured(self, took_s: float, num_tokens: int) -> None:
        """A first token came so long after its prompt was sent, with so many to read until then."""
        newest = took_s / max(1, num_tokens)
        self.token_s += READING_WEIGHT * (newest - self.token_s) if self.token_s else newest

    def answered(self, has_reported: bool) -> None:
        """An answer is whole."""
        self.reporting += READING_WEIGHT * (has_reported - self.reporting) if self.reporting else float(has_reported)

    def would_stall(self, now_s: float, longest_s: float) -> bool:
        """Whether one more prompt like those makes it read for longer than that without a step for its answers."""
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
    """One instance and what has been sent there."""

    instance_id: str
    look: LookAhead
    max_concurrency: int
    num_in_flight: int  # other routers' included
    at_s: float  # when `steps` was right
    steps: float = 0.0
    tpot_s: float = 0.0  # 0: no answer has shown it yet
    reading: Reading = field(default_factory=Reading)
    others: Outlook = NOTHING  # what other routers see ahead
    is_open: bool = True

    @property
    def queued_tokens(self) -> int:
        """Of prompts not yet read."""
        return self.reading.num_tokens

    @property
    def other_kv_tokens(self) -> int:
        """The most of its cache that other routers' requests are to take."""
        return int(self.others.peak_ratio * self.look.kv_tokens)


@dataclass(slots=True, eq=False)
class Sent:
    """One request at an instance. `first_at` is -1 before its first token."""

    at: Tracked
    prompt_tokens: int
    at_s: float
    to_read_tokens: int  # its own and those before it
    first_at: float = -1.0


class Tracker:
    """A Balancer but for the choice. `_touched` receives every instance that has changed."""

    tracks_tokens = True

    def __init__(self, params: BalancerParams) -> None:
        self.params = params
        self.instances: dict[str, Tracked] = {}
        self.requests: dict[int, Sent] = {}
        self.tpot_s = params.tpot_s  # of the model's instances together, for one that has not answered yet
        self._is_learned = False  # whether that comes of answers

    def put(self, target: Target, now_s: float) -> None:
        here = self.instances.get(target.instance_id)
        kv_tokens = max(1, target.kv_tokens)
        if here is None:
            look = LookAhead(kv_tokens, self.params.extend_ratio)
            here = Tracked(target.instance_id, look, target.max_concurrency, target.num_in_flight, now_s)
            self.instances[target.instance_id] = here
        here.is_open = True
        here.look.kv_tokens = kv_tokens
        if target.step_s and not self._is_learned:
            self.tpot_s = target.step_s
        here.max_concurrency, here.num_in_flight = target.max_concurrency, target.num_in_flight
        self._touched(here)

    def filled(self, instance_id: str, num_in_flight: int) -> None:
        here = self.instances.get(instance_id)
        if here is not None:
            here.num_in_flight = num_in_flight
            self._touched(here)

    def others(self, instance_id: str, outlook: Outlook | None) -> None:
        here = self.instances.get(instance_id)
        if here is not None:
            here.others = outlook or NOTHING
            self._touched(here)

    def gone(self, instance_id: str) -> None:
        here = self.instances.get(instance_id)
        if here is not None:
            here.is_open = False
            self._touched(here)
            self._forget_if_over(here)

    def sent(self, ticket: int, instance_id: str, prompt_tokens: int, expected_tokens: int, now_s: float) -> None:
        if ticket in self.requests:
            self.ended(ticket, 0, now_s)
        here = self.instances.get(instance_id)
        if here is None:
            return
        self._settle(here, now_s)
        here.look.add(ticket, prompt_tokens, expected_tokens)
        self.requests[ticket] = Sent(here, prompt_tokens, now_s, here.reading.sent(prompt_tokens, now_s))
        self._touched(here)

    def first_token(self, ticket: int, now_s: float) -> None:
        sent = self.requests.get(ticket)
        if sent is None or sent.first_at >= 0:
            return
        sent.first_at, here = now_s, sent.at
        self._settle(here, now_s)
        here.look.begin(ticket)
        here.reading.read(sent.prompt_tokens)
        here.reading.measured(now_s - sent.at_s, sent.to_read_tokens)
        self._touched(here)

    def ended(self, ticket: int, response_tokens: int, now_s: float) -> None:
        sent = self.requests.pop(ticket, None)
        if sent is None:
            return
        here = sent.at
        self._settle(here, now_s)
        here.look.end(ticket)
        if sent.first_at < 0:
            here.reading.read(sent.prompt_tokens)
        if response_tokens:
            here.reading.answered(sent.first_at >= 0)
        if response_tokens > 1:
            began, num_steps = (
                (sent.first_at, response_tokens - 1) if sent.first_at >= 0 else (sent.at_s, response_tokens)
            )
            self._learn(here, (now_s - began) / num_steps)
        self._touched(here)
        self._forget_if_over(here)

    def outlook(self, instance_id: str, now_s: float) -> Outlook | None:
        here = self.instances.get(instance_id)
        if here is None:
            return None
        self._settle(here, now_s)
        look, params = here.look, self.params
        if not len(look):
            return NOTHING
        return Outlook(
            peak_ratio=look.peak_ratio(params.num_steps),
            over_share=look.num_steps_above(params.overload_ratio, params.num_steps) / params.num_steps,
            queued_tokens=here.queued_tokens,
            current_tokens=look.tokens_left,
        )

    def _settle(self, here: Tracked, now_s: float) -> None:
        """Let the steps pass that the engine has done since."""
        if now_s <= here.at_s:
            return
        look = here.look
        if len(look):
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
        """PreServe section 4.3.2: too full in more than a tenth of the steps ahead. One without requests never is."""
        look, params = here.look, self.params
        if not len(look):
            return False
        above = look.num_steps_above(params.hold_ratio - here.others.peak_ratio, params.num_steps)
        return above > params.overload_share * params.num_steps

    def _may_take_one(self, here: Tracked) -> bool:
        if not here.is_open or here.num_in_flight >= here.max_concurrency:
            return False
        longest_s = self.params.stall_ratio * self.params.tpot_slo_s
        if longest_s and here.reading.would_stall(here.at_s, longest_s):
            return False
        return not (self.params.hold_overloaded and self._is_overloaded(here))

    def _touched(self, here: Tracked) -> None:
        """Something of it has changed."""

    def _forget_if_over(self, here: Tracked) -> None:
        if not here.is_open and not len(here.look) and self.instances.get(here.instance_id) is here:
            del self.instances[here.instance_id]
