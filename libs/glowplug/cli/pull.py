"""`glowplug pull`: bring weights to where engines read them, and show how far they are.

With a fleet that is the host memory of a node, filled by its prefetcher; without one it is the cache of the Hugging
Face hub on this machine, for weights that come from there."""

import asyncio
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from glowplug.cli.client import FleetClient, Row, connect, segment
from glowplug.cli.options import DEFAULT_STATE_DIR, Format, OutputOption, StateDirOption
from glowplug.cli.sources import measure, source_options
from glowplug.cli.terminal import CliError, NoFleet, emit, in_line, say
from glowplug.domain.errors import GlowplugError, InvalidModelFile, WeightsUnavailable
from glowplug.domain.model import WeightsRef
from glowplug.domain.units import show_bytes
from glowplug.runtime import model_files
from glowplug.weights.files import NoAnswer
from glowplug.weights.hub_cache import fill_cache
from glowplug.weights.source import SCHEMES, SourceInterrupted, local_path, redacted, scheme_of
from glowplug.weights.sources.hub import HubSource

POLL_S = 0.2
LOST_S = 5.0  # a fetch that is neither there nor ended for so long has been given up
INTERRUPTED = 130
HEADERS = ("weights", "where", "bytes", "seconds", "from")
Show = Callable[[int, int], None]  # bytes that are there, bytes of all (0: not known)


@dataclass(frozen=True)
class Wanted:
    """Weights to bring. `model_key` and `engine` are "" for those of an address."""

    weights: WeightsRef
    model_key: str = ""
    engine: str = ""

    @property
    def shown(self) -> str:
        return in_line(redacted(self.weights.uri))


def pull(
    what: Annotated[
        str,
        typer.Argument(metavar="MODEL|FILE|ADDRESS", help="A deployed model, a model file, or an address of weights."),
    ],
    node: Annotated[
        list[str] | None,
        typer.Option("--node", metavar="NODE", help="Onto this node; repeat it. One is chosen without."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="The same as --output json.")] = False,
    state_dir: StateDirOption = DEFAULT_STATE_DIR,
    output: OutputOption = Format.TABLE,
) -> None:
    """Bring weights to where engines read them: a node's host memory; without a fleet the local cache of the hub."""
    output = Format.JSON if as_json else output
    try:
        fleet = connect(state_dir)
    except NoFleet as error:
        if node:
            raise
        rows = [_without_fleet(wanted, output, error) for wanted in _wanted(what, None, error)]
    else:
        rows = [
            _onto(fleet, row, wanted, output)
            for wanted in _wanted(what, fleet, None)
            for row in _nodes(fleet.nodes(), wanted, node or ())
        ]
    cells = [(r["weights"], r["where"], show_bytes(r["num_bytes"]), f"{r['seconds']:.1f}", r["source"]) for r in rows]
    emit(output, rows, HEADERS, cells)


def _wanted(what: str, fleet: FleetClient | None, none: NoFleet | None) -> list[Wanted]:
    """What the argument names: an address, a file of models, an existing path of weights, or a deployed model."""
    path = Path(what).expanduser()
    try:
        if path.suffix in (".yaml", ".yml") and path.is_file():
            found = model_files.load(path, measure)
            return [Wanted(m.weights, m.key, m.engine) for m in found if m.weights.uri]
        if scheme_of(what) in (*SCHEMES, "sample") or path.is_file() or ("/" in what and path.exists()):
            return [Wanted(model_files.weights_at(what, Path.cwd()))]
    except InvalidModelFile as error:
        raise CliError(f"{what}: {error.message}") from error
    except OSError as error:
        raise CliError(f"{what}: {error.strerror}") from error
    if fleet is None:
        assert none is not None
        raise CliError(f"{what} is no file and no address, and {none}", none.exit_code)
    model = fleet.get("autoscaler", f"/v1/models/{segment(what)}")
    weights = msgspec.convert(model["weights"], WeightsRef)
    if not weights.uri:
        raise CliError(f"{model['name']} has no weights: engine {model['engine']} needs none")
    return [Wanted(weights, model["key"], model["engine"])]


# onto a node of a fleet


def _nodes(rows: Sequence[Row], wanted: Wanted, named: Sequence[str]) -> list[Row]:
    """The nodes that are named; else the one that has most reason to get them. Raises CliError."""
    by_id = {row["node_id"]: row for row in rows}
    if unknown := [name for name in named if name not in by_id]:
        raise CliError(f"no node {unknown[0]}; there are: {', '.join(sorted(by_id)) or 'none'}")
    if named:
        return [by_id[name] for name in dict.fromkeys(named)]
    able = [row for row in rows if not wanted.engine or wanted.engine in row["engines"]]
    if not able:
        raise CliError(f"no node can start {wanted.engine}" if rows else "no node has joined")
    digest = wanted.weights.digest

    def rank(row: Row) -> tuple[bool, bool, str]:
        has_it = any(cached["digest"] == digest for cached in row["cached"])
        return row["draining"], not has_it, row["node_id"]

    return [min(able, key=rank)]


