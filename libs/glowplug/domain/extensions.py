"""Find policies, systems, engines, sources of weights and commands of other packages.

    [project.entry-points."glowplug.policies.eviction"]
    largest_first = "my_package:evict"

Built-in names come first; only others are looked up, as reading an environment's entry points takes some 20 ms.
docs/extend/package.md shows a package.
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
    """Names added to `glowplug.<group>`."""
    return tuple(_found(group))


def load(group: str, name: str) -> Any:
    """Import a name's object. Raises KeyError if unknown, BadRequest if the import fails."""
    point = _found(group)[name]
    try:
        return point.load()
    except Exception as error:  # any error of a foreign module
        package = point.dist.name if point.dist else "a package"
        kind = " ".join(reversed(group.split("."))).replace("policies", "policy").removesuffix("s")
        raise BadRequest(f"{kind} {name!r} of {package} cannot be imported: {error}", param=group) from error


def about(group: str, name: str) -> str:
    """First docstring line of a function, from its source: an import may be slow."""
    point = _found(group)[name]
    spec = find_spec(point.module)
    body = ast.parse(Path(spec.origin).read_bytes()).body if spec and spec.origin else []
    defined = (node for node in body if isinstance(node, ast.FunctionDef) and node.name == point.attr)
    return next((ast.get_docstring(node) or "" for node in defined), "").partition("\n")[0]


def hint() -> str:
    """End of an unknown-name error: points to the laboratory if it is not installed."""
    try:
        distribution(LABORATORY)
    except PackageNotFoundError:
        return f"; the laboratory has more: {GETS_IT}"
    return ""


@cache
def _found(group: str) -> dict[str, EntryPoint]:
    return {point.name: point for point in sorted(entry_points(group=f"glowplug.{group}"))}
