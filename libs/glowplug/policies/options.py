"""Options of a policy, written behind its name: `name:field=value:field=value`.

Options are fields of the policy's params, dotted where nested: `hydraserve:allocation.overlap=false`. Where a policy
departs from its paper, an option selects the literal formula. A number must be above 0 if its default is, else at least
0; `worth.FROM_ZERO` metadata also allow 0.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass, replace
from functools import partial, update_wrapper
from inspect import signature
from typing import Any, Literal, get_args, get_origin, get_type_hints

from glowplug.domain.errors import BadRequest
from glowplug.policies.worth import FROM_ZERO

Policy = Callable[..., Any]
_BY_WORTH = frozenset({"mcache", "union"})  # caching, with constants


def base_name(name: str) -> str:
    return name.partition(":")[0]


def options_of(name: str) -> dict[str, str]:
    """Return field -> text. Raises ValueError for a part that is not field=value."""
    found: dict[str, str] = {}
    for part in name.split(":")[1:]:
        field, equals, value = part.partition("=")
        if not (field and equals and value):
            raise ValueError(f"{part!r} is not field=value")
        found[field] = value
    return found


def configured(kind: str, name: str, policy: Policy) -> Policy:
    """Apply the options behind `name`. Raises BadRequest naming the kind and the field."""
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


def _of_a_cache(base: str, policy: Policy, options: Mapping[str, str]) -> Policy:
    """Raises ValueError for a wrong option now, not at the first call."""
    from glowplug.policies.caching.mcache_importance import ImportanceParams, RateParams

    laid_over(ImportanceParams() if base == "mcache" else RateParams(), options)
    return lambda cache: policy(replace(cache, importance=laid_over(cache.importance, options)))


def _of_a_balancer(base: str, policy: Policy, options: Mapping[str, str]) -> Policy:
    from glowplug.policies.routing.port import BalancerParams
    from glowplug.policies.routing.prefix import prefix
    from glowplug.policies.routing.preserve_load_aware import union_params

    if base == "union":  # over its own changes of the params
        laid_over(union_params(BalancerParams()), options)
        return lambda params: prefix(laid_over(union_params(params), options))
    laid_over(BalancerParams(), options)
    return lambda params: policy(laid_over(params, options))


def laid_over(params: Any, options: Mapping[str, str], beneath: str = "") -> Any:
    """Replace fields of the dataclass `params`. Raises ValueError naming the field, behind the path `beneath`."""
    inner: dict[str, dict[str, str]] = {}
    changes: dict[str, Any] = {}
    hints = get_type_hints(type(params))
    known = {field.name: field for field in fields(params) if field.init}
    for path, text in options.items():
        name, _, rest = path.partition(".")
        if name not in known or bool(rest) != is_dataclass(getattr(params, name)):
            raise ValueError(f"there is no option {beneath + path!r} (there are: {', '.join(sorted(known))})")
        if rest:
            inner.setdefault(name, {})[rest] = text
        else:
            from_zero = known[name].metadata == FROM_ZERO
            changes[name] = _value(beneath + path, text, getattr(params, name), hints[name], from_zero)
    for name, some in inner.items():
        changes[name] = laid_over(getattr(params, name), some, f"{beneath}{name}.")
    return replace(params, **changes)


def _value(path: str, text: str, default: Any, hint: Any, from_zero: bool) -> Any:
    if get_origin(hint) is Literal:
        if text not in get_args(hint):
            raise ValueError(f"{path} is one of {', '.join(map(str, get_args(hint)))}, not {text!r}")
        return text
    if isinstance(default, bool):
        if text not in ("true", "false"):
            raise ValueError(f"{path} is true or false, not {text!r}")
        return text == "true"
    if not isinstance(default, int | float):
        raise ValueError(f"{path} cannot be set by an option")
    try:
        number = type(default)(text)
    except ValueError:
        raise ValueError(f"{path} is a number, not {text!r}") from None
    above = default > 0 and not from_zero
    if not math.isfinite(number) or number < 0 or (above and number == 0):
        raise ValueError(f"{path} is {'above 0' if above else 'from 0 up'}, not {text}")
    return number


def _function(policy: Policy, options: Mapping[str, str]) -> Policy:
    given = signature(policy).parameters.get("params")
    if given is None or not is_dataclass(given.default):
        raise ValueError("it has no options")
    made = partial(policy, params=laid_over(given.default, options))
    return update_wrapper(made, policy)  # keeps name and docstring
