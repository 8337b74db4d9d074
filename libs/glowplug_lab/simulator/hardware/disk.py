"""A node's disk in virtual time, with one link for reads and writes."""

from collections.abc import Callable
from typing import Any

from glowplug.controllers.prefetcher import messages as pw
from glowplug.domain.hardware import CachedWeights
from glowplug_lab.simulator.hardware.server import Server
from glowplug_lab.simulator.links import Link, Transfer


class Disk:
    """Reads come before writes. `changed()` follows a change in the set of copies."""

    def __init__(self, node: Server, changed: Callable[[], None]) -> None:
        self.node, self.run, self._changed = node, node.run, changed
        self.link = Link(f"{node.node_id}/disk", node.server.disk_bytes_per_s)
        self.copies: dict[str, CachedWeights] = {}
        self.num_bytes_read = 0.0
        self._writing: dict[str, tuple[Transfer, float]] = {}  # by digest, with its begin
        self.handlers: dict[type, Any] = {
            pw.WriteCopy: self._write,
            pw.StopCopy: self._stop,
            pw.DropCopy: self._drop,
        }

    def stop_all(self) -> None:
        for transfer, _ in self._writing.values():
            self.run.links.stop(transfer)
        self._writing.clear()

    def _write(self, effect: pw.WriteCopy) -> None:
        began = self.run.kernel.now_s
        transfer = self.run.links.start(
            f"copy {effect.digest}", effect.num_bytes, (self.link,), lambda: self._written(effect), priority=1
        )
        self._writing[effect.digest] = (transfer, began)

    def _written(self, effect: pw.WriteCopy) -> None:
        _, began = self._writing.pop(effect.digest)
        model_keys = self.run.keys_of.get(effect.digest, ())
        now_s = self.run.kernel.now_s
        self.copies[effect.digest] = CachedWeights(
            digest=effect.digest, num_bytes=effect.num_bytes, model_keys=model_keys, last_used_at=now_s
        )
        self.node.tell_prefetcher(pw.CopyEnded(digest=effect.digest, num_bytes=effect.num_bytes, seconds=now_s - began))
        self._changed()

    def _stop(self, effect: pw.StopCopy) -> None:
        found = self._writing.pop(effect.digest, None)
        if found is not None:
            self.run.links.stop(found[0])
            ended = pw.CopyEnded(digest=effect.digest, code=pw.CANCELLED)
            self.run.kernel.after(0.0, self.node.tell_prefetcher, ended)

    def _drop(self, effect: pw.DropCopy) -> None:
        self.copies.pop(effect.digest, None)
        self._changed()
