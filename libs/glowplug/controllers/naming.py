"""Ids made without chance: unique by the epoch of the issuing process and a counter."""

_DIGITS = "0123456789abcdefghijklmnopqrstuvwxyz"


def base36(number: int) -> str:
    text = ""
    while True:
        number, digit = divmod(number, 36)
        text = _DIGITS[digit] + text
        if not number:
            return text


class Ids:
    """Maker of ids: `next("d-p")` -> "d-p-<epoch>-1" ... The prefixes tell two issuers with one epoch apart."""

    def __init__(self, epoch: int) -> None:
        self._epoch, self._count = base36(max(0, epoch)), 0

    def next(self, prefix: str) -> str:
        self._count += 1
        return f"{prefix}-{self._epoch}-{base36(self._count)}"
