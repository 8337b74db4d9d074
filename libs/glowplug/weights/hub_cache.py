"""Filling the cache of the Hugging Face hub on this machine, by the library that owns it."""

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

from glowplug.domain.errors import WeightsUnavailable
from glowplug.weights.sources.hub import HubSnapshot, HubSource

TENSORS = (".safetensors", ".gguf")


def fill_cache(source: HubSource, snapshot: HubSnapshot, report: Callable[[int], None]) -> Path:
    """Download what the cache lacks of `snapshot`; `report` is given the bytes as they come. Returns the snapshot's
    folder. Blocking; what has come stays when it is interrupted, and tensors come last: a snapshot without them is not
    taken for whole. Raises WeightsUnavailable and SourceInterrupted."""
    hub: Any = import_module("huggingface_hub")
    folder = source.folder(snapshot.commit)
    for file in sorted(snapshot.files, key=lambda file: (file.name.lower().endswith(TENSORS), file.name)):
        if file.cached is not None:
            continue
        try:
            came = hub.hf_hub_download(
                source.address.repo,
                file.name,
                revision=source.address.revision,  # by its name, so that the cache remembers which commit it was
                cache_dir=source.cache_dir,
                endpoint=source.endpoint,
                token=source.token() or False,
                tqdm_class=_bar(report),
            )
        except (hub.errors.HTTPError, OSError, ValueError) as error:
            raise source.translated(error) from error
        if Path(came) != folder / file.name:
            raise WeightsUnavailable(f"{source.address.uri}: it has changed while it came; pull it once more")
    return folder


def _bar(report: Callable[[int], None]) -> type[Any]:
    """What the library takes for a progress bar of one file."""

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
            """Bytes of the network; those of the file are what counts."""

        def set_postfix_str(self, *_: Any, **__: Any) -> None:
            """Its rate is shown elsewhere."""

        set_transfer_postfix_str = set_postfix_str

    return Bar
