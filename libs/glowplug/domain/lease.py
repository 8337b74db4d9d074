"""Record the leadership of one kind of service."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """Leadership of one service. `holder` "": none. `epoch`: the holder's; `newest_epoch`: the highest ever given, 0 if
    unknown (an emptied store); `left_s` counts from the store's answer."""

    holder: str = ""
    epoch: int = 0
    url: str = ""
    left_s: float = 0.0
    newest_epoch: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Leader:
    """Row of table `leaders`: the last process to lead, for fencing and display."""

    service: str
    service_id: str
    url: str
    epoch: int
    since: float  # epoch seconds
