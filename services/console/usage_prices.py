"""Prices of tokens and GPU memory by model, from an operator's file, read again after a change."""

import logging
from collections.abc import Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import msgspec
import yaml

from glowplug.runtime import plain_yaml

log = logging.getLogger(__name__)
MILLION = 1_000_000


class Price(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Per million tokens. `cached`: for cached tokens of a prompt; None: as others. `gpu_second`: all memory of one GPU
    for a second."""

    prompt: float = 0.0
    cached: float | None = None
    response: float = 0.0
    gpu_second: float = 0.0


class Prices(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`models`: by key or pattern; the first match counts."""

    currency: str = "usd"
    models: dict[str, Price] = {}

    def cost(self, sums: Mapping[str, Any]) -> float | None:
        """Return the cost of a row of usage; None without a price."""
        name = str(sums["model_key"])
        price = next((price for pattern, price in self.models.items() if fnmatchcase(name, pattern)), None)
        if price is None:
            return None
        cached = price.prompt if price.cached is None else price.cached
        fresh = sums["prompt_tokens"] - sums["cached_tokens"]
        whole: float = fresh * price.prompt + sums["cached_tokens"] * cached + sums["response_tokens"] * price.response
        return whole / MILLION + (sums.get("gpu_s") or 0.0) * price.gpu_second


class PriceFile:
    """Prices of a YAML or JSON file, if any. While it is unreadable the last prices hold, and the log says why."""

    def __init__(self, path: str) -> None:
        self._path = Path(path) if path else None
        self._prices, self._changed_at, self._problem = Prices(), 0.0, ""

    def read(self) -> Prices:
        """Blocks."""
        if self._path is None:
            return self._prices
        try:
            changed_at = self._path.stat().st_mtime
            if changed_at != self._changed_at:
                found = plain_yaml.load(self._path.read_text(encoding="utf-8"))
                self._prices, self._changed_at, self._problem = msgspec.convert(found, Prices), changed_at, ""
        except (OSError, ValueError, yaml.YAMLError) as error:
            if str(error) != self._problem:
                log.error("the console cannot read the prices in %s: %s", self._path, error)
            self._problem = str(error)
        return self._prices
