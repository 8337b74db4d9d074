"""`policies: NAME` in a scenario: a whole system written out (policies/systems.py)."""

from collections.abc import Mapping
from typing import Any

from glowplug.policies.systems import SYSTEMS


def with_system(tree: Mapping[str, Any], *, over: bool = False) -> dict[str, Any]:
    """The tree with a system named in `policies` written out. Its settings go under those the tree has, or `over` them.

    A name that does not exist stays as it is.
    """
    named = tree.get("policies")
    system = SYSTEMS.get(named) if isinstance(named, str) else None
    if system is None:
        return dict(tree)
    params = dict(tree.get("params") or {})
    for part, settings in system.params.items():
        own = dict(params.get(part) or {})
        params[part] = own | dict(settings) if over else dict(settings) | own
    return {**tree, "policies": dict(system.policies), "params": params}
