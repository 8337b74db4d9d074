"""Policies, systems, engines, sources of weights and commands of other packages, found by entry points.

    [project.entry-points."glowplug.policies.eviction"]
    largest_first = "my_package:evict"

A name of ours cannot be taken. Nothing is looked up before a name is asked for that is not ours, since reading the
entry points of an environment takes some 20 ms. docs/extend/package.md shows a whole package.
"""

import ast
from functools import cache
from importlib.metadata import EntryPoint, PackageNotFoundError, distribution, entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from glowplug.domain.errors import BadRequest

LABORATORY = "glowplug-lab"
GETS_IT = "pip install 'glowplug[lab]'; in a checkout, make install"


def names(group: str) -> tuple[str, ...]:
    """Names that other packages add to `glowplug.<group>`."""
    return tuple(_found(group))


def load(group: str, name: str) -> Any:
    """The object behind a name. Raises KeyError for a name that is not there, BadRequest where its import fails."""
    point = _found(group)[name]
    try:
        return point.load()
    except Exception as error:  # whatever somebody else's module does when it is imported
        package = point.dist.name if point.dist else "a package"
        kind = " ".join(reversed(group.split("."))).replace("policies", "policy").removesuffix("s")
        raise BadRequest(f"{kind} {name!r} of {package} cannot be imported: {error}", param=group) from error


def about(group: str, name: str) -> str:
    """The first line of the docstring of the function behind a name, read in its source: to import it may take long."""
    point = _found(group)[name]
    spec = find_spec(point.module)
    body = ast.parse(Path(spec.origin).read_bytes()).body if spec and spec.origin else []
    defined = (node for node in body if isinstance(node, ast.FunctionDef) and node.name == point.attr)
    return next((ast.get_docstring(node) or "" for node in defined), "").partition("\n")[0]


def hint() -> str:
    """The end of an error about an unknown name: where the laboratory's come from, while it is not installed."""
    try:
        distribution(LABORATORY)
    except PackageNotFoundError:
        return f"; the laboratory has more: {GETS_IT}"
    return ""


@cache
def _found(group: str) -> dict[str, EntryPoint]:
    return {point.name: point for point in sorted(entry_points(group=f"glowplug.{group}"))}
