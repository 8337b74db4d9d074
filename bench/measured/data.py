"""The results of a benchmark as a file of data (`--json FILE`) and as a table."""

import argparse
import json
from collections.abc import Iterable, Mapping
from pathlib import Path


def data_option(parser: argparse.ArgumentParser) -> None:
    """Add the option `--json` to a parser."""
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here, as data")


def write_data(path: Path | None, data: Mapping[str, object]) -> None:
    """Write data to the path of `--json`, if given. Raises ValueError for a number that JSON lacks, such as nan."""
    if path is not None:
        path.write_text(json.dumps(data, indent=1, allow_nan=False) + "\n", encoding="utf-8")


def markdown_row(*cells: object) -> str:
    """One line of a Markdown table."""
    return f"| {' | '.join(map(str, cells))} |"


def markdown(head: Iterable[str], rows: Iterable[Iterable[object]] = ()) -> str:
    """A Markdown table."""
    names = tuple(head)
    return "\n".join([markdown_row(*names), "|" + "---|" * len(names), *(markdown_row(*row) for row in rows)])
