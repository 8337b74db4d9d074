"""The shape of a fairness policy: one queueing discipline per model, which knows the requests that several tenants have
at it and says which of the waiting ones is dispatched next, and which one is refused where the queue is full.

A router makes a discipline once requests of several tenants or classes are at a model at the same time, and drops it
when a single tenant is left; a model of one tenant needs none. Times are seconds on one clock that does not go back;
tickets are the router's own and grow with arrival.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from glowplug.domain.access import Priority
from glowplug.domain.bounds import check_bounds
from glowplug.policies.worth import FROM_ZERO


class Claim(NamedTuple):
    """A request as a discipline sees it. Token counts are 0 where they are not known. `goes_on`: its stream has begun
    and lost its instance, so it goes before all others."""

    ticket: int
    tenant: str
    weight: float
    priority: Priority
    arrived_at: float
    prompt_tokens: int = 0
    expected_tokens: int = 0
    goes_on: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class FairnessParams:
    """Constants of weighted fair queueing. Factors multiply a tenant's weight; times are seconds."""

    input_weight: float = 1.0  # of a token of a prompt: w_p of VTC
    output_weight: float = 2.0  # of a token of an answer: w_q
    interactive: float = 4.0  # factor of the class
    standard: float = 1.0
    batch: float = 0.25
    patience_s: float = 30.0  # a batch request that has waited so long counts as a standard one
    active_s: float = 60.0  # how long a tenant counts after its last arrival
    reserve: float = field(default=0.25, metadata=FROM_ZERO)  # most of the slots that a tenant above its share leaves
    batch_reserve: float = field(default=0.5, metadata=FROM_ZERO)  # ... and that batch leaves; 0: none
    most_recalls: int = field(default=3, metadata=FROM_ZERO)  # times that one request gives way; 0: none does
    again_s: float = field(default=2.0, metadata=FROM_ZERO)  # of its answer, after which it may once more; 0: never
    unread_tokens: int = field(default=512, metadata=FROM_ZERO)  # of one tenant's prompts at an instance; 0: no limit
    missed: float = 0.05  # share of the others' requests that may find no slot free
    least_slots: int = 4  # a model with fewer slots keeps none free
    default_tokens: int = 200  # of an answer, before any was measured
    default_s: float = 3.0  # likewise

    def __post_init__(self) -> None:
        check_bounds(self, above_0=("input_weight", "output_weight", "interactive", "standard", "batch"), least_slots=2)


class Discipline(Protocol):
    """The requests of one model, those that wait and those that run. Unknown tickets are ignored. `may_recall`: a
    request may have to give way although nothing waits."""

    may_recall: bool

    def hold(self, claim: Claim, now_s: float) -> None:
        """Add a request that waits."""

    def remove(self, ticket: int) -> None:
        """Take out a request that waits no more: it was refused, or its client has left."""

    def next(self, num_slots: int, num_free: int, now_s: float, num_instances: int = 1) -> int | None:
        """The ticket of the waiting request to dispatch now; None where none may have a slot. `num_slots`: of all ready
        instances of the model (`num_instances`), of which `num_free` are free."""

    def goes_at_once(self, tenant: str, prompt_tokens: int, num_instances: int, now_s: float) -> bool:
        """Return whether a request that arrives may be dispatched without a look at the others, where nothing waits and
        most slots are free: `hold`, `next` and `recall` would dispatch it, and have none give way."""

    def recall(self, num_slots: int, num_free: int, now_s: float, num_instances: int = 1) -> int | None:
        """The ticket of a running request that has to give way now: its instance is to drop it, and it waits again.
        None where none has to, or where the last one asked has not left yet. Call it after `next` gave None, and
        where nothing waits only while `may_recall`."""

    def stays(self, ticket: int) -> None:
        """Note that a request which was to give way cannot: another engine could not go on with its answer."""

    def read(self, ticket: int, now_s: float) -> None:
        """Note that the prompt of a dispatched request was read: its answer begins."""

    def sent(self, claim: Claim, now_s: float) -> None:
        """Note that a request was dispatched; it waits no more."""

    def left(self, ticket: int, response_tokens: int, now_s: float, *, comes_back: bool) -> None:
        """Note that a dispatched request has left its instance. `response_tokens`: of a whole answer, else 0;
        `comes_back`: it will wait again, and was served nothing so far."""

    def before(self, ticket: int) -> Iterator[int]:
        """Tickets of the waiting requests that are to be refused before this one where the queue is full, in order."""

    def order(self, now_s: float) -> list[int]:
        """The tickets of all waiting requests, in the order in which they are likely to be dispatched."""

    def is_shared(self, now_s: float) -> bool:
        """Return whether requests of more than one tenant or class are here, or came of late."""
