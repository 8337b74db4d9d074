"""The likely contents of KV caches: blocks of prompts by instance, least recently used leaving first.

A prompt is given as chained hashes of its blocks, so that two share a block only within a common prefix (vLLM's
automatic prefix caching and Mooncake, FAST 2025, name blocks so). Engines drop the end of a prefix first, so the held
part is found by bisection.

This is an estimate from the router's requests; `PrefixAware` corrects it by engines' reports.
"""

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Iterable, Iterator

# The cache of an engine with one sequence per slot (llama.cpp). A prompt continues the idle slot with most in common,
# if more than a tenth of the prompt (llama.cpp's default `slot_prompt_similarity`), else overwrites the least recently
# used.

SIMILARITY = 0.1


Prefix = tuple[int, ...]
"""Chained hashes of a prompt's whole blocks, first block first."""


def num_alike(one: Prefix, other: Prefix) -> int:
    return bisect_left(range(min(len(one), len(other))), True, key=lambda at: one[at] != other[at])


class PrefixIndex:
    """The blocks held by each instance. Unknown ids are ignored."""

    def __init__(self) -> None:
        self._held: dict[str, OrderedDict[int, int]] = {}  # sequences per block, where kept
        self._holders: dict[int, dict[str, None]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._held.values()))

    def instances(self) -> Iterable[str]:
        return self._held.keys()

    def add(self, instance_id: str, prefix: Prefix, most: int) -> None:
        """Note that an instance reads this prompt, and holds at most `most` blocks."""
        held = self._held.setdefault(instance_id, OrderedDict())
        for block in reversed(prefix[:most]):
            if block in held:
                held.move_to_end(block)
            else:
                held[block] = 1
                self._holders.setdefault(block, {})[instance_id] = None
        self.shrink(instance_id, most)

    def keep(self, instance_id: str, prefix: Prefix) -> None:
        held = self._held.setdefault(instance_id, OrderedDict())
        for block in prefix:
            held[block] = num = held.get(block, 0) + 1
            if num == 1:
                self._holders.setdefault(block, {})[instance_id] = None

    def drop(self, instance_id: str, prefix: Prefix) -> None:
        held = self._held.get(instance_id, OrderedDict())
        for block in prefix:
            held[block] -= 1
            if not held[block]:
                del held[block]
                self._drop(block, instance_id)

    def shrink(self, instance_id: str, most: int) -> None:
        held = self._held.get(instance_id)
        while held and len(held) > most:
            block, _ = held.popitem(last=False)
            self._drop(block, instance_id)

    def forget(self, instance_id: str) -> None:
        for block in self._held.pop(instance_id, ()):
            self._drop(block, instance_id)

    def num_held(self, instance_id: str, prefix: Prefix) -> int:
        held = self._held.get(instance_id)
        return bisect_left(prefix, True, key=lambda block: block not in held) if held else 0

    def holders(self, prefix: Prefix) -> Iterator[str]:
        """Yield holders of the prompt's beginning, longest first."""
        seen: set[str] = set()
        deepest = bisect_left(prefix, True, key=lambda block: block not in self._holders)
        for block in reversed(prefix[:deepest]):
            for instance_id in self._holders.get(block, ()):  # missing at a hash collision
                if instance_id not in seen:
                    seen.add(instance_id)
                    yield instance_id

    def _drop(self, block: int, instance_id: str) -> None:
        holders = self._holders[block]
        del holders[instance_id]
        if not holders:
            del self._holders[block]


class Slots:
    """One engine's slots; a sequence's key is its request's."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._idle: OrderedDict[int, Prefix] = OrderedDict()  # least recently used first
        self._busy: dict[int, Prefix] = {}

    def take(self, key: int, prefix: Prefix, least: float) -> Prefix:
        """Take a slot; returns its lost sequence, or (). `least`: common blocks above which a sequence is continued."""
        found = self._found(prefix, least)
        lost = self._idle.pop(found) if found is not None else ()
        self._busy[key] = prefix
        return lost

    def free(self, key: int) -> Prefix:
        """End a request; returns its slot's kept sequence, or () if another waits."""
        prefix = self._busy.pop(key, ())
        if not prefix or len(self._busy) + len(self._idle) >= self.num_slots:
            return ()
        self._idle[key] = prefix
        return prefix

    def _found(self, prefix: Prefix, least: float) -> int | None:
        best, most = None, least
        for key, sequence in self._idle.items():
            if (num := num_alike(sequence, prefix)) > most:
                best, most = key, num
        if best is None and self._idle and len(self._busy) + len(self._idle) >= self.num_slots:
            best = next(iter(self._idle))
        return best
