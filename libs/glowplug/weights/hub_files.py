"""Which files of a repository are its weights: one GGUF, or a set of safetensors with what an engine reads beside it.
Of a GGUF in several parts the first one is named.

Pure: names in, names out, all relative to the repository, with forward slashes."""

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import PurePosixPath

from glowplug.domain.errors import WeightsUnavailable
from glowplug.weights.source import HubAddress, is_pattern
from glowplug.weights.split_gguf import is_later_part, part_names

_PART = re.compile(r"(.*)-(\d{5})-of-(\d{5})(\.[a-z]+)")
_WHOLE = "model.safetensors"  # what loaders look for first
_BESIDE = frozenset({".json", ".txt", ".model", ".jinja", ".tiktoken", ".vocab", ".bpe", ".py"})
_PROJECTOR = "mmproj"  # a GGUF of this name goes along with a model and is none
_MAX_SHOWN = 12  # candidates in a message


@dataclass(frozen=True, slots=True)
class Chosen:
    """`names` in the order they are laid out; one name and no directory for a single file."""

    names: tuple[str, ...]
    is_directory: bool


def choose(address: HubAddress, names: Collection[str]) -> Chosen:
    """The files of `address` among all `names` of its repository. Raises WeightsUnavailable, which lists the candidates
    where there are several, or what there is where there is none."""
    if not address.file:
        return _weights(address, sorted(names))
    if not is_pattern(address.file):
        if address.file not in names:
            raise _none(address, f"there is no file {address.file}", sorted(names))
        return Chosen((address.file,), is_directory=False)
    found = sorted(name for name in names if fnmatchcase(name, address.file))
    if found and all(name.endswith(".safetensors") for name in found):
        return _directory(address, [name for name in found if "/" not in name] or found, sorted(names))
    found = [name for name in found if not is_later_part(name)]
    if len(found) > 1:
        raise _several(address, found)
    if not found:
        raise _none(address, f"no file matches {address.file}", sorted(names))
    return _file(address, found[0])


def _weights(address: HubAddress, names: Sequence[str]) -> Chosen:
    ggufs = [name for name in names if _is_gguf(name) and not is_later_part(name)]
    tensors = [name for name in names if name.endswith(".safetensors") and "/" not in name]
    if len(ggufs) == 1 and not tensors:
        return _file(address, ggufs[0])
    if tensors and not ggufs:
        return _directory(address, tensors, names)
    if not ggufs and not tensors:
        raise _none(address, "it holds no safetensors beside its config.json and no GGUF", names)
    raise _several(address, [*(["*.safetensors"] if tensors else []), *ggufs])


def _is_gguf(name: str) -> bool:
    path = PurePosixPath(name)
    return path.suffix.lower() == ".gguf" and not path.name.lower().startswith(_PROJECTOR)


def _file(address: HubAddress, name: str) -> Chosen:
    if parts := part_names(name):
        first = HubAddress(address.repo, address.revision, name).uri
        raise _refused(address, f"its weights are {len(parts)} parts; name the first one: {first}")
    return Chosen((name,), is_directory=False)


def _directory(address: HubAddress, tensors: Sequence[str], names: Sequence[str]) -> Chosen:
    """One set of tensors, whole, and the small files beside it: configuration, tokenizer, template."""
    chosen = _one_set(address, tensors)
    folder = PurePosixPath(chosen[0]).parent
    beside = [n for n in names if PurePosixPath(n).parent == folder and PurePosixPath(n).suffix.lower() in _BESIDE]
    visible = [n for n in beside if not PurePosixPath(n).name.startswith(".")]
    return Chosen(tuple(sorted({*chosen, *visible})), is_directory=True)


def _one_set(address: HubAddress, tensors: Sequence[str]) -> list[str]:
    whole = [name for name in tensors if PurePosixPath(name).name == _WHOLE]
    sets: dict[tuple[str, int], list[str]] = {}
    for name in tensors:
        part = _PART.fullmatch(name)
        sets.setdefault((part[1], int(part[3])) if part else (name, 1), []).append(name)
    if len(whole) == 1:
        return whole
    named = {key: found for key, found in sets.items() if PurePosixPath(key[0]).name == "model"}
    candidates = named if len(named) == 1 else sets
    if len(candidates) > 1:
        raise _several(address, [f"{stem}-*.safetensors" if num > 1 else stem for stem, num in candidates])
    ((_, num_parts), found) = next(iter(candidates.items()))
    if len(found) != num_parts:
        raise _refused(address, f"{len(found)} of {num_parts} parts of its safetensors are there")
    return found


def _several(address: HubAddress, candidates: Sequence[str]) -> WeightsUnavailable:
    first = HubAddress(address.repo, address.revision, candidates[0]).uri
    return _refused(address, f"several weights are in it, name one as in {first}: {_listed(candidates)}")


def _none(address: HubAddress, why: str, names: Sequence[str]) -> WeightsUnavailable:
    return _refused(address, f"{why}; there are: {_listed(names)}" if names else f"{why}; it is empty")


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _MAX_SHOWN} more" if len(names) > _MAX_SHOWN else ""
    return ", ".join(names[:_MAX_SHOWN]) + more


def _refused(address: HubAddress, why: str) -> WeightsUnavailable:
    return WeightsUnavailable(f"{address.uri}: {why}", param="weights")
