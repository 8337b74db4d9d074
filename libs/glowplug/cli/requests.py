"""`glowplug requests`: requests of all routers, from the console."""

from enum import StrEnum
from typing import Annotated

import typer

from glowplug.cli.client import Row, connect
from glowplug.cli.options import JsonOption, StateDirOption
from glowplug.cli.terminal import clock, emit, say, seconds
from glowplug.domain.access import prefix_of

HEADERS = (
    "arrived",
    "request",
    "tenant",
    "key",
    "model",
    "state",
    "result",
    "queue",
    "first token",
    "total",
    "tokens",
    "instance",
)
WORDS = {"dispatched": "sent", "left": "client left"}
CLIENT_LEFT = 499


class RequestKind(StrEnum):
    LIVE = "live"
    ENDED = "ended"
    HELD = "held"
    DISPATCHED = "dispatched"
    STREAMING = "streaming"
    FINISHED = "finished"
    FAILED = "failed"
    REFUSED = "refused"
    LEFT = "left"


def requests(
    model: Annotated[str, typer.Option("--model", help="Only requests for this model.")] = "",
    state: Annotated[
        RequestKind | None, typer.Option("--state", help="Only requests in this state; live: all that have not ended.")
    ] = None,
    text: Annotated[
        str,
        typer.Option(
            "--text", "-q", help="Only requests with this text in their id, tenant, key, code, status or instance."
        ),
    ] = "",
    limit: Annotated[int, typer.Option("--limit", "-n", min=1, max=1000)] = 20,
    state_dir: StateDirOption = None,
    as_json: JsonOption = False,
) -> None:
    """List the requests that are held or running, then those that ended or were refused, newest first. Prompts are not
    kept."""
    fleet = connect(state_dir)
    key = fleet.key_of(model) if model else ""
    page = fleet.get("console", "/api/v1/requests", model=key, state=state.value if state else "", q=text, limit=limit)
    rows = page["requests"]
    emit(as_json, page, HEADERS, [request_row(row, page["now"]) for row in rows], "no request")
    if not as_json and page["num_matching"] > len(rows):
        say(f"\n{page['num_matching'] - len(rows)} more match: --limit {page['num_matching']} shows them", err=True)


def request_row(row: Row, now: float) -> tuple[object, ...]:
    """`now`: the console's epoch seconds."""
    is_live = not row["status"]
    waited_s = max(0.0, now - row["arrived_at"])
    tokens = f"{'' if row['tokens_exact'] else '~'}{row['response_tokens']}" if row["response_tokens"] else "-"
    return (
        clock(row["arrived_at"]),
        row["request_id"],
        row.get("tenant") or "-",
        prefix_of(row["key_id"]) if row.get("key_id") else "-",
        row["model_key"] or "-",
        WORDS.get(row["state"], row["state"]),
        _result(row),
        seconds(waited_s if row["state"] == "held" else row["queue_s"] or None),
        seconds(row["ttft_s"] or None),
        seconds(waited_s if is_live else row["e2e_s"] or None),
        tokens,
        row["instance_id"] or "-",
    )


def _result(row: Row) -> str:
    if row["state"] == "held":
        return f"number {row['position']} in the queue" + (f", about {row['eta_s']:.1f} s" if row["eta_s"] else "")
    if not row["status"]:
        return "-"
    parts = [str(row["status"]), row["code"] if row["status"] != CLIENT_LEFT else ""]
    if row["num_unlisted"]:
        parts.append(f"(and {row['num_unlisted']} refused before it)")
    return " ".join(filter(None, parts))
