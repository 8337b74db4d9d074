"""What the cache of an engine holds that keeps one sequence in each of its slots, and no other (llama.cpp).

A prompt goes on from the idle slot whose sequence it has most in common with, where that is more than a tenth of the
prompt (llama.cpp's default `slot_prompt_similarity`); otherwise it overwrites the slot that was used least recently.
The rest of that slot's sequence is lost, and what a busy slot holds is of no use to anybody else.
"""

from collections import OrderedDict

from glowplug.policies.routing.prefix_index import Prefix, num_alike

SIMILARITY = 0.1


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