def _onto(fleet: FleetClient, node: Row, wanted: Wanted, output: Format) -> Row:
    """Asks the prefetcher of one node, and waits until the weights are there. Raises CliError."""
    node_id = node["node_id"]
    service = f"prefetcher of {node_id}"
    at = fleet.also(service, node["prefetcher_url"])
    started = time.monotonic()
    body = {"weights": msgspec.to_builtins(wanted.weights), "model_key": wanted.model_key}
    row = at.call("POST", service, "/v1/fetches", json=body)
    was_there = row["stage"] == "complete"
    try:
        with bar(f"{wanted.shown} to {node_id}", output) as show:
            row = _follow(lambda: at.get(service, f"/v1/fetches/{row['digest']}"), show)
    except KeyboardInterrupt as error:
        again = f"it goes on at {node_id}; `glowplug pull` shows it again"
        raise CliError(f"{wanted.shown}: {again}", INTERRUPTED) from error
    return {
        "weights": redacted(wanted.weights.uri),
        "where": node_id,
        "digest": row["digest"],
        "num_bytes": row["num_bytes"],
        "seconds": time.monotonic() - started,
        "source": "cache" if was_there else row["source"],
    }


def _follow(
    ask: Callable[[], Row], show: Show, sleep: Callable[[float], None] = time.sleep, lost_s: float = LOST_S
) -> Row:
    """Polls until the weights are complete. Raises CliError with the reason of a fetch that failed or is given up."""
    num_lost = 0
    while True:
        row = ask()
        stage = row["stage"]
        show(row["num_bytes_done"], row["num_bytes"])
        if stage == "complete":
            return row
        if stage == "failed":
            raise CliError(f"{row['message']} ({row['code']})")
        num_lost = num_lost + 1 if stage in ("absent", "fetching") else 0
        if num_lost * POLL_S > lost_s:
            raise CliError("the fetch was given up: somebody dropped it, or the prefetcher was started anew")
        sleep(POLL_S)


# without a fleet


def _without_fleet(wanted: Wanted, output: Format, none: NoFleet) -> Row:
    """The hub's cache for what comes from the hub; what else there is to say of others. Raises CliError."""
    uri = wanted.weights.uri
    if local_path(uri) is not None:
        raise CliError(f"{wanted.shown} is on this machine already, and {none}", none.exit_code)
    try:
        if scheme_of(uri) == "hf":
            return _into_hub_cache(HubSource(uri, source_options()), output)
        info = measure(uri)
    except (GlowplugError, SourceInterrupted) as error:
        raise CliError(getattr(error, "message", str(error))) from error
    except NoAnswer as error:
        raise CliError(f"{error.strerror}") from error
    size = show_bytes(info.num_bytes) if info.num_bytes else "an unknown number of bytes"
    raise CliError(f"{wanted.shown} is {size}; this machine has no cache for it, and {none}", none.exit_code)


def _into_hub_cache(source: HubSource, output: Format) -> Row:
    uri = source.address.uri
    started = time.monotonic()
    snapshot = asyncio.run(_resolved(source))
    here = sum(file.num_bytes for file in snapshot.files if file.cached is not None)
    try:
        with bar(f"{in_line(uri)} to {source.cache_dir}", output) as show:
            came = [here]

            def report(num_bytes: int) -> None:
                came[0] += num_bytes
                show(came[0], snapshot.num_bytes)

            report(0)
            folder = fill_cache(source, snapshot, report)
    except KeyboardInterrupt as error:
        raise CliError(f"{in_line(uri)}: stopped; what has come is kept for the next time", INTERRUPTED) from error
    except SourceInterrupted as error:
        raise WeightsUnavailable(f"{error}; what has come is kept for the next time") from error
    return {
        "weights": uri,
        "where": str(folder),
        "digest": WeightsRef(uri=uri).digest,
        "num_bytes": snapshot.num_bytes,
        "seconds": time.monotonic() - started,
        "source": "cache" if snapshot.is_cached else "hf",
    }


async def _resolved(source: HubSource) -> Any:
    try:
        return await source.resolve()
    finally:
        await source.close()


@contextmanager
def bar(title: str, output: Format) -> Iterator[Show]:
    """A bar of bytes on stderr where that is a terminal; else one line when the size is known. Silent for JSON."""
    if output is Format.JSON:
        yield lambda done, total: None
        return
    if not sys.stderr.isatty():
        said: list[int] = []

        def once(_: int, total: int) -> None:
            if total and not said:
                said.append(total)
                say(f"{title}: {show_bytes(total)}", err=True)

        yield once
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

    say(title, err=True)
    columns = (BarColumn(), DownloadColumn(binary_units=True), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("", total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total or None)
