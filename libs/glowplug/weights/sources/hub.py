"""Weights from the Hugging Face hub or a mirror: `hf:org/name[@revision][:file]`.

Bytes come by ranges, at the commit of the revision when first asked. Files of that commit in the cache are read there.
With HF_HUB_OFFLINE, or without an answer from the hub, only the cache is used.
"""

import asyncio
import logging
import re
import socket
from collections.abc import AsyncGenerator, Collection, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cache
from importlib import import_module
from pathlib import Path, PurePosixPath
from typing import Any

from glowplug.domain.errors import WeightsUnavailable
from glowplug.weights.source import (
    Chunk,
    HubAddress,
    SourceChanged,
    SourceFile,
    SourceInfo,
    SourceInterrupted,
    SourceOptions,
    checked_relative,
    file_uri,
    hub_address,
    is_pattern,
    redacted,
)
from glowplug.weights.sources.connection import Connections
from glowplug.weights.sources.file import FileSource
from glowplug.weights.sources.http import PASSING, WebAnswer, WebReader, byte_range
from glowplug.weights.split_gguf import is_later_part, part_names

# Choose a repository's weights: one GGUF (if split, by its first part), or a set of safetensors with the files that an
# engine reads beside it. Pure.

_PART = re.compile(r"(.*)-(\d{5})-of-(\d{5})(\.[a-z]+)")
_WHOLE = "model.safetensors"  # loaders look for it first
_BESIDE = frozenset({".json", ".txt", ".model", ".jinja", ".tiktoken", ".vocab", ".bpe", ".py"})
_PROJECTOR = "mmproj"  # such a GGUF accompanies a model
_MAX_SHOWN = 12


@dataclass(frozen=True, slots=True)
class Chosen:
    """`names` in layout order; one name and no directory for a single file."""

    names: tuple[str, ...]
    is_directory: bool


def choose(address: HubAddress, names: Collection[str]) -> Chosen:
    """Raises WeightsUnavailable with the candidates where there are several, or all names where there is none."""
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
    """One whole set of tensors, and the small files beside it."""
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
        raise _refused(address, f"{len(found)} of {num_parts} parts of its safetensors exist")
    return found


def _several(address: HubAddress, candidates: Sequence[str]) -> WeightsUnavailable:
    first = HubAddress(address.repo, address.revision, candidates[0]).uri
    return _refused(address, f"it has several sets of weights: name one, as in {first}: {_listed(candidates)}")


def _none(address: HubAddress, why: str, names: Sequence[str]) -> WeightsUnavailable:
    return _refused(address, f"{why}; there are: {_listed(names)}" if names else f"{why}; it is empty")


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _MAX_SHOWN} more" if len(names) > _MAX_SHOWN else ""
    return ", ".join(names[:_MAX_SHOWN]) + more


def _refused(address: HubAddress, why: str) -> WeightsUnavailable:
    return WeightsUnavailable(f"{address.uri}: {why}", param="weights")


log = logging.getLogger(__name__)

HOSTS = ("huggingface.co", "*.huggingface.co", "*.hf.co")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_NETWORK = (ConnectionError, TimeoutError, socket.gaierror)  # OSErrors not of local files
_UNSIZED = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class HubFile:
    """`etag` is its name in the hub's store, without quotes; `cached` its path in the cache."""

    name: str
    num_bytes: int
    etag: str
    cached: Path | None


@dataclass(frozen=True, slots=True, kw_only=True)
class HubSnapshot:
    """`commit` is the revision itself where a mirror names no commit."""

    commit: str
    files: tuple[HubFile, ...]
    is_directory: bool

    @property
    def info(self) -> SourceInfo:
        """A single file has the path ""."""
        files = tuple(
            SourceFile(path=f.name if self.is_directory else "", num_bytes=f.num_bytes, validator=f.etag)
            for f in self.files
        )
        return SourceInfo(files=files, ranges=True)

    @property
    def is_cached(self) -> bool:
        return all(f.cached is not None for f in self.files)

    @property
    def num_bytes(self) -> int:
        return sum(f.num_bytes for f in self.files)


@cache
def library() -> Any:
    """Return None where it is not installed."""
    try:
        for part in ("errors", "file_download", "constants"):
            import_module(f"huggingface_hub.{part}")
        hub = import_module("huggingface_hub")
        hub.constants.HF_HUB_DISABLE_TELEMETRY = True  # else it requests one more file of the hub, and a start waits
        hub.HfApi  # noqa: B018 - huggingface_hub loads what is named
        return hub
    except ImportError:
        return None


