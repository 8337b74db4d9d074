"""The leadership of one kind of service, as the store records it."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """The leadership of one service. `holder` "": no process leads. `epoch` is the holder's; `newest_epoch` the highest
    ever given for this service, 0 if the store knows none (it may have been emptied). `left_s` counts from the store's
    answer."""

    holder: str = ""
    epoch: int = 0
    url: str = ""
    left_s: float = 0.0
    newest_epoch: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Leader:
    """One row of the table `leaders`: which process took the lead last, for services that fence by it and pages that
    show it."""

    service: str
    service_id: str
    url: str
    epoch: int
    since: float  # epoch seconds
