"""The shape of a fairness policy: a queueing discipline for one model's requests of several tenants.

A router makes one once requests of several tenants or classes meet at a model, and drops it when one tenant is left.
Times are seconds on a monotonic clock; tickets are the router's own and grow with arrival.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, NamedTuple, Protocol

from glowplug.domain.access import Priority
from glowplug.domain.bounds import Bounded, Bounds, Count, Positive
from glowplug.policies.worth import FACTORS


class Claim(NamedTuple):
    """A request; unknown token counts are 0. `goes_on`: its stream lost its instance, so it precedes all others."""

    ticket: int
    tenant: str
    weight: float
    priority: Priority
    arrived_at: float
    prompt_tokens: int = 0
    expected_tokens: int = 0
    goes_on: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class FairnessParams(Bounded):
    """Factors multiply a tenant's weight; times are seconds."""

    input_weight: Positive = 1.0  # of a prompt token: w_p of VTC
    output_weight: Positive = 2.0  # of an answer token: w_q
    interactive: Positive = FACTORS[Priority.INTERACTIVE]  # factor of the class
    standard: Positive = FACTORS[Priority.STANDARD]
    batch: Positive = FACTORS[Priority.BATCH]
    patience_s: Positive = 30.0  # after which batch counts as standard
    active_s: Positive = 60.0  # after a tenant's last arrival
    reserve: float = 0.25  # most slots left free by a tenant above its share
    batch_reserve: float = 0.5  # ... and by batch; 0: none
    most_recalls: int = 3  # per request; 0: none
    again_s: float = 2.0  # of its answer, until once more; 0: never
    unread_tokens: int = 512  # of one tenant's prompts at an instance; 0: no limit
    missed: Positive = 0.05  # share of others' requests that may find no free slot
    least_slots: Annotated[int, Bounds(least=2)] = 4  # a model with fewer keeps none free
    default_tokens: Count = 200  # of an answer, until measured
    default_s: Positive = 3.0  # likewise


class Discipline(Protocol):
    """One model's requests. Unknown tickets are ignored. `may_recall`: one may have to give way although none waits."""

    may_recall: bool

    def hold(self, claim: Claim, now_s: float) -> None:
        """Add a waiting request."""

    def remove(self, ticket: int) -> None:
        """Remove a waiting request, refused or left by its client."""

    def next(self, num_slots: int, num_free: int, now_s: float, num_instances: int = 1) -> int | None:
        """Return the ticket to dispatch now, or None. Slots are those of all `num_instances` ready instances."""

    def goes_at_once(self, tenant: str, prompt_tokens: int, num_instances: int, now_s: float) -> bool:
        """Return whether `hold`, `next` and `recall` would dispatch a new request and recall none, with no queue and
        most slots free."""

    def recall(self, num_slots: int, num_free: int, now_s: float, num_instances: int = 1) -> int | None:
        """Return the ticket of a running request to drop and requeue now, or None, also until the last one has left.
        Call it after `next` gave None, and with an empty queue only while `may_recall`."""

    def stays(self, ticket: int) -> None:
        """Note that a recalled request cannot give way: no other engine could continue its answer."""

    def read(self, ticket: int, now_s: float) -> None:
        """Note that a prompt was read."""

    def sent(self, claim: Claim, now_s: float) -> None:
        """Note a dispatch."""

    def left(self, ticket: int, response_tokens: int, now_s: float, *, comes_back: bool) -> None:
        """Note that a request left its instance. `response_tokens`: of a whole answer, else 0; `comes_back`: it will
        wait again, served nothing so far."""

    def before(self, ticket: int) -> Iterator[int]:
        """Yield waiting tickets to refuse first when the queue is full."""

    def order(self, now_s: float) -> list[int]:
        """Return all waiting tickets in likely dispatch order."""

    def is_shared(self, now_s: float) -> bool:
        """Return whether several tenants or classes are present, or were recently."""
