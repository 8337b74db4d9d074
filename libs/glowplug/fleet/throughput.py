"""Measure the tokens per second that one instance serves within its objectives: PreServe's mu.

Paper: PreServe section 4.1 (Algorithm 1, lines 6-8): mu_p, mu_d and mu_t are the most prompt, response and all tokens
per second and instance of the windows in which no objective was missed.

Departure: a maximum over many short windows grows with their number by chance, and a scaler that plans by it lets ever
more requests wait. Here each window yields an instance's used share u, and mu is tokens over used seconds of all
windows, the newest weighed most:

    tau = a / (1 - rho)         a step takes a alone; rho, the share of it that load adds, grows with the tokens taken
    u_s = rho / (1 - a / tau*)  used of what the objective tau* for a step allows
    u_f = rho + (1 - rho) f / F used of the cache or the slots, of which f is full: requests stay longer as steps do
    mu  = tokens / (u seconds), u = max(u_s, u_f)

a is the engine's figure (Instance.step_s), or the shortest mean step of a window with enough steps if less; the engine
also reports M and its slots (Instance.kv_tokens, max_concurrency). tau* is the model's objective, else `slowdown` times
a, as in section 5.1, where 0.2 s are about three times a request alone. F is T_mem of section 4.3. With n requests at
once rho is at most n / (1 + n), as in a shared server: any more is the load of other engines on the machine.

A window counts (is clean) if its instance was READY throughout, has not drained since and used at least `busy_ratio`.
If more than one request in twenty that waited for no start misses an objective, it counts as fully used at least. The
declared capacity holds until `enough_s` used seconds have been seen (see `source`).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated

from glowplug.domain.bounds import Bounded, Positive, Share
from glowplug.domain.instance import Instance, InstanceState
from glowplug.domain.model import Slo
from glowplug.domain.reading import Setting

MEMORY_RATIO = 0.8  # T_mem of PreServe section 4.3

DECLARED, MEASURED = "declared", "measured"  # `Throughput.source`; "": unknown
LATE_WINDOWS = 2  # before one is read: running answers are counted at their end
LEAST_STEP_S = 1e-3  # faster: not streamed
LEAST_STEPS = 16  # in a window that shows a step alone
LEAST_RHO = 0.1  # floor for objectives shorter than a step alone


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """Tokens per second of one instance; 0: unknown."""

    prompt_per_s: float = 0.0  # mu_p
    response_per_s: float = 0.0  # mu_d
    total_per_s: float = 0.0  # mu_t


@dataclass(frozen=True, slots=True, kw_only=True)
class CapacityParams(Bounded):
    busy_ratio: float = 0.5  # least used share of a window that counts
    clean_share: Share = 0.95  # share of requests within the objectives, else the window counts as fully used
    normalized_s: float = 0.2  # per response token, for a model without objectives
    slowdown: Positive = 3.0  # tau* over a, without an objective for a step
    full_ratio: Positive = MEMORY_RATIO  # F
    window_s: Positive = 60.0
    memory_s: Positive = 1800.0  # used seconds after which a window weighs 1/e
    enough_s: float = 60.0  # before mu counts as measured
    # declared, for any model
    prompt_per_s: Annotated[float, Setting(name="capacity_prompt_per_s", advanced=True)] = 0.0
    response_per_s: Annotated[float, Setting(name="capacity_response_per_s", advanced=True)] = 0.0
    total_per_s: Annotated[float, Setting(name="capacity_total_per_s", advanced=True)] = 0.0

    @property
    def declared(self) -> Capacity:
        return Capacity(
            prompt_per_s=self.prompt_per_s, response_per_s=self.response_per_s, total_per_s=self.total_per_s
        )


@dataclass(frozen=True, slots=True)
class Served:
    """One answer of an instance, complete or not. Epoch seconds: request sent, first token, end."""

    instance_id: str
    sent_at: float
    first_at: float
    ended_at: float
    prompt_tokens: int
    response_tokens: int
    missed: bool = False  # an objective, without having waited for a start


@dataclass(slots=True)
class InstanceWindow:
    prompt_tokens: float = 0.0
    response_tokens: float = 0.0
    num_steps: float = 0.0  # streamed tokens after the first
    step_s: float = 0.0
    running_s: float = 0.0  # integral of running requests
    kv_token_s: float = 0.0  # integral of tokens in the KV cache
    num_ended: int = 0
    num_missed: int = 0

    @property
    def tau_s(self) -> float:
        return self.step_s / self.num_steps if self.num_steps else 0.0

    def add(self, one: Served, starts_at: float, ends_at: float) -> None:
        """Count the part of an answer inside this window."""
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
    """Measured mu of one model. Call `close` regularly."""

    params: CapacityParams = field(default_factory=CapacityParams)
    declared: Capacity = field(default_factory=Capacity)
    num_windows: int = 0  # clean ones
    used_s: float = 0.0  # weighted by age, like `_tokens`
    _tokens: tuple[float, float] = (0.0, 0.0)
    _windows: dict[int, dict[str, InstanceWindow]] = field(default_factory=dict)  # by number, instance_id
    _closed: int = -1
    _alone_s: dict[str, float] = field(default_factory=dict)  # instance_id -> shortest mean step

    @property
    def source(self) -> str:
        """MEASURED, DECLARED, or "" if unknown."""
        if self.used_s >= max(self.params.enough_s, 1e-9):
            return MEASURED
        return DECLARED if self.declared != Capacity() else ""

    @property
    def capacity(self) -> Capacity:
        if self.source != MEASURED:
            return self.declared
        prompt, response = (tokens / self.used_s for tokens in self._tokens)
        return Capacity(prompt_per_s=prompt, response_per_s=response, total_per_s=prompt + response)

    def add(self, one: Served) -> None:
        """Count an answer that has ended. Its tokens in closed windows are lost; its prompt counts in the first open
        one."""
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
        """Read the windows that are over and return whether there were any. `unsteady_at`: when each instance was last
        not READY."""
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
    """Return u, the used share of an instance's capacity in a window; above 1: overloaded. `alone_s`: its step without
    load; 0: unknown, and steps are ignored."""
    rho = max(0.0, 1 - alone_s / window.tau_s) if window.num_steps and alone_s else 0.0
    num_running = window.running_s / params.window_s
    rho = min(rho, num_running / (1 + num_running))  # more is not the instance's own load
    limit_s = slo.tpot_s or params.slowdown * alone_s
    allowed = max(LEAST_RHO, 1 - alone_s / limit_s) if limit_s else 1.0
    full = num_running / max(1, row.max_concurrency)
    if row.kv_tokens:
        full = max(full, window.kv_token_s / params.window_s / row.kv_tokens)
    full = min(1.0, full)  # requests waiting in the engine fill neither cache nor slots
    used = max(rho / allowed, rho + (1 - rho) * full / params.full_ratio)
    has_missed = window.num_missed > (1 - params.clean_share) * window.num_ended
    is_late = has_missed and used >= params.busy_ratio and (slo.ttft_s or slo.tpot_s)
    return max(1.0, used) if is_late else used


def _was_steady(row: Instance, unsteady_at: float, since: float) -> bool:
    is_up = row.state is InstanceState.READY and 0 < row.ready_at <= since
    return is_up and row.is_whole and not row.consolidating and unsteady_at < since


def _overlap(first: float, end: float, starts_at: float, ends_at: float) -> float:
    return max(0.0, min(end, ends_at) - max(first, starts_at))
