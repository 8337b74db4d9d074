"""`glowplug pull`: bring weights to their engines, with progress.

With a fleet: into a node's host memory, by its prefetcher. Without: weights of the Hugging Face hub into its cache
here."""

import asyncio
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from glowplug.cli.client import FleetClient, Row, connect, segment
from glowplug.cli.options import JsonOption, StateDirOption
from glowplug.cli.sources import measure, source_options
from glowplug.cli.terminal import CliError, NoFleet, emit, in_line, say
from glowplug.domain.errors import GlowplugError, InvalidModelFile, WeightsUnavailable
from glowplug.domain.model import WeightsRef
from glowplug.domain.units import show_bytes
from glowplug.runtime import model_files
from glowplug.weights.files import NoAnswer
from glowplug.weights.source import SourceInterrupted, is_read, local_path, redacted, scheme_of
from glowplug.weights.sources.hub import HubSnapshot, HubSource
from glowplug.weights.split_gguf import NotJoinable, part_names

TENSORS = (".safetensors", ".gguf")


def fill_cache(source: HubSource, snapshot: HubSnapshot, report: Callable[[int], None]) -> Path:
    """Download the missing files of `snapshot` and return its folder; `report` gets bytes as they arrive. Blocks.

    An interrupted download keeps its files; tensors come last, since a snapshot without them is not taken for whole.
    Raises WeightsUnavailable and SourceInterrupted."""
    hub: Any = import_module("huggingface_hub")
    folder = source.folder(snapshot.commit)
    for file in sorted(snapshot.files, key=lambda file: (file.name.lower().endswith(TENSORS), file.name)):
        if file.cached is not None:
            continue
        try:
            came = hub.hf_hub_download(
                source.address.repo,
                file.name,
                revision=source.address.revision,  # by name, so that the cache maps it to its commit
                cache_dir=source.cache_dir,
                endpoint=source.endpoint,
                token=source.token() or False,
                tqdm_class=_bar(report),
            )
        except (hub.errors.HTTPError, OSError, ValueError) as error:
            raise source.translated(error) from error
        if Path(came) != folder / file.name:
            raise WeightsUnavailable(f"{source.address.uri}: it changed during the download; pull it again")
    return folder


def _bar(report: Callable[[int], None]) -> type[Any]:
    class Bar:
        def __init__(self, *_: Any, initial: float = 0, **__: Any) -> None:
            self.update(initial)

        def update(self, num_bytes: float | None = 1) -> None:
            report(int(num_bytes or 0))

        def __enter__(self) -> "Bar":
            return self

        def __exit__(self, *_: object) -> None:
            """Nothing to close."""

        def close(self) -> None:
            """Nothing to close."""

        def update_transfer(self, num_bytes: float | None = 1) -> None:
            """Ignore network bytes: bytes of the file count."""

        def set_postfix_str(self, *_: Any, **__: Any) -> None:
            """Ignore: the rate is shown elsewhere."""

        set_transfer_postfix_str = set_postfix_str

    return Bar


POLL_S = 0.2
LOST_S = 5.0
INTERRUPTED = 130
HEADERS = ("weights", "where", "bytes", "seconds", "from")
ASKED_HEADERS = ("weights", "where", "stage")
STEP = 10
Show = Callable[[int, int], None]


@dataclass(frozen=True)
class PullTarget:
    """`model_key` and `engine` are "" for an address."""

    weights: WeightsRef
    model_key: str = ""
    engine: str = ""

    @property
    def shown(self) -> str:
        return in_line(redacted(self.weights.uri))


def pull(
    source: Annotated[
        str,
        typer.Argument(metavar="MODEL|FILE|ADDRESS", help="A deployed model, a model file, or an address of weights."),
    ],
    node: Annotated[
        list[str] | None,
        typer.Option("--node", metavar="NODE", help="Onto this node; repeat it for several. Without it one is chosen."),
    ] = None,
    wait: Annotated[
        bool, typer.Option("--wait/--no-wait", help="Wait until the weights have arrived, or return at once.")
    ] = True,
    state_dir: StateDirOption = None,
    as_json: JsonOption = False,
) -> None:
    """Fetch weights to where engines read them: the host memory of a node or, without a fleet, the cache of the
    Hugging Face hub on this machine."""
    try:
        fleet = connect(state_dir)
    except NoFleet as error:
        if node or not wait:
            raise
        rows = [_without_fleet(wanted, as_json, error) for wanted in _wanted(source, None, error)]
    else:
        rows = [
            _onto(fleet, row, wanted, as_json) if wait else _asked_of(fleet, row, wanted)
            for wanted in _wanted(source, fleet, None)
            for row in _nodes(fleet.nodes(), wanted, node or ())
        ]
    if not wait:
        emit(as_json, rows, ASKED_HEADERS, [(r["weights"], r["where"], r["stage"]) for r in rows])
        return
    cells = [(r["weights"], r["where"], show_bytes(r["num_bytes"]), f"{r['seconds']:.1f}", r["source"]) for r in rows]
    emit(as_json, rows, HEADERS, cells)


