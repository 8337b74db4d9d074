"""Loads to judge forecasts on, as requests in windows of 600 s, and the judged part of each."""

import csv
import gzip
import zlib
from collections import defaultdict
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

from bench.papers.data import bin_counts, trace

WINDOW_S, DAY_S, BIN_S = 600, 86_400, 10
PER_DAY = DAY_S // WINDOW_S
AZURE = {"conversation": "azure_2024_conv_10s", "code": "azure_2024_code_10s"}
SHARES = {"full": 1.0, "1/10": 0.1, "1/50": 0.02}
TUNED_DAYS = 4
BUSY = 20.0  # requests a window, on average, of a client that counts as busy; at least every second window has some

Counts = NDArray[np.float64]


@dataclass(frozen=True)
class Load:
    """One series. Forecasts cover all of it; windows [first, until) are judged."""

    name: str
    group: str
    counts: Counts
    first: int
    until: int

    @property
    def set(self) -> str:
        """The data set that it comes from."""
        return self.group if self.group in ("ServeGen", "sums") else "Azure"


def azure(part: str, seed: int = 7) -> list[Load]:
    """Both services at three scales. judged: from the fifth day to the end of the file; tuned: the second to fourth."""
    found = []
    for name, file in AZURE.items():
        bins = np.array(bin_counts(file))
        for scale, share in SHARES.items():
            kept = bins if share == 1 else np.random.default_rng(seed).binomial(bins, share)
            counts = kept[: len(kept) // 60 * 60].reshape(-1, WINDOW_S // BIN_S).sum(1).astype(float)
            bounds = (TUNED_DAYS * PER_DAY, len(counts)) if part == "judged" else (PER_DAY, TUNED_DAYS * PER_DAY)
            found.append(Load(f"{name}, {scale}", f"{name}, {scale}", counts, *bounds))
    return found


def servegen(part: str) -> list[Load]:
    """Busy clients of ten days, from the fourth day on. Windows missing from the trace had no request."""
    clients = _clients(part)
    return [Load(name, "ServeGen", of, 3 * PER_DAY, len(of)) for name, of in sorted(clients.items()) if is_busy(of)]


def sums(part: str) -> list[Load]:
    """The clients of each model summed in three groups, from the third day on: most of these have a day and a week."""
    found: dict[str, Counts] = defaultdict(lambda: np.zeros(10 * PER_DAY))
    for name, counts in _clients(part).items():
        found[f"{name.partition('/')[0]}, group {zlib.crc32(name.encode()) // 2 % 3}"] += counts
    return [Load(name, "sums", of, 2 * PER_DAY, len(of)) for name, of in sorted(found.items()) if is_busy(of)]


@cache
def _clients(part: str) -> dict[str, Counts]:
    """Requests of each client of a half, in windows of ten days."""
    found: dict[str, Counts] = defaultdict(lambda: np.zeros(10 * PER_DAY))
    with gzip.open(trace("servegen_clients_10min"), "rt") as file:
        for row in csv.DictReader(file):
            name, at = f"{row['model']}/{row['client']}", int(float(row["t_s"]) // WINDOW_S)
            is_judged = zlib.crc32(name.encode()) % 2 == 1
            if row["model"].startswith("m-") and at < 10 * PER_DAY and is_judged == (part == "judged"):
                found[name][at] = float(row["requests"])
    return dict(found)


def is_busy(counts: Counts) -> bool:
    """Whether its whole time and its second half are both busy."""
    half = counts[len(counts) // 2 :]
    return bool(counts.mean() >= BUSY and (counts > 0).mean() >= 0.5 and (half > 0).mean() > 0.5)
