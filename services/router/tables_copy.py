"""A copy of the router's tables on disk, so that a router that starts while the store is down still serves."""

import logging
from pathlib import Path

import msgspec

from glowplug.domain.instance import Instance
from glowplug.domain.model import Model
from glowplug.events.envelope import MalformedEvent, from_json
from glowplug.fleet.tables import Fleet

MAX_COPY_BYTES = 256 << 20  # every model and instance of a fleet: 10,000 models are 20 MiB
log = logging.getLogger(__name__)


class _Copy(msgspec.Struct):
    written_at: float
    models: list[Model]
    instances: list[Instance]


class TablesCopy:
    """One file, replaced whole. `max_age_s` bounds how old an instance's address may be trusted."""

    def __init__(self, path: Path, max_age_s: float = 600.0) -> None:
        self._path, self._max_age_s = path, max_age_s
        self._last = b""

    def write(self, fleet: Fleet, now_s: float) -> None:
        """Write when something has changed, or when the copy would grow old."""
        rows = msgspec.json.encode([list(fleet.models.values()), list(fleet.instances.values())])
        if rows == self._last and self._path.exists() and now_s - self._path.stat().st_mtime < self._max_age_s / 4:
            return
        self._last = rows
        copy = _Copy(now_s, list(fleet.models.values()), list(fleet.instances.values()))
        part = self._path.with_suffix(".part")
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            part.write_bytes(msgspec.json.encode(copy))
            part.replace(self._path)
        except OSError as error:
            log.warning("the tables could not be copied to disk: %s", error)

    def read(self, now_s: float) -> tuple[dict[str, Model], dict[str, Instance]] | None:
        """(models, instances) as they were last; instances only while the copy is young. None when there is none."""
        try:
            copy = from_json(self._path.read_bytes(), _Copy, max_bytes=MAX_COPY_BYTES)
        except FileNotFoundError:
            return None
        except (OSError, MalformedEvent) as error:
            log.warning("the copy of the tables cannot be read: %s", error)
            return None
        young = now_s - copy.written_at < self._max_age_s
        instances = {i.instance_id: i for i in copy.instances} if young else {}
        return {m.key: m for m in copy.models}, instances