def _wanted(source: str, fleet: FleetClient | None, none: NoFleet | None) -> list[PullTarget]:
    path = Path(source).expanduser()
    try:
        if path.suffix in (".yaml", ".yml") and path.is_file():
            found = model_files.load(path, measure)
            return [PullTarget(m.weights, m.key, m.engine) for m in found if m.weights.uri]
        scheme = scheme_of(source)
        if scheme == "sample" or is_read(scheme) or path.is_file() or ("/" in source and path.exists()):
            return [PullTarget(model_files.weights_at(source, Path.cwd()))]
    except InvalidModelFile as error:
        raise CliError(f"{source}: {error.message}") from error
    except OSError as error:
        raise CliError(f"{source}: {error.strerror}") from error
    if fleet is None:
        assert none is not None
        raise CliError(f"{source} is neither a file nor an address, and {none}", none.exit_code)
    model = fleet.get("autoscaler", f"/v1/models/{segment(source)}")
    weights = msgspec.convert(model["weights"], WeightsRef)
    if not weights.uri:
        raise CliError(f"{model['name']} has no weights: engine {model['engine']} needs none")
    return [PullTarget(weights, model["key"], model["engine"])]


def _nodes(rows: Sequence[Row], wanted: PullTarget, named: Sequence[str]) -> list[Row]:
    by_id = {row["node_id"]: row for row in rows}
    if unknown := [name for name in named if name not in by_id]:
        raise CliError(f"there is no node {unknown[0]!r}; there are: {', '.join(sorted(by_id)) or 'none'}")
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


def _ask(fleet: FleetClient, node: Row, wanted: PullTarget) -> tuple[FleetClient, str, Row]:
    service = f"prefetcher of {node['node_id']}"
    at = fleet.also(service, node["prefetcher_url"])
    body = {"weights": msgspec.to_builtins(wanted.weights), "model_key": wanted.model_key}
    return at, service, at.call("POST", service, "/v1/fetches", json=body)


def _asked_of(fleet: FleetClient, node: Row, wanted: PullTarget) -> Row:
    _, _, row = _ask(fleet, node, wanted)
    if row["stage"] == "failed":
        raise CliError(f"{row['message']} ({row['code']})")
    where = {"weights": redacted(wanted.weights.uri), "where": node["node_id"]}
    return where | {name: row[name] for name in ("digest", "stage", "num_bytes")}


def _onto(fleet: FleetClient, node: Row, wanted: PullTarget, as_json: bool) -> Row:
    """Wait until the weights are there. Raises CliError."""
    node_id = node["node_id"]
    started = time.monotonic()
    at, service, row = _ask(fleet, node, wanted)
    was_there = row["stage"] == "complete"
    try:
        with bar(f"{wanted.shown} to {node_id}", as_json) as show:
            row = _follow(lambda: at.get(service, f"/v1/fetches/{row['digest']}"), show)
    except KeyboardInterrupt as error:
        again = f"{node_id} continues fetching; run `glowplug pull` again to watch it"
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
    """Raises CliError with the reason of a fetch that failed or was given up."""
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
            raise CliError("the prefetcher no longer fetches these weights: they were dropped, or it was restarted")
        sleep(POLL_S)


def _without_fleet(wanted: PullTarget, as_json: bool, none: NoFleet) -> Row:
    """Raises CliError for weights from elsewhere than the hub."""
    uri = wanted.weights.uri
    if local_path(uri) is not None:
        raise CliError(f"{wanted.shown} is on this machine already, and {none}", none.exit_code)
    try:
        if scheme_of(uri) == "hf":
            options = source_options()
            rows = [_into_hub_cache(HubSource(part, options), as_json) for part in part_names(uri) or (uri,)]
            return rows[0] | _together(rows)
        info = measure(uri)
    except NotJoinable as error:
        raise CliError(f"{wanted.shown}: {error}") from error
    except (GlowplugError, SourceInterrupted) as error:
        raise CliError(getattr(error, "message", str(error))) from error
    except NoAnswer as error:
        raise CliError(f"{error.strerror}") from error
    size = show_bytes(info.num_bytes) if info.num_bytes else "an unknown number of bytes"
    raise CliError(f"{wanted.shown} ({size}) can only be kept by a node of a fleet, and {none}", none.exit_code)


def _together(rows: Sequence[Row]) -> Row:
    totals = {field: sum(row[field] for row in rows) for field in ("num_bytes", "seconds")}
    return totals | {"source": "cache" if all(row["source"] == "cache" for row in rows) else "hf"}


def _into_hub_cache(source: HubSource, as_json: bool) -> Row:
    uri = source.address.uri
    started = time.monotonic()
    snapshot = asyncio.run(_resolved(source))
    here = sum(file.num_bytes for file in snapshot.files if file.cached is not None)
    try:
        with bar(f"{in_line(uri)} to {source.cache_dir}", as_json) as show:
            came = [here]

            def report(num_bytes: int) -> None:
                came[0] += num_bytes
                show(came[0], snapshot.num_bytes)

            report(0)
            folder = fill_cache(source, snapshot, report)
    except KeyboardInterrupt as error:
        raise CliError(f"{in_line(uri)}: stopped; the next pull continues from here", INTERRUPTED) from error
    except SourceInterrupted as error:
        raise WeightsUnavailable(f"{error}; the next pull continues from here") from error
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
def bar(title: str, as_json: bool) -> Iterator[Show]:
    """Show a bar on a terminal's stderr, else a line for each STEP percent. Silent for JSON."""
    if as_json:
        yield lambda done, total: None
        return
    if not sys.stderr.isatty():
        reached = -1

        def line(done: int, total: int) -> None:
            nonlocal reached
            percent = 100 * done // total // STEP * STEP if total else reached
            if percent > reached:
                reached = percent
                say(f"{title}: {percent} % of {show_bytes(total)}", err=True)

        yield line
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

    say(title, err=True)
    columns = (BarColumn(), DownloadColumn(binary_units=True), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("", total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total or None)
