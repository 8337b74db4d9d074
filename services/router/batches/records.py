"""The rows of files and batches in the state store."""

from typing import TypeVar

from glowplug.domain.batch import BATCHES, BATCHES_OPEN, FILES, Batch, OpenBatch, StoredFile
from glowplug.events.envelope import MalformedEvent, from_json, to_json
from glowplug.state.port import Store
from glowplug.state.rows import read_rows

T = TypeVar("T")


class Records:
    """The rows, through one client of the store. All methods raise StoreUnavailable; an unreadable row counts as
    none."""

    def __init__(self, store: Store) -> None:
        self._store = store

    async def files(self) -> dict[str, StoredFile]:
        return read_rows(FILES, await self._store.load(FILES), StoredFile)[0]

    async def file(self, file_id: str) -> StoredFile | None:
        return _row(await self._store.get(FILES, file_id), StoredFile)

    async def put_file(self, file: StoredFile) -> None:
        await self._store.put(FILES, file.file_id, to_json(file))

    async def delete_file(self, file_id: str) -> None:
        await self._store.delete(FILES, file_id)

    async def batches(self) -> dict[str, Batch]:
        return read_rows(BATCHES, await self._store.load(BATCHES), Batch)[0]

    async def batch(self, batch_id: str) -> Batch | None:
        return _row(await self._store.get(BATCHES, batch_id), Batch)

    async def put_batch(self, batch: Batch) -> None:
        await self._store.put(BATCHES, batch.batch_id, to_json(batch))

    async def delete_batch(self, batch_id: str) -> None:
        await self._store.delete(BATCHES, batch_id)

    async def open_batches(self) -> dict[str, OpenBatch]:
        return read_rows(BATCHES_OPEN, await self._store.load(BATCHES_OPEN), OpenBatch)[0]

    async def open_batch(self, batch_id: str) -> OpenBatch | None:
        return _row(await self._store.get(BATCHES_OPEN, batch_id), OpenBatch)

    async def put_open(self, batch: OpenBatch) -> None:
        await self._store.put(BATCHES_OPEN, batch.batch_id, to_json(batch))

    async def delete_open(self, batch_id: str) -> None:
        await self._store.delete(BATCHES_OPEN, batch_id)


def _row(raw: bytes | None, cls: type[T]) -> T | None:
    try:
        return from_json(raw, cls) if raw else None
    except MalformedEvent:
        return None
