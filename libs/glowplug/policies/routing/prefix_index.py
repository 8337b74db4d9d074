"""What the KV caches of a model's instances likely hold: blocks of prompts by instance, the least recently used leave
first.

A prompt is given as the hashes of its blocks, each chained to those before it, so that two prompts have a block in
common only where they begin alike (vLLM's automatic prefix caching and Mooncake, FAST 2025, name blocks so). A cache
that holds a block holds those before it, because engines drop the end of a prefix first: how much of a prompt an
instance holds is found by bisection.

This is an estimate: the router knows what it sent, not what the engine kept. `PrefixAware` corrects it by what engines
report.
"""

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Iterable, Iterator

# What the cache of an engine holds that keeps one sequence in each of its slots, and no other (llama.cpp).
#
# A prompt goes on from the idle slot whose sequence it has most in common with, where that is more than a tenth of the
# prompt (llama.cpp's default `slot_prompt_similarity`); otherwise it overwrites the slot that was used least recently.
# The rest of that slot's sequence is lost, and what a busy slot holds is of no use to anybody else.

SIMILARITY = 0.1


Prefix = tuple[int, ...]
"""Chained hashes of a prompt's whole blocks, the first block first."""


def num_alike(one: Prefix, other: Prefix) -> int:
    """Blocks that two prompts have in common at their beginnings."""
    return bisect_left(range(min(len(one), len(other))), True, key=lambda at: one[at] != other[at])


class PrefixIndex:
    """The blocks held by each instance. Unknown ids are ignored."""

    def __init__(self) -> None:
        self._held: dict[str, OrderedDict[int, int]] = {}  # how many sequences have each block, where these are kept
        self._holders: dict[int, dict[str, None]] = {}

    def __len__(self) -> int:
        """Blocks that are tracked, each once for each instance that holds it."""
        return sum(map(len, self._held.values()))

    def instances(self) -> Iterable[str]:
        return self._held.keys()

    def add(self, instance_id: str, prefix: Prefix, most: int) -> None:
        """Note that an instance reads this prompt now, and holds at most `most` blocks."""
        held = self._held.setdefault(instance_id, OrderedDict())
        for block in reversed(prefix[:most]):  # the end of a prompt leaves before its beginning
            if block in held:
                held.move_to_end(block)
            else:
                held[block] = 1
                self._holders.setdefault(block, {})[instance_id] = None
        self.shrink(instance_id, most)

    def keep(self, instance_id: str, prefix: Prefix) -> None:
        """Note that a slot of an instance holds this sequence now, which may be used again."""
        held = self._held.setdefault(instance_id, OrderedDict())
        for block in prefix:
            held[block] = num = held.get(block, 0) + 1
            if num == 1:
                self._holders.setdefault(block, {})[instance_id] = None

    def drop(self, instance_id: str, prefix: Prefix) -> None:
        """Note that a slot of an instance holds this sequence, once kept, no more."""
        held = self._held.get(instance_id, OrderedDict())
        for block in prefix:
            held[block] -= 1
            if not held[block]:
                del held[block]
                self._drop(block, instance_id)

    def shrink(self, instance_id: str, most: int) -> None:
        """Drop the least recently used blocks of an instance beyond `most`."""
        held = self._held.get(instance_id)
        while held and len(held) > most:
            block, _ = held.popitem(last=False)
            self._drop(block, instance_id)

    def forget(self, instance_id: str) -> None:
        """Note that an instance holds nothing any more."""
        for block in self._held.pop(instance_id, ()):
            self._drop(block, instance_id)

    def num_held(self, instance_id: str, prefix: Prefix) -> int:
        """Blocks at the beginning of a prompt that an instance holds."""
        held = self._held.get(instance_id)
        return bisect_left(prefix, True, key=lambda block: block not in held) if held else 0

    def holders(self, prefix: Prefix) -> Iterator[str]:
        """The instances that hold a beginning of this prompt, those that hold the most first."""
        seen: set[str] = set()
        deepest = bisect_left(prefix, True, key=lambda block: block not in self._holders)
        for block in reversed(prefix[:deepest]):
            for instance_id in self._holders.get(block, ()):  # missing where two hashes are alike by chance
                if instance_id not in seen:
                    seen.add(instance_id)
                    yield instance_id

    def _drop(self, block: int, instance_id: str) -> None:
        holders = self._holders[block]
        del holders[instance_id]
        if not holders:
            del self._holders[block]


class Slots:
    """The slots of one engine. Sequences are known by the key of the request that they answer."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._idle: OrderedDict[int, Prefix] = OrderedDict()  # the least recently used first; empty slots are left out
        self._busy: dict[int, Prefix] = {}

    def take(self, key: int, prefix: Prefix, least: float) -> Prefix:
        """Let a request take a slot. Returns the sequence that the slot held, () where it was empty. `least`: blocks in
        common, above which it goes on from a sequence."""
        found = self._found(prefix, least)
        lost = self._idle.pop(found) if found is not None else ()
        self._busy[key] = prefix
        return lost

    def free(self, key: int) -> Prefix:
        """Note that a request has ended. Returns the sequence that its slot keeps; () where another waits for it."""
        prefix = self._busy.pop(key, ())
        if not prefix or len(self._busy) + len(self._idle) >= self.num_slots:
            return ()
        self._idle[key] = prefix
        return prefix

    def _found(self, prefix: Prefix, least: float) -> int | None:
        """The sequence whose slot a request would take; None where an empty one is left, or none is idle."""
        best, most = None, least
        for key, sequence in self._idle.items():
            if (num := num_alike(sequence, prefix)) > most:
                best, most = key, num
        if best is None and self._idle and len(self._busy) + len(self._idle) >= self.num_slots:
            best = next(iter(self._idle))
        return best
