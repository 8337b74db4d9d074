"""Options of a policy, written behind its name: `name:field=value:field=value`.

Options are fields of the policy's params, dotted where nested: `hydraserve:allocation.overlap=false`. Where a policy
departs from its paper, an option selects the literal formula.
"""

from collections.abc import Callable, Mapping
from dataclasses import is_dataclass, replace
from functools import partial, update_wrapper
from inspect import signature
from typing import Any

from glowplug.domain.errors import BadRequest
from glowplug.domain.reading import laid_over, nested

Policy = Callable[..., Any]
_BY_WORTH = frozenset({"mcache", "union"})  # caching, with constants


def base_name(name: str) -> str:
    return name.partition(":")[0]


def options_of(name: str) -> dict[str, Any]:
    """Return field -> text, nested. Raises ValueError for a part that is not field=value."""
    found: dict[tuple[str, ...], str] = {}
    for part in name.split(":")[1:]:
        field, equals, value = part.partition("=")
        if not (field and equals and value):
            raise ValueError(f"{part!r} is not field=value")
        found[tuple(field.split("."))] = value
    return nested(found)


def configured(kind: str, name: str, policy: Policy) -> Policy:
    """Apply the options behind `name`. Raises BadRequest naming kind and field."""
    try:
        options = options_of(name)
        if not options:
            return policy
        if kind == "caching" and base_name(name) in _BY_WORTH:
            return _of_a_cache(base_name(name), policy, options)
        if kind == "routing" and "params" in signature(policy).parameters:
            return _of_a_balancer(base_name(name), policy, options)
        return _function(policy, options)
    except ValueError as error:
        raise BadRequest(f"{kind} policy {base_name(name)!r}: {error}", param=f"policy_{kind}") from error


def _of_a_cache(base: str, policy: Policy, options: Mapping[str, Any]) -> Policy:
    from glowplug.policies.caching.mcache_importance import ImportanceParams, RateParams

    laid_over(ImportanceParams() if base == "mcache" else RateParams(), options)
    return lambda cache: policy(replace(cache, importance=laid_over(cache.importance, options)))


def _of_a_balancer(base: str, policy: Policy, options: Mapping[str, Any]) -> Policy:
    from glowplug.policies.routing.port import BalancerParams
    from glowplug.policies.routing.prefix import prefix
    from glowplug.policies.routing.preserve_load_aware import union_params

    if base == "union":
        laid_over(union_params(BalancerParams()), options)
        return lambda params: prefix(laid_over(union_params(params), options))
    laid_over(BalancerParams(), options)
    return lambda params: policy(laid_over(params, options))


def _function(policy: Policy, options: Mapping[str, Any]) -> Policy:
    given = signature(policy).parameters.get("params")
    if given is None or not is_dataclass(given.default):
        raise ValueError("it has no options")
    made = partial(policy, params=laid_over(given.default, options))
    return update_wrapper(made, policy)
