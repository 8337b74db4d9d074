"""Measure the cost of a choice: the look-ahead over 1,000 instances, and the whole router controller per request.

    python bench/routing/run.py [--instances 1000] [--requests 20000]

Requests come in a Poisson stream to one model, and each of its instances runs `busy` of them on average. Every request
is sent, has its first token and ends, in virtual time. The result is this machine's CPU time for the policy (choice and
bookkeeping), per request; then the same through `RouterController`, which adds queues, counts and effects. The lengths
of the answers are given; predicting them is left out (PreServe section 5.5 reports 9.7 ms for its router without that).
"""

import argparse
import heapq
import random
import sys
import time
from dataclasses import dataclass
from typing import Any

from bench.measured.data import data_option, markdown, write_data
from glowplug.controllers.router.controller import RouterController
from glowplug.controllers.router.messages import Dispatch, FirstToken, RequestArrived, RequestEnded
from glowplug.controllers.router.params import RouterParams
from glowplug.domain.instance import Instance
from glowplug.domain.snapshot import Target
from glowplug.policies.registry import choose
from glowplug.policies.routing.port import BalancerParams
from tests.fleet_builder import a_model, an_instance

TPOT_S, PREFILL_S, ROOM = 0.03, 0.15, 256
PROMPT_MEAN, RESPONSE_MEAN = 900, 220
NUM_ROUNDS = 3
TARGET_DECISION_US, TARGET_REQUEST_MS = 50.0, 2.0


@dataclass(frozen=True)
class Row:
    """One policy under one load."""

    policy: str
    what: str  # "policy" or "router"
    num_instances: int
    busy: float  # requests at each instance, on average
    kv_tokens: int
    num_requests: int
    us_mean: float  # per request, all work amortised
    us_p50: float  # of the call that decides
    us_p99: float


@dataclass(frozen=True)
class Load:
    """`busy` requests at each instance whose caches hold `kv_tokens`."""

    busy: float
    kv_tokens: int


LIGHT = Load(10, 200_000)
TIGHT = Load(12, 14_000)  # most are above four fifths of their cache, so the look-ahead has to run


def stream(num: int, num_instances: int, load: Load, seed: int) -> list[tuple[float, int, int]]:
    """(seconds, prompt, response) of each request; both lengths are exponential, at least 1."""
    rng = random.Random(seed)
    per_s = load.busy * num_instances / (PREFILL_S + RESPONSE_MEAN * TPOT_S)
    at_s, requests = 0.0, []
    for _ in range(num):
        at_s += rng.expovariate(per_s)
        prompt, response = rng.expovariate(1 / PROMPT_MEAN), rng.expovariate(1 / RESPONSE_MEAN)
        requests.append((at_s, 1 + min(int(prompt), 4000), 1 + min(int(response), 2000)))
    return requests


class Side:
    """The timed side, and the same calls with empty bodies: the difference is the cost. `chose` are seconds of
    choices."""

    def __init__(self) -> None:
        self.chose: list[float] = []

    def arrive(self, ticket: int, now_s: float, prompt: int, response: int) -> str:
        """Send the request to an instance; "" if none takes it."""
        began = time.perf_counter()
        self.chose.append(time.perf_counter() - began)
        return "-"

    def begin(self, ticket: int, now_s: float) -> None: ...

    def end(self, ticket: int, now_s: float, response: int) -> None: ...


class PolicySide(Side):
    """One balancer, with the counts that its router keeps."""

    def __init__(self, policy: str, num_instances: int, load: Load) -> None:
        super().__init__()
        self.balancer = choose("routing", policy)(BalancerParams())
        self.counts = {f"i-{n:04}": 0 for n in range(num_instances)}
        self.at: dict[int, str] = {}
        for instance_id in self.counts:
            self.balancer.put(Target(instance_id, 0, ROOM, load.kv_tokens), 0.0)

    def arrive(self, ticket: int, now_s: float, prompt: int, response: int) -> str:
        began = time.perf_counter()
        chosen = str(self.balancer.choose(prompt, response, now_s).instance_id)
        self.chose.append(time.perf_counter() - began)
        if chosen:
            self.at[ticket] = chosen
            self.counts[chosen] += 1
            self.balancer.sent(ticket, chosen, prompt, response, now_s)
            self.balancer.filled(chosen, self.counts[chosen])
        return chosen

    def begin(self, ticket: int, now_s: float) -> None:
        self.balancer.first_token(ticket, now_s)

    def end(self, ticket: int, now_s: float, response: int) -> None:
        instance_id = self.at.pop(ticket)
        self.counts[instance_id] -= 1
        self.balancer.ended(ticket, response, now_s)
        self.balancer.filled(instance_id, self.counts[instance_id])


