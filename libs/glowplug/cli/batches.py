"""`glowplug batches`: files of requests to be answered later, by the data port with the API key."""

import os
import secrets
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from glowplug.cli.client import FleetClient, Row, connect, segment
from glowplug.cli.options import JsonOption, StateDirOption
from glowplug.cli.terminal import WRONG_USAGE, CliError, age, emit, pairs, say, say_json

HEADERS: Final = ("batch", "status", "done", "failed", "endpoint", "created", "metadata")
OVER: Final = frozenset(("completed", "failed", "expired", "cancelled"))
POLL_S: Final = 0.5
BULK_TIMEOUT_S: Final = 600.0  # an upload is answered once the whole file is stored
PIECE_BYTES: Final = 1 << 20

batches = typer.Typer(
    no_args_is_help=True, rich_markup_mode=None, help="Have files of requests answered later, on idle capacity."
)
BatchArgument = Annotated[str, typer.Argument(metavar="BATCH", help="Id of a batch, see `glowplug batches list`.")]


@batches.command("create")
def create_batch(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", exists=True, dir_okay=False, help="One request as JSON on each line.")
    ],
    endpoint: Annotated[
        str, typer.Option("--endpoint", help="The path of the API that each line requests.")
    ] = "/v1/chat/completions",
    metadata: Annotated[
        list[str] | None,
        typer.Option("--metadata", "-m", metavar="KEY=VALUE", help="A note to keep with the batch; may be repeated."),
    ] = None,
    wait: Annotated[
        bool, typer.Option("--wait", help="Return once the batch is over; fail unless it completed.")
    ] = False,
    state_dir: StateDirOption = None,
    as_json: JsonOption = False,
) -> None:
    """Send a file and have its requests answered. Prints the id of the batch alone to stdout."""
    notes = dict(_note(text) for text in metadata or ())
    fleet = connect(state_dir)
    sent = _upload(fleet, file)
    asked: Row = {"input_file_id": sent["id"], "endpoint": endpoint, "completion_window": "24h"}
    row = fleet.call("POST", "data", "/v1/batches", json=asked | ({"metadata": notes} if notes else {}))
    while wait and row["status"] not in OVER:
        time.sleep(POLL_S)
        row = _batch(fleet, row["id"])
    if as_json:
        say_json(row)
    else:
        say(f"{file.name}: {_state(row)}", err=True)
        say(row["id"])
    if wait and row["status"] != "completed":
        raise CliError(f"batch {row['id']} is {row['status']}; `glowplug batches show {row['id']}` says why")


