"""Who leads one kind of service, as the store has it."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """`holder` "": no process leads. `epoch` is the holder's; `newest_epoch` the highest ever given for this service,
    0 in a store that knows of none (it may have been emptied). `left_s` from when the store answered."""

    holder: str = ""
    epoch: int = 0
    url: str = ""
    left_s: float = 0.0
    newest_epoch: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Leader:
    """One row of the table `leaders`: who took the lead last, written for those who fence by it or show it."""

    service: str
    service_id: str
    url: str
    epoch: int
    since: float  # epoch seconds
