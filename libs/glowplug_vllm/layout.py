"""Order of a model's weights, and adjacency in a file. Standard library only."""

import re
from collections.abc import Mapping, Sequence
from itertools import groupby, pairwise

_LAYER = re.compile(r"^.*?\.\d+\.")  # "model.layers.3." of "model.layers.3.mlp.up_proj.weight"


def leading(bytes_of: Mapping[str, int], num_bytes: int) -> frozenset[str]:
    """Return names of the first layers that fit `num_bytes` together. `bytes_of`: by name, in the model's order.
    Layers, and the weights before and after them, are kept whole or not at all."""
    kept: list[str] = []
    for _, group in groupby(bytes_of, key=_layer):
        names = list(group)
        num_bytes -= sum(bytes_of[name] for name in names)
        if num_bytes < 0:
            break
        kept += names
    return frozenset(kept)


def _layer(name: str) -> str:
    found = _LAYER.match(name)
    return found[0] if found else ""


def is_one_run(spans: Sequence[tuple[int, int]]) -> bool:
    """Whether each [start, end) begins at the end of the one before."""
    return all(before[1] == after[0] for before, after in pairwise(spans))
