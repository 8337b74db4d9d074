"""A split GGUF of this machine as one file that can be looked at, without a copy of its tensors."""

import contextlib
import tempfile
from collections.abc import Iterator
from mmap import ACCESS_READ, mmap
from pathlib import Path

from glowplug.domain.gguf import NeedMore
from glowplug.weights.split_gguf import NotJoinable, Part, join, part_names, read_part


@contextlib.contextmanager
def in_one_piece(path: Path) -> Iterator[Path]:
    """`path` itself, unless it is the first part of a split GGUF: then a file of the same name for as long as the block
    lasts, which has the joined header, the joined size, and holes for tensors. Raises NotJoinable, which names the part
    that is missing or wrong, and OSError."""
    names = part_names(path.name)
    if not names:
        yield path
        return
    paths = [path.parent / name for name in names]
    if missing := [part.name for part in paths if not part.is_file()]:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise NotJoinable(f"there is no {missing[0]}{more} beside it")
    joined = join([_part(part) for part in paths], [part.stat().st_size for part in paths])
    with tempfile.TemporaryDirectory(prefix="glowplug-") as folder:
        whole = Path(folder) / path.name
        with whole.open("wb") as file:
            file.write(joined.header)
            file.truncate(joined.num_bytes)
        yield whole


def _part(path: Path) -> Part:
    if not path.stat().st_size:
        raise NotJoinable(f"{path.name} is cut short")
    with path.open("rb") as file, mmap(file.fileno(), 0, access=ACCESS_READ) as data:
        try:
            return read_part(data)
        except NeedMore as error:
            raise NotJoinable(f"{path.name} is cut short") from error
        except NotJoinable as error:
            raise NotJoinable(f"{path.name}: {error}") from error
