"""The public traces behind the rows. They are kept outside the repository, in the folder `GLOWPLUG_DATA`."""

import os
from functools import cache
from pathlib import Path

from bench.papers.cache import ROOT
from glowplug_lab.simulator.workload.formats import counts, length_pairs


def folder() -> Path:
    """The folder of the traces: `GLOWPLUG_DATA`, or `shared/data` beside the repository."""
    return Path(os.environ.get("GLOWPLUG_DATA", "") or ROOT.parent / "shared" / "data")


def trace(name: str) -> Path:
    """One trace file. Raises FileNotFoundError that names the folder."""
    path = folder() / f"{name}.csv.gz"
    if not path.exists():
        raise FileNotFoundError(f"{path.name} is not in {folder()}: set GLOWPLUG_DATA to the folder of the traces")
    return path


@cache
def bin_counts(name: str) -> tuple[int, ...]:
    """Requests per 10 s of one of the Azure 2024 services."""
    return tuple(group[0].num_requests for group in counts(trace(name)))


@cache
def lengths(name: str) -> tuple[tuple[int, int], ...]:
    """(prompt_tokens, response_tokens) of every request, from a trace that records them."""
    return tuple(length_pairs(trace(name)))
