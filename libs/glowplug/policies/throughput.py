"""What one instance takes: the tokens a second that it bears within its objectives, PreServe's mu.

Paper: PreServe section 4.1 (Algorithm 1, lines 6-8): mu_p, mu_d and mu_t are the most prompt, response and all tokens
per second and instance of the windows in which no objective was missed.

Departure: the most of many short windows grows with their number, for chance alone fills one of them, and a scaler that
plans by it lets more and more wait. So each window of each instance shows which share of its limits was in use, and mu
is tokens over the seconds used, of all windows together, the newest weighed most:

    tau = a / (1 - rho)         a step takes a alone; rho, the share of it that load adds, grows with the tokens taken
    u_s = rho / (1 - a / tau*)  used of what the objective tau* for a step allows
    u_f = rho + (1 - rho) f / F used of the cache or the slots, of which f is full: requests stay longer as steps do
    mu  = tokens / (u seconds), u = max(u_s, u_f)

a is what the engine reports of its own step (Instance.step_s), or the shortest mean step of any window of some steps
where that is less; M and slots are what it reports, too (Instance.kv_tokens, max_concurrency). tau* is the model's
objective; without one it is `slowdown` times a, as in section 5.1, where 0.2 s are about three times what a request
takes alone. F is T_mem of section 4.3. With n requests at once rho counts up to n / (1 + n), as in a queue whose server
is shared: what slows an engine that has less to do is its neighbours' load.

A window counts (it is clean) if its instance was READY for all of it and has not drained since, and used at least
`busy_ratio`: an instance that starts, drains or has too little to do does not show what it takes. Where the model has
objectives and more than one request in twenty misses one, of those that waited for no start, it was used in full at
least. Until windows of `enough_s` used seconds have been seen, what was declared stands, and `source` says so.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from glowplug.domain.bounds import check_bounds
from glowplug.domain.instance import Instance, InstanceState
from glowplug.domain.model import Slo
from glowplug.policies.prediction.preserve_anticipator import MEMORY_RATIO

DECLARED, MEASURED = "declared", "measured"  # `Throughput.source`; "" while nothing is known
LATE_WINDOWS = 2  # a window is read so many later: an answer that runs still is counted at its end
LEAST_STEP_S = 1e-3  # an answer whose tokens come faster is no stream: they came at once
LEAST_STEPS = 16  # of a window that shows what a step takes alone
LEAST_RHO = 0.1  # of what an objective allows: one below the step alone leaves nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """Tokens per second that one instance takes; 0 while that is not known."""

    prompt_per_s: float = 0.0  # mu_p
    response_per_s: float = 0.0  # mu_d
    total_per_s: float = 0.0  # mu_t


@dataclass(frozen=True, slots=True, kw_only=True)
class CapacityParams:
    """Which windows show what an instance takes, and what stands before them."""

    busy_ratio: float = 0.5  # of its limits in use, for a window to count
    clean_share: float = 0.95  # of its requests that meet the model's objectives, else it was used in full
    normalized_s: float = 0.2  # seconds per response token that a request may take where a model has no objectives
    slowdown: float = 3.0  # of a step, where the model has no objective for it
    full_ratio: float = MEMORY_RATIO  # F: of the cache or the slots
    window_s: float = 60.0
    memory_s: float = 1800.0  # used seconds after which a window weighs 1/e
    enough_s: float = 60.0  # used seconds that have to be seen
    prompt_per_s: float = 0.0  # declared, of an instance of any model
    response_per_s: float = 0.0
    total_per_s: float = 0.0

    def __post_init__(self) -> None:
        check_bounds(self, above_0=("full_ratio", "window_s", "memory_s", "slowdown"))

    @property
    def declared(self) -> Capacity:
        """mu before anything was measured."""
        return Capacity(
            prompt_per_s=self.prompt_per_s, response_per_s=self.response_per_s, total_per_s=self.total_per_s
        )


@dataclass(frozen=True, slots=True)
class Served:
    """One answer, whole or not, of one instance. Times are epoch seconds: sent there, first token, end."""

    instance_id: str
    sent_at: float
    first_at: float
    ended_at: float
    prompt_tokens: int
    response_tokens: int
    missed: bool = False  # an objective of its model, though it did not wait for a start


@dataclass(slots=True)
class InstanceWindow:
    """What one instance did in one window."""

    prompt_tokens: float = 0.0
    response_tokens: float = 0.0
    num_steps: float = 0.0  # tokens after the first, of streams
    step_s: float = 0.0  # seconds that those took together
    running_s: float = 0.0  # integral of the requests in it
    kv_token_s: float = 0.0  # integral of the tokens in its cache
    num_ended: int = 0
    num_missed: int = 0

    @property
    def tau_s(self) -> float:
        """Mean seconds of a step; 0 where none was seen."""
        return self.step_s / self.num_steps if self.num_steps else 0.0

    def add(self, one: Served, starts_at: float, ends_at: float) -> None:
        """The part of an answer that lies in this window."""
        running_s = _overlap(one.sent_at, one.ended_at, starts_at, ends_at)
        self.running_s += running_s
        self.kv_token_s += one.prompt_tokens * running_s
        if starts_at <= one.first_at < ends_at:
            self.prompt_tokens += one.prompt_tokens
            self.response_tokens += min(1, one.response_tokens)
        if starts_at <= one.ended_at < ends_at:
            self.num_ended += 1
            self.num_missed += one.missed
        num_more, took_s = one.response_tokens - 1, one.ended_at - one.first_at
        if num_more < 1 or took_s < 0:
            return
        if took_s < num_more * LEAST_STEP_S:
            self.response_tokens += num_more if starts_at <= one.first_at < ends_at else 0
            return
        here_s = _overlap(one.first_at, one.ended_at, starts_at, ends_at)
        num_here = num_more * here_s / took_s
        self.response_tokens += num_here
        self.num_steps += num_here
        self.step_s += here_s
        middle_s = (max(one.first_at, starts_at) + min(one.ended_at, ends_at)) / 2 - one.first_at
        self.kv_token_s += num_more * middle_s / took_s * here_s


@dataclass(slots=True)
class Throughput:
    """mu of one model, from the answers of its instances. `close` is to be called now and then."""

    params: CapacityParams = field(default_factory=CapacityParams)
    declared: Capacity = field(default_factory=Capacity)
    num_windows: int = 0  # clean ones so far
    used_s: float = 0.0  # weighed, as the tokens are
    _tokens: tuple[float, float] = (0.0, 0.0)
    _windows: dict[int, dict[str, InstanceWindow]] = field(default_factory=dict)  # by number, instance_id
    _closed: int = -1  # number of the last window read
    _alone_s: dict[str, float] = field(default_factory=dict)  # instance_id -> its shortest mean step so far

    @property
    def source(self) -> str:
        """Where `capacity` is from: MEASURED, DECLARED, or "" where it is not known."""
        if self.used_s >= max(self.params.enough_s, 1e-9):
            return MEASURED
        return DECLARED if self.declared != Capacity() else ""

    @property
    def capacity(self) -> Capacity:
        """mu, as measured, or else as declared."""
        if self.source != MEASURED:
            return self.declared
        prompt, response = (tokens / self.used_s for tokens in self._tokens)
        return Capacity(prompt_per_s=prompt, response_per_s=response, total_per_s=prompt + response)

    def add(self, one: Served) -> None:
        """An answer has ended. What lies in windows that have been read already counts no more, but for its prompt,
        which counts in the first one after them."""
        width = self.params.window_s
        last = math.floor(one.ended_at / width)
        first = max(math.floor(one.sent_at / width), self._closed + 1, last - LATE_WINDOWS)
        for number in range(first, last + 1):
            here = self._windows.setdefault(number, {}).setdefault(one.instance_id, InstanceWindow())
            here.add(one, number * width, (number + 1) * width)
            if number == first and one.first_at < first * width:
                here.prompt_tokens += one.prompt_tokens

    def close(
        self,
        now_s: float,
        rows: Mapping[str, Instance],
        unsteady_at: Mapping[str, float],
        slo: Slo = Slo(),
    ) -> bool:
        """Read the windows that are over. `rows` are the instances of now, `unsteady_at` when one was last seen in
        another state than READY. Whether there was a window to read."""
        width, found = self.params.window_s, False
        while self._windows and (number := min(self._windows)) < math.floor(now_s / width) - LATE_WINDOWS:
            found, self._closed = True, number
            for instance_id, window in self._windows.pop(number).items():
                row = rows.get(instance_id)
                if row is not None and _was_steady(row, unsteady_at.get(instance_id, -math.inf), number * width):
                    self._read(window, row, slo)
        if found:
            self._alone_s = {i: alone_s for i, alone_s in self._alone_s.items() if i in rows}
        return found

    def _read(self, window: InstanceWindow, row: Instance, slo: Slo) -> None:
        alone_s = self._alone_s.get(row.instance_id, row.step_s)
        if window.num_steps >= LEAST_STEPS:
            alone_s = self._alone_s[row.instance_id] = min(alone_s or math.inf, window.tau_s)
        used = used_share(window, row, alone_s, slo, self.params)
        if used < self.params.busy_ratio:
            return
        used_s = used * self.params.window_s
        kept = math.exp(-used_s / self.params.memory_s)
        prompt, response = self._tokens
        self._tokens = prompt * kept + window.prompt_tokens, response * kept + window.response_tokens
        self.used_s = self.used_s * kept + used_s
        self.num_windows += 1


def used_share(window: InstanceWindow, row: Instance, alone_s: float, slo: Slo, params: CapacityParams) -> float:
    """u: which share of what it takes an instance has taken in a window of `window_s`, above 1 where it was too much.
    `alone_s`: seconds of its step without load; 0 where it is not known, and nothing is said by steps then."""
    rho = max(0.0, 1 - alone_s / window.tau_s) if window.num_steps and alone_s else 0.0
    num_running = window.running_s / params.window_s
    rho = min(rho, num_running / (1 + num_running))  # what slows it beyond that is not its own load
    limit_s = slo.tpot_s or params.slowdown * alone_s
    allowed = max(LEAST_RHO, 1 - alone_s / limit_s) if limit_s else 1.0
    full = num_running / max(1, row.max_concurrency)
    if row.kv_tokens:
        full = max(full, window.kv_token_s / params.window_s / row.kv_tokens)
    full = min(1.0, full)  # what waits inside an engine fills nothing
    used = max(rho / allowed, rho + (1 - rho) * full / params.full_ratio)
    has_missed = window.num_missed > (1 - params.clean_share) * window.num_ended
    is_late = has_missed and used >= params.busy_ratio and (slo.ttft_s or slo.tpot_s)
    return max(1.0, used) if is_late else used


def _was_steady(row: Instance, unsteady_at: float, since: float) -> bool:
    """Whether it has served from then on, alone."""
    is_up = row.state is InstanceState.READY and 0 < row.ready_at <= since
    return is_up and row.is_whole and not row.consolidating and unsteady_at < since


def _overlap(first: float, end: float, starts_at: float, ends_at: float) -> float:
    return max(0.0, min(end, ends_at) - max(first, starts_at))