class HubSource:
    scheme = "hf"

    def __init__(
        self,
        uri: str,
        options: SourceOptions = SourceOptions(),
        *,
        connections: Connections | None = None,
    ) -> None:
        self._library = library()
        if self._library is None:
            raise WeightsUnavailable("hf: addresses need the extra glowplug[prefetcher]", param="weights.uri")
        self.address = hub_address(uri)
        self._shown, self._options = self.address.uri, options
        constants = self._library.constants
        self.cache_dir = options.hf_cache_dir or Path(constants.HF_HUB_CACHE)
        self.endpoint = (options.hf_endpoint or constants.ENDPOINT).rstrip("/")
        self._offline = constants.HF_HUB_OFFLINE if options.hf_offline is None else options.hf_offline
        self._token = ""
        self._web = WebReader(self._shown, options, hosts=HOSTS, bearer=lambda: self._token, connections=connections)
        self._snapshot: HubSnapshot | None = None
        self._first_etags: dict[tuple[str, bool], str] = {}  # (file, of the hub or its store) -> first answer's

    async def measure(self) -> SourceInfo:
        return await self.probe()

    async def probe(self) -> SourceInfo:
        return (await self.resolve()).info

    async def resolve(self) -> HubSnapshot:
        """Ask the hub or the cache. Raises as `probe`."""
        found = await asyncio.to_thread(self._resolve)
        if any(file.num_bytes == _UNSIZED for file in found.files):
            sized = [await self._asked(f, found.commit) if f.num_bytes == _UNSIZED else f for f in found.files]
            found = replace(found, files=tuple(sized))
        self._snapshot = found
        return found

    def token(self) -> str:
        """Return the hub's token, "" for none. Blocking: may read a file."""
        return self._options.hf_token if self._options.hf_token is not None else self._library.get_token() or ""

    def _resolve(self) -> HubSnapshot:
        if self._offline:
            return self._from_cache("HF_HUB_OFFLINE is set")
        if _COMMIT.fullmatch(self.address.revision) and self.address.file and not is_pattern(self.address.file):
            folder = self.folder(self.address.revision)
            if (folder / self.address.file).is_file():
                return self._from_cache("")  # a commit's file never changes
        self._token = self.token()
        try:
            return self._from_hub()
        except SourceInterrupted as error:
            if not self._options.hf_falls_back or not (commit := self._commit_in_cache()):
                raise
            if self._snapshot is not None and self._snapshot.commit != commit:
                raise  # bytes of another commit have landed
            try:
                found = self._from_cache(str(error))
            except WeightsUnavailable as lacking:
                log.debug("the cache of the hub cannot serve %s either: %s", self._shown, lacking)
                raise error from None  # the hub may answer next time, and has the missing files
            log.warning("the weights of %s come from the cache of the hub: %s", self._shown, error)
            return found

    def _from_hub(self) -> HubSnapshot:
        api = self._library.HfApi(endpoint=self.endpoint, token=self._token or False)
        try:
            found = api.model_info(
                self.address.repo,
                revision=self.address.revision,
                files_metadata=True,
                timeout=self._options.connect_timeout_s,
            )
            siblings = {sibling.rfilename: sibling for sibling in found.siblings or ()}
            chosen = choose(self.address, siblings)
            commit = found.sha if _COMMIT.fullmatch(found.sha or "") else self.address.revision
            files = tuple(self._described(siblings[name], commit) for name in chosen.names)
        except self._errors as error:
            raise self.translated(error) from error
        return HubSnapshot(commit=commit, files=files, is_directory=chosen.is_directory)

    def _described(self, sibling: Any, commit: str) -> HubFile:
        name, num_bytes = sibling.rfilename, sibling.size
        checked_relative(name)
        etag = sibling.lfs.sha256 if sibling.lfs else sibling.blob_id or ""
        path = self.folder(commit) / name
        is_here = bool(_COMMIT.fullmatch(commit)) and path.is_file() and num_bytes in (None, path.stat().st_size)
        if is_here and num_bytes is None:
            return _cached_file(path, name)
        size = _UNSIZED if num_bytes is None else num_bytes
        return HubFile(name=name, num_bytes=size, etag=etag, cached=path if is_here else None)

    async def _asked(self, file: HubFile, commit: str) -> HubFile:
        """Ask by HEAD: a mirror's listing may lack size and etag."""
        async with self._web.ask("HEAD", self._url(file.name, commit), {}) as answer:
            self._web.check(answer.response)
            headers = answer.response.headers
            etag = _plain_etag(answer.linked_etag or headers.get("etag", ""))
            if not (length := headers.get("content-length", "")).isdigit():
                raise self._refused(f"the server does not say how large {file.name} is")
            return replace(file, num_bytes=int(length), etag=etag)

    def _url(self, name: str, commit: str) -> str:
        url: str = self._library.hf_hub_url(self.address.repo, name, revision=commit, endpoint=self.endpoint)
        return url

    def translated(self, error: Exception) -> Exception:
        """Map the library's errors, which may quote requests, to ours."""
        errors = self._library.errors
        if isinstance(error, errors.LocalEntryNotFoundError) and isinstance(error.__cause__, Exception):
            return self.translated(error.__cause__)  # it wraps the cause of a failed download
        if isinstance(error, errors.GatedRepoError):
            return self._refused("access is restricted: request it on its page, and set HF_TOKEN")
        if isinstance(error, errors.RevisionNotFoundError):
            return self._refused(f"no revision {self.address.revision}")
        if isinstance(error, errors.RepositoryNotFoundError):
            return self._refused("no such repository, or a private one that needs an HF_TOKEN")
        if isinstance(error, errors.HFValidationError):
            return self._refused(str(error).splitlines()[0])
        if isinstance(error, OSError) and error.errno and not isinstance(error, (*_NETWORK, errors.HTTPError)):
            return WeightsUnavailable(f"{self.cache_dir}: {error.strerror or error}", param="weights.uri")
        status, server = 0, redacted(self.endpoint)
        if isinstance(error, errors.HfHubHTTPError):
            status = error.response.status_code
        if status and status not in PASSING and status < 500:
            return self._refused(f"HTTP {status} from {server}")
        said = f"HTTP {status}" if status else f"no answer ({type(error).__name__})"
        return SourceInterrupted(f"{self._shown}: {said} from {server}")

    @property
    def _errors(self) -> tuple[type[Exception], ...]:
        return self._library.errors.HTTPError, OSError, ValueError, LookupError, TypeError

    def _refused(self, why: str) -> WeightsUnavailable:
        return WeightsUnavailable(f"{self._shown}: {why}", param="weights.uri")

    def folder(self, commit: str) -> Path:
        return self._repo_dir() / "snapshots" / commit

    def _repo_dir(self) -> Path:
        name: str = self._library.file_download.repo_folder_name(repo_id=self.address.repo, repo_type="model")
        return self.cache_dir / name

    def _commit_in_cache(self) -> str:
        """Return the revision's cached commit, "" for none."""
        commit = self.address.revision
        try:
            if not _COMMIT.fullmatch(commit):
                commit = (self._repo_dir() / "refs" / commit).read_text("utf-8").strip()
            return commit if _COMMIT.fullmatch(commit) and self.folder(commit).is_dir() else ""
        except OSError:
            return ""

    def _from_cache(self, why: str) -> HubSnapshot:
        commit = self._commit_in_cache()
        if not commit:
            raise self._refused(f"{self.cache_dir} holds none of it, and {why}")
        folder = self.folder(commit)
        try:
            names = [p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file()]
            chosen = choose(self.address, names)
            files = tuple(_cached_file(folder / name, name) for name in chosen.names)
        except WeightsUnavailable as error:
            raise WeightsUnavailable(f"{error.message} (in {folder}: {why})", param=error.param) from error
        except OSError as error:
            raise self._refused(f"{folder} cannot be read: {error.strerror}") from error
        return HubSnapshot(commit=commit, files=files, is_directory=chosen.is_directory)

    async def read(self, file: SourceFile, first_byte: int, last_byte: int) -> AsyncGenerator[Chunk, None]:
        snapshot = self._snapshot or await self.resolve()
        found = next((f for f in snapshot.files if f.name == file.path or not file.path), None)
        if found is None or found.etag != file.validator:
            raise SourceChanged(f"{self._shown} changed while it was being read")
        if found.cached is not None:
            plain = SourceFile(path="", num_bytes=found.num_bytes)
            reading: AsyncGenerator[Chunk, None] = FileSource(file_uri(found.cached), self._options).read(
                plain, first_byte, last_byte
            )
        else:
            reading = self._from_web(found, snapshot.commit, first_byte, last_byte)
        async with aclosing(reading) as chunks:
            async for chunk in chunks:
                yield chunk

    def _from_web(self, file: HubFile, commit: str, first_byte: int, last_byte: int) -> AsyncGenerator[Chunk, None]:
        """A commit's file never changes, so no If-Range is needed; answers must match its etag, or the first
        answer's where a mirror names no commit."""
        is_whole = not first_byte and last_byte in (0, file.num_bytes)

        def check(answer: WebAnswer) -> None:
            if is_whole:
                self._web.check(answer.response)
            else:
                self._web.check_part(answer.response, file.num_bytes, first_byte)
            etag = _plain_etag(answer.linked_etag)
            is_other = bool(etag and file.etag and etag != file.etag)
            if not _COMMIT.fullmatch(commit):
                now = etag or _plain_etag(answer.response.headers.get("etag", ""))
                is_other |= now != self._first_etags.setdefault((file.name, bool(etag)), now)
            if is_other:
                self._first_etags.clear()  # landed bytes are discarded
                raise SourceChanged(f"{self._shown}: {file.name} has changed")

        headers = {} if is_whole else byte_range(first_byte, last_byte)
        return self._web.read(self._url(file.name, commit), headers, check)

    async def close(self) -> None:
        await self._web.close()


def _cached_file(path: Path, name: str) -> HubFile:
    """A link's target is named by the etag; file systems without links have plain files."""
    etag = path.readlink().name if path.is_symlink() else ""
    return HubFile(name=name, num_bytes=path.stat().st_size, etag=etag, cached=path)


def _plain_etag(etag: str) -> str:
    return etag.removeprefix("W/").strip('"')
