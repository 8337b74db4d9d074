"""`glowplug tenants` and `glowplug keys`: who may use a fleet, and its limits.

The autoscaler owns both tables, behind the admin token. A new key is alone on stdout, so that KEY=$(glowplug keys
create ...) holds it; its rights go to stderr."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Annotated, Any, Final

import typer

from glowplug.cli import completion
from glowplug.cli.client import FleetClient, Row, connect, segment
from glowplug.cli.options import JsonOption, StateDirOption
from glowplug.cli.terminal import WRONG_USAGE, CliError, emit, pairs, say, say_json
from glowplug.domain.access import AccessLimits, Priority, Surface, digest_of, key_id_of, prefix_of
from glowplug.domain.phrasing import listed
from glowplug.runtime.new_key import new_key

TENANT_HEADERS: Final = ("tenant", "class", "weight", "limits", "keys", "declared in")
KEY_HEADERS: Final = ("key", "name", "tenant", "models", "opens", "class", "state", "expires")
LIMITS: Final = tuple(field.name for field in fields(AccessLimits))

tenants = typer.Typer(
    no_args_is_help=True, rich_markup_mode=None, help="Create, list and remove tenants: who may use the fleet."
)
keys = typer.Typer(
    no_args_is_help=True, rich_markup_mode=None, help="Create, change, list, revoke and rotate the keys of tenants."
)


def _limit(option: str, about: str) -> typer.models.OptionInfo:
    info: typer.models.OptionInfo = typer.Option(option, min=0, metavar="N", help=f"{about}; 0: no limit.")
    return info


TenantArgument = Annotated[
    str, typer.Argument(metavar="TENANT", help="Name of a tenant.", autocompletion=completion.tenants)
]
KeyArgument = Annotated[
    str, typer.Argument(metavar="KEY", help="Prefix or id of a key.", autocompletion=completion.key_ids)
]
TenantOption = Annotated[str, typer.Option("--tenant", help="Whose the key is.", autocompletion=completion.tenants)]
PriorityOption = Annotated[
    Priority | None, typer.Option("--priority", help="The most urgent class that its requests may have.")
]
RequestsOption = Annotated[int | None, _limit("--requests-per-minute", "Requests a minute")]
TokensOption = Annotated[int | None, _limit("--tokens-per-minute", "Tokens of prompts and answers a minute")]
DayOption = Annotated[int | None, _limit("--tokens-per-day", "Tokens a UTC day")]
MonthOption = Annotated[int | None, _limit("--tokens-per-month", "Tokens a UTC month")]
ConcurrentOption = Annotated[int | None, _limit("--concurrent", "Requests at once, held ones included")]
QueuedOption = Annotated[int | None, _limit("--queued", "Requests held at once")]


def _given(**limits: int | None) -> dict[str, int]:
    return {name: value for name, value in limits.items() if value is not None}


@tenants.command("put")
def put_tenant(
    name: TenantArgument,
    model: Annotated[
        str, typer.Option("--model", help="Set the limits for this model or pattern only, such as 'org/*'.")
    ] = "",
    requests_per_minute: RequestsOption = None,
    tokens_per_minute: TokensOption = None,
    tokens_per_day: DayOption = None,
    tokens_per_month: MonthOption = None,
    concurrent: ConcurrentOption = None,
    queued: QueuedOption = None,
    priority: PriorityOption = None,
    weight: Annotated[
        float | None, typer.Option("--weight", min=0.001, max=1000.0, help="Its share relative to others of its class.")
    ] = None,
    state_dir: StateDirOption = None,
    as_json: JsonOption = False,
) -> None:
    """Create or change a tenant. Anything that no option names stays."""
    limits = _given(
        requests_per_minute=requests_per_minute, tokens_per_minute=tokens_per_minute, tokens_per_day=tokens_per_day,
        tokens_per_month=tokens_per_month, concurrent=concurrent, queued=queued,
    )  # fmt: skip
    if model and not limits:
        raise CliError("--model needs a limit, such as --requests-per-minute 60", WRONG_USAGE)
    fleet = connect(state_dir)
    known = next((row for row in fleet.rows("autoscaler", "/v1/tenants") if row["name"] == name), {})
    body = _changed(known, model, limits)
    body |= {"priority": priority.value} if priority else {}
    body |= {} if weight is None else {"weight": weight}
    row = fleet.call("PUT", "autoscaler", f"/v1/tenants/{segment(name)}", json=body)
    emit(as_json, row, TENANT_HEADERS, [tenant_row(row)])


def _changed(known: Mapping[str, Any], model: str, limits: Mapping[str, int]) -> Row:
    """Return the body of PUT for a tenant like `known` ({}: none), with these limits, for one model if named."""
    body = {name: known[name] for name in ("limits", "model_limits", "priority", "weight") if name in known}
    if model:
        at_models = body.get("model_limits", {})
        body["model_limits"] = {**at_models, model: {**at_models.get(model, {}), **limits}}
    elif limits:
        body["limits"] = {**body.get("limits", {}), **limits}
    return body


@tenants.command("list")
def list_tenants(state_dir: StateDirOption = None, as_json: JsonOption = False) -> None:
    """List the tenants, their limits and how many keys each has."""
    rows = connect(state_dir).rows("autoscaler", "/v1/tenants")
    emit(as_json, rows, TENANT_HEADERS, [tenant_row(row) for row in rows], "there is no tenant")


@tenants.command("remove")
def remove_tenant(
    name: TenantArgument,
    with_keys: Annotated[bool, typer.Option("--with-keys", help="Revoke its keys too.")] = False,
    state_dir: StateDirOption = None,
    as_json: JsonOption = False,
) -> None:
    """Remove a tenant. One that has keys is only removed with them (--with-keys)."""
    path, params = f"/v1/tenants/{segment(name)}", {"with_keys": str(with_keys).lower()}
    answer = connect(state_dir).call("DELETE", "autoscaler", path, params=params)
    if as_json:
        say_json(answer)
    else:
        say(f"tenant {name} is removed" + (", and its keys are revoked" if with_keys else ""))


def tenant_row(row: Row) -> tuple[object, ...]:
    limits = [_limits_text(row["limits"])] if any(row["limits"].values()) else []
    limits += [f"{model}: {_limits_text(at_model)}" for model, at_model in row["model_limits"].items()]
    where = row["source"] or "REST"
    return row["name"], row["priority"], row["weight"], "; ".join(limits) or "-", row["num_keys"], where


def _limits_text(limits: Mapping[str, int]) -> str:
    return ", ".join(f"{limits[name]} {name.replace('_', ' ')}" for name in LIMITS if limits.get(name)) or "no limit"


@keys.command("create")
def create_key(
    tenant: TenantOption,
    name: Annotated[str, typer.Option("--name", help="Human-readable name of the key.")],
    models: Annotated[
        str,
        typer.Option(
            "--models", metavar="NAMES", help="Names, aliases or patterns of models, with commas: 'chat,org/*'."
        ),
    ] = "*",
    surfaces: Annotated[
        str,
        typer.Option(
            "--surfaces",
            metavar="NAMES",
            help="Surfaces it opens: data (requests to models), read, operate, admin; with commas.",
        ),
    ] = Surface.DATA.value,
    expires: Annotated[
        str, typer.Option("--expires", metavar="TIME", help="Lifetime of the key, such as 30d or 12h.")
    ] = "",
    priority: PriorityOption = None,
    requests_per_minute: RequestsOption = None,
    tokens_per_minute: TokensOption = None,
    tokens_per_day: DayOption = None,
    tokens_per_month: MonthOption = None,
    concurrent: ConcurrentOption = None,
    queued: QueuedOption = None,
    state_dir: StateDirOption = None,
    as_json: JsonOption = False,
) -> None:
    """Create a key and print it. The fleet keeps only a digest, so the key cannot be shown again."""
    limits = _given(
        requests_per_minute=requests_per_minute, tokens_per_minute=tokens_per_minute, tokens_per_day=tokens_per_day,
        tokens_per_month=tokens_per_month, concurrent=concurrent, queued=queued,
    )  # fmt: skip
    body: Row = {"tenant": tenant, "name": name, "models": _split(models, "--models")}
    body["surfaces"] = [_surface(word) for word in _split(surfaces, "--surfaces")]
    body |= {"limits": limits} if limits else {}
    body |= {"priority": priority.value} if priority else {}
    body |= {"expires": expires} if expires else {}
    row = connect(state_dir).call("POST", "autoscaler", "/v1/keys", json=body)
    _show_new(row, as_json, f"{row['prefix']} is a key of tenant {row['tenant']}: {_opens(row)}")


def _split(text: str, option: str) -> list[str]:
    """Raises CliError if there are none."""
    words = [word.strip() for word in text.split(",") if word.strip()]
    if not words:
        raise CliError(f"{option} is empty", WRONG_USAGE)
    return words


def _surface(word: str) -> str:
    if word not in tuple(Surface):
        raise CliError(f"--surfaces {word!r} is not one of {', '.join(Surface)}", WRONG_USAGE)
    return word


def _opens(row: Row) -> str:
    until = f", until {_day(row['expires_at'])}" if row["expires_at"] else ""
    return f"{listed(row['surfaces'])} at {listed(row['models'])}{until}"


def _show_new(row: Row, as_json: bool, note: str) -> None:
    if as_json:
        say_json(row)
        return
    say(note, err=True)
    say("the key is shown only once", err=True)
    say(row["key"])


@keys.command("set")
def set_key(
    key: KeyArgument,
    name: Annotated[str, typer.Option("--name", help="Human-readable name of the key.")] = "",
    models: Annotated[
        str, typer.Option("--models", metavar="NAMES", help="Names, aliases or patterns of models, with commas.")
    ] = "",
    expires: Annotated[
        str, typer.Option("--expires", metavar="TIME", help="Lifetime of the key from now, such as 30d; 0: unlimited.")
    ] = "",
    priority: PriorityOption = None,
    requests_per_minute: RequestsOption = None,
    tokens_per_minute: TokensOption = None,
    tokens_per_day: DayOption = None,
    tokens_per_month: MonthOption = None,
    concurrent: ConcurrentOption = None,
    queued: QueuedOption = None,
    state_dir: StateDirOption = None,
    as_json: JsonOption = False,
) -> None:
    """Change the rights or the end of a key. Anything that no option names stays."""
    limits = _given(
        requests_per_minute=requests_per_minute, tokens_per_minute=tokens_per_minute, tokens_per_day=tokens_per_day,
        tokens_per_month=tokens_per_month, concurrent=concurrent, queued=queued,
    )  # fmt: skip
    body: Row = {"name": name} if name else {}
    body |= {"models": _split(models, "--models")} if models else {}
    body |= {"priority": priority.value} if priority else {}
    body |= {"expires": expires} if expires else {}
    if not (body or limits):
        raise CliError("nothing to change: give an option, such as --expires 30d", WRONG_USAGE)
    fleet = connect(state_dir)
    if limits:
        body["limits"] = {**_key(fleet, "GET", key)["limits"], **limits}
    row = _key(fleet, "PATCH", key, json=body)
    emit(as_json, row, KEY_HEADERS, [key_row(row)])


@keys.command("list")
def list_keys(
    tenant: Annotated[
        str, typer.Option("--tenant", help="Only keys of this tenant.", autocompletion=completion.tenants)
    ] = "",
    state_dir: StateDirOption = None,
    as_json: JsonOption = False,
) -> None:
    """List the keys by their prefixes, revoked and expired ones too."""
    found = connect(state_dir).rows("autoscaler", "/v1/keys")
    rows = [row for row in found if tenant in ("", row["tenant"])]
    emit(as_json, rows, KEY_HEADERS, [key_row(row) for row in rows], "there is no key")


@keys.command("show")
def show_key(key: KeyArgument, state_dir: StateDirOption = None, as_json: JsonOption = False) -> None:
    """Show the models, the limits and the end of one key."""
    row = _key(connect(state_dir), "GET", key)
    if as_json:
        say_json(row)
        return
    shown = dict(zip(KEY_HEADERS, key_row(row), strict=True))
    shown |= {"limits": _limits_text(row["limits"]), "created": _day(row["created_at"])}
    shown |= {"revoked": _day(row["revoked_at"]), "declared in": row["source"] or "REST"}
    say(pairs(shown, indent=""))


@keys.command("revoke")
def revoke_key(key: KeyArgument, state_dir: StateDirOption = None, as_json: JsonOption = False) -> None:
    """End a key on every router at once, for good."""
    row = _key(connect(state_dir), "DELETE", key)
    if as_json:
        say_json(row)
    else:
        say(f"{row['prefix']} ({row['name']} of tenant {row['tenant']}) is {row['state']}")


@keys.command("rotate")
def rotate_key(
    key: KeyArgument,
    overlap: Annotated[
        str, typer.Option("--overlap", metavar="TIME", help="How long the old key keeps working, such as 1d or 10m.")
    ] = "1d",
    state_dir: StateDirOption = None,
    as_json: JsonOption = False,
) -> None:
    """Create a key with the rights of an old one, and print it; the old key ends after the overlap."""
    row = _key(connect(state_dir), "POST", key, "/rotate", json={"overlap": overlap})
    _show_new(row, as_json, f"{row['prefix']} replaces {prefix_of(id_of(key))}, which ends in {overlap}")


@keys.command("hash")
def hash_key(as_json: JsonOption = False) -> None:
    """Make a key on this machine, with the id and the SHA-256 that a file of tenants states. No fleet is asked."""
    key_id, key = new_key()
    made = {"id": key_id, "sha256": digest_of(key), "key": key}
    if as_json:
        say_json(made)
    else:
        say(pairs(made, indent=""))


def key_row(row: Row) -> tuple[object, ...]:
    opened: Sequence[Sequence[str]] = (row["models"], row["surfaces"])
    models, surfaces = (", ".join(names) for names in opened)
    priority, ends = row["priority"] or "of its tenant", _day(row["expires_at"])
    return row["prefix"], row["name"], row["tenant"], models, surfaces, priority, row["state"], ends


def _key(fleet: FleetClient, method: str, key: str, path: str = "", **given: Any) -> Row:
    """Raises CliError."""
    row: Row = fleet.call(method, "autoscaler", f"/v1/keys/{segment(id_of(key))}{path}", **given)
    return row


def id_of(key: str) -> str:
    """Accept a prefix or a whole key, whose secret is never sent."""
    return key_id_of(key) or key.removeprefix("gp-")


def _day(at: float) -> str:
    try:
        return time.strftime("%Y-%m-%d", time.gmtime(at)) if at else "-"
    except (ValueError, OverflowError, OSError):
        return "-"