class RouterSide(Side):
    """The whole controller with one model."""

    def __init__(self, policy: str, num_instances: int, load: Load) -> None:
        super().__init__()
        self.router = RouterController(RouterParams(policy=policy))
        model = a_model(max_concurrency=ROOM)
        self.router.restore("models", {"m": model}, 0.0)
        self.router.restore("instances", {i.instance_id: i for i in _instances(num_instances, load)}, 0.0)

    def arrive(self, ticket: int, now_s: float, prompt: int, response: int) -> str:
        asked = RequestArrived(ticket, "m", f"r-{ticket}", "", prompt, 0, response)
        began = time.perf_counter()
        effects = self.router.handle(asked, now_s)
        self.chose.append(time.perf_counter() - began)
        return next((e.instance.instance_id for e in effects if isinstance(e, Dispatch)), "")

    def begin(self, ticket: int, now_s: float) -> None:
        if self.router.tracks_tokens:
            self.router.handle(FirstToken(ticket), now_s)

    def end(self, ticket: int, now_s: float, response: int) -> None:
        self.router.handle(RequestEnded(ticket, 1.0, response), now_s)


SIDES: tuple[type[PolicySide] | type[RouterSide], ...] = (PolicySide, RouterSide)


def _instances(num: int, load: Load) -> list[Instance]:
    given: dict[str, Any] = {"url": "http://x:1", "max_concurrency": ROOM, "kv_tokens": load.kv_tokens}
    return [an_instance(f"i-{n:04}", gpu_id=f"n-{n}/0", **given) for n in range(num)]


def replay(requests: list[tuple[float, int, int]], side: Side) -> float:
    """Play the life of every request in order of time. Returns the CPU seconds it took."""
    began = time.thread_time()
    later: list[tuple[float, int, int, bool]] = []  # seconds, ticket, response, whether it ends
    for ticket, (at_s, prompt, response) in enumerate(requests, 1):
        while later and later[0][0] <= at_s:
            due_s, old, length, ends = heapq.heappop(later)
            if ends:
                side.end(old, due_s, length)
            else:
                side.begin(old, due_s)
        if side.arrive(ticket, at_s, prompt, response):
            heapq.heappush(later, (at_s + PREFILL_S, ticket, response, False))
            heapq.heappush(later, (at_s + PREFILL_S + response * TPOT_S, ticket, response, True))
    return time.thread_time() - began


def time_of(side: type[PolicySide] | type[RouterSide], policy: str, num_instances: int, load: Load, num: int) -> Row:
    """Send `num` requests, from empty instances on; after some seconds each has `busy` of them. The quickest of
    `NUM_ROUNDS` counts, since other load on the machine only adds time."""
    requests = stream(num, num_instances, load, seed=1)
    rounds = []
    for _ in range(NUM_ROUNDS):
        timed = side(policy, num_instances, load)
        rounds.append((replay(requests, timed) - replay(requests, Side()), sorted(timed.chose)))
    seconds, chose = min(rounds)
    return Row(
        policy,
        "router" if side is RouterSide else "policy",
        num_instances,
        load.busy,
        load.kv_tokens,
        num,
        seconds / num * 1e6,
        chose[len(chose) // 2] * 1e6,
        chose[len(chose) * 99 // 100] * 1e6,
    )


def table(rows: list[Row]) -> str:
    head = (
        "policy",
        "timed",
        "instances",
        "requests at each",
        "KV tokens",
        "us a request",
        "choice p50 us",
        "choice p99 us",
    )
    known = ((r.policy, r.what, r.num_instances, f"{r.busy:g}", r.kv_tokens) for r in rows)
    taken = ((f"{r.us_mean:.1f}", f"{r.us_p50:.1f}", f"{r.us_p99:.1f}") for r in rows)
    return markdown(head, ((*a, *b) for a, b in zip(known, taken, strict=True)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--instances", type=int, default=1000)
    parser.add_argument("--requests", type=int, default=20_000)
    data_option(parser)
    asked = parser.parse_args()
    rows = []
    for load in (LIGHT, TIGHT):
        rows += [time_of(side, "preserve_load_aware", asked.instances, load, asked.requests) for side in SIDES]
    for policy in ("llumnix_like", "least_loaded"):
        rows.append(time_of(PolicySide, policy, asked.instances, LIGHT, asked.requests // 30))
    print(table(rows))

    def each_us(what: str) -> list[float]:
        return [row.us_mean for row in rows if row.policy == "preserve_load_aware" and row.what == what]

    worst_us, worst_ms = max(each_us("policy")), max(each_us("router")) / 1000
    print(f"\nlook-ahead: {worst_us:.1f} us per request (target {TARGET_DECISION_US:g})")
    print(f"router: {worst_ms:.3f} ms per request (target {TARGET_REQUEST_MS:g}; paper 9.7)")
    write_data(asked.json, {"look_ahead_us": each_us("policy"), "router_us": each_us("router")})
    sys.exit(worst_us > TARGET_DECISION_US or worst_ms > TARGET_REQUEST_MS)


if __name__ == "__main__":
    main()
