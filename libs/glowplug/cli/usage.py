"""`glowplug usage`: usage by tenant, key and model, from the console's ledger."""

from enum import StrEnum
from typing import Annotated

import typer

from glowplug.cli.client import Row, connect
from glowplug.cli.options import JsonOption, StateDirOption
from glowplug.cli.terminal import emit, say

SUMS = {
    "num_requests": "requests",
    "num_failed": "failed",
    "prompt_tokens": "prompt",
    "cached_tokens": "cached",
    "response_tokens": "response",
}


class UsagePart(StrEnum):
    TENANT = "tenant"
    MODEL = "model"
    KEY = "key"
    HOUR = "hour"


def usage(
    by: Annotated[str, typer.Option("--by", help="Group by any of tenant, model, key and hour.")] = "tenant,model",
    since: Annotated[str, typer.Option("--since", help="Start: a duration ago (90m, 24h, 7d) or a date.")] = "7d",
    model: Annotated[str, typer.Option("--model", help="Only requests to this model.")] = "",
    tenant: Annotated[str, typer.Option("--tenant", help="Only requests of this tenant.")] = "",
    as_csv: Annotated[bool, typer.Option("--csv", help="Print CSV.")] = False,
    state_dir: StateDirOption = None,
    as_json: JsonOption = False,
) -> None:
    """Sum up requests, tokens, seconds of GPU memory and costs of whole hours (UTC). Cached tokens are a part of the
    prompt's. `gpu s` counts all memory of one GPU for a second as 1. A `~` marks
    sums with requests whose engine did not count their tokens."""
    names = [name.strip() for name in by.split(",") if name.strip()]
    if wrong := [name for name in names if name not in list(UsagePart)]:
        raise typer.BadParameter(f"{wrong[0]!r} is not one of {', '.join(UsagePart)}", param_hint="--by")
    fleet = connect(state_dir)
    asked = {"by": ",".join(names), "since": since, "models": model, "tenants": tenant}
    if as_csv:
        say(fleet.get_text("console", "/v1/usage", format="csv", **asked).replace("\r\n", "\n").rstrip("\n"))
        return
    page = fleet.get("console", "/v1/usage", **asked)
    rows = page["data"]
    has_cost = any(row["cost"] is not None for row in rows)
    headers = [*names, *SUMS.values(), "gpu s", *([f"cost ({page['currency']})"] if has_cost else [])]
    emit(as_json, page, headers, [_cells(row, names, has_cost) for row in rows], "no usage")


def _cells(row: Row, names: list[str], has_cost: bool) -> list[object]:
    is_exact = row["num_exact"] == row["num_requests"]
    counts = [f"{'' if is_exact or 'tokens' not in name else '~'}{row[name]}" for name in SUMS]
    cost = [] if not has_cost else ["-" if row["cost"] is None else f"{row['cost']:.4f}"]
    gpu_s = "-" if row.get("gpu_s") is None else f"{row['gpu_s']:.1f}"
    return [*(row[name] or "-" for name in names), *counts, gpu_s, *cost]