def _note(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not (key and equals):
        raise CliError(f"--metadata {text!r} is not KEY=VALUE", WRONG_USAGE)
    return key, value


def _upload(fleet: FleetClient, file: Path) -> Row:
    """Send a multipart form as OpenAI's API expects, the file last."""
    boundary = secrets.token_hex(16)
    name = "".join("_" if letter in '"\r\n\\' else letter for letter in file.name)
    part = f"--{boundary}\r\nContent-Disposition: form-data; name="
    head = f'{part}"purpose"\r\n\r\nbatch\r\n{part}"file"; filename="{name}"\r\n\r\n'.encode()
    tail = f"\r\n--{boundary}--\r\n".encode()

    def content() -> Iterator[bytes]:
        yield head
        yield from iter(lambda: opened.read(PIECE_BYTES), b"")
        yield tail

    try:
        with file.open("rb") as opened:
            length = len(head) + os.fstat(opened.fileno()).st_size + len(tail)
            headers = {"Content-Type": f"multipart/form-data; boundary={boundary}", "Content-Length": str(length)}
            bulk = replace(fleet, timeout_s=BULK_TIMEOUT_S)
            row: Row = bulk.call("POST", "data", "/v1/files", headers=fleet.data_headers() | headers, content=content())
            return row
    except OSError as error:
        raise CliError(f"{file} cannot be read: {error.strerror}") from error


@batches.command("list")
def list_batches(
    limit: Annotated[int, typer.Option("--limit", "-n", min=1, max=100)] = 20,
    state_dir: StateDirOption = None,
    as_json: JsonOption = False,
) -> None:
    """List the batches of the key's tenant, the newest first."""
    rows = connect(state_dir).rows("data", "/v1/batches", limit=limit)
    emit(as_json, rows, HEADERS, [batch_row(row) for row in rows], "there is no batch")


@batches.command("show")
def show_batch(batch: BatchArgument, state_dir: StateDirOption = None, as_json: JsonOption = False) -> None:
    """Show how far a batch is, its files, and which lines of its input are wrong."""
    row = _batch(connect(state_dir), batch)
    if as_json:
        say_json(row)
        return
    shown: dict[str, object] = dict(zip(HEADERS, batch_row(row), strict=True))
    shown |= {name: row[f"{name}_file_id"] or "-" for name in ("input", "output", "error")}
    say(pairs(shown, indent=""))
    for wrong in (row["errors"] or {"data": ()})["data"]:
        say(f"line {wrong['line']}: {wrong['message']} ({wrong['code']})" if wrong["line"] else wrong["message"])


@batches.command("cancel")
def cancel_batch(batch: BatchArgument, state_dir: StateDirOption = None, as_json: JsonOption = False) -> None:
    """Send no further requests of a batch; keep the answers received so far."""
    row = connect(state_dir).call("POST", "data", f"/v1/batches/{segment(batch)}/cancel")
    if as_json:
        say_json(row)
    else:
        say(_state(row))


@batches.command("output")
def batch_output(
    batch: BatchArgument,
    errors: Annotated[bool, typer.Option("--errors", help="The lines that failed, instead of the answers.")] = False,
    file: Annotated[Path | None, typer.Option("--output", "-o", metavar="FILE", help="Write to this file.")] = None,
    state_dir: StateDirOption = None,
) -> None:
    """Print the answers of a batch that is over, as JSON lines."""
    fleet = connect(state_dir)
    row = _batch(fleet, batch)
    kind, other = ("error", "") if errors else ("output", "; try --errors")
    file_id = row[f"{kind}_file_id"]
    if row["status"] not in OVER:
        raise CliError(f"{_state(row)}: its output is available once it is over")
    if file_id is None:
        raise CliError(f"{_state(row)}: it has no {kind} file{other if row['error_file_id'] else ''}")
    fleet = replace(fleet, timeout_s=BULK_TIMEOUT_S)
    path = f"/v1/files/{segment(file_id)}/content"
    if file is None and sys.stdout.isatty():
        say(fleet.get_text("data", path), nl=False)
    elif file is None:
        fleet.save("data", path, sys.stdout.buffer)
    else:
        _save(fleet, path, file)


def _save(fleet: FleetClient, path: str, file: Path) -> None:
    part = file.with_name(f"{file.name}.part")
    try:
        with part.open("wb") as opened:
            fleet.save("data", path, opened)
        part.replace(file)
    except OSError as error:
        raise CliError(f"{file} cannot be written: {error.strerror}") from error
    finally:
        part.unlink(missing_ok=True)


def batch_row(row: Row) -> tuple[object, ...]:
    counts: dict[str, Any] = row["request_counts"]
    notes = ", ".join(f"{key}={value}" for key, value in (row["metadata"] or {}).items())
    done, created = f"{counts['completed']} of {counts['total']}", f"{age(time.time() - row['created_at'])} ago"
    return row["id"], row["status"], done, counts["failed"], row["endpoint"], created, notes or "-"


def _batch(fleet: FleetClient, batch: str) -> Row:
    row: Row = fleet.get("data", f"/v1/batches/{segment(batch)}")
    return row


def _state(row: Row) -> str:
    counts = row["request_counts"]
    failed = f", {counts['failed']} failed" if counts["failed"] else ""
    return f"batch {row['id']} is {row['status']}, {counts['completed']} of {counts['total']} answered{failed}"
