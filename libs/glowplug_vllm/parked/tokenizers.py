"""Keep tokenizers in the zygote: a fork has its own loaded and copied (saves about 0.9 s of a start).

The key has sizes and times of the files, so that a changed tokenizer is read anew."""

from collections import OrderedDict
from pathlib import Path
from typing import Any

MAX_KEPT = 8
_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json", "config.json")
_COPIES = 2  # in the pool of vLLM's renderer

_kept: OrderedDict[tuple[Any, ...], Any] = OrderedDict()


def fingerprint(directory: Path) -> tuple[Any, ...]:
    stats = []
    for name in _FILES:
        try:
            stat = (directory / name).stat()
        except FileNotFoundError:
            continue
        stats.append((name, stat.st_size, stat.st_mtime_ns))
    return (str(directory), *stats)


def install() -> None:
    """Make vLLM look here first. Raises Unpatchable."""
    from vllm.tokenizers import hf

    from glowplug_vllm.parked.patches import Unpatchable

    loader = getattr(hf, "CachedHfTokenizer", None)
    if loader is None or not hasattr(hf, "maybe_make_thread_pool"):
        raise Unpatchable("this vLLM has no vllm.tokenizers.hf.CachedHfTokenizer")
    real = loader.from_pretrained

    def from_pretrained(path: Any, *args: Any, **kwargs: Any) -> Any:
        return _kept.get(fingerprint(Path(path))) or real(path, *args, **kwargs)

    loader.from_pretrained = staticmethod(from_pretrained)


def keep(directory: Path) -> bool:
    """Return False if kept already. Beyond MAX_KEPT the oldest is dropped. Raises OSError."""
    from vllm.tokenizers import hf, registry

    key = fingerprint(directory)
    if key in _kept:
        _kept.move_to_end(key)
        return False
    _kept[key] = hf.maybe_make_thread_pool(registry.get_tokenizer(str(directory)), _COPIES)
    if len(_kept) > MAX_KEPT:
        _kept.popitem(last=False)
    return True
