"""The progress of a batch. Pure."""

from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import replace
from typing import Final

from glowplug.domain.batch import Batch, BatchStatus, LineError, OpenBatch, Parts

HELD_S: Final = 0.25  # lines that wait for less use idle capacity
LONG_HELD_S: Final = 1.0  # lines that wait for longer are too many
SHRINK_EVERY_S: Final = 1.0
FIRST: Final = 4.0
LINE_WAIT_S: Final = 60.0  # before a refused line is sent again


def validated(batch: Batch, errors: tuple[LineError, ...], num_lines: int, now_s: float) -> Batch:
    if errors:
        return replace(batch, status=BatchStatus.FAILED, errors=errors, ended_at=now_s)
    return replace(batch, status=BatchStatus.IN_PROGRESS, num_lines=num_lines, in_progress_at=now_s)


def cancelling(batch: Batch, now_s: float) -> Batch:
    if batch.status not in (BatchStatus.VALIDATING, BatchStatus.IN_PROGRESS):
        return batch
    return replace(batch, status=BatchStatus.CANCELLING, cancelling_at=now_s)


def finalizing(batch: Batch, now_s: float, output_file_id: str, error_file_id: str) -> Batch:
    """End the batch as cancelled, as expired with lines left, or as completed."""
    if batch.status is BatchStatus.CANCELLING:
        ends_as = BatchStatus.CANCELLED
    elif batch.num_completed + batch.num_failed < batch.num_lines:
        ends_as = BatchStatus.EXPIRED
    else:
        ends_as = BatchStatus.COMPLETED
    status = batch.status if ends_as is BatchStatus.CANCELLED else BatchStatus.FINALIZING
    return replace(
        batch,
        status=status,
        ends_as=ends_as,
        finalizing_at=now_s,
        output_file_id=output_file_id,
        error_file_id=error_file_id,
    )


def ended(batch: Batch, now_s: float, *, has_output: bool, has_errors: bool) -> Batch:
    """Close the batch, without its empty files."""
    return replace(
        batch,
        status=batch.ends_as,
        ended_at=now_s,
        output_file_id=batch.output_file_id if has_output else "",
        error_file_id=batch.error_file_id if has_errors else "",
    )


def with_part(batch: Batch, epoch: int, num_completed: int, num_failed: int) -> Batch:
    parts = batch.parts
    if parts and parts[-1].epoch == epoch:
        parts = (*parts[:-1], Parts(epoch=epoch, num=parts[-1].num + 1))
    else:
        parts = (*parts, Parts(epoch=epoch, num=1))
    return replace(
        batch,
        parts=parts,
        num_completed=batch.num_completed + num_completed,
        num_failed=batch.num_failed + num_failed,
    )


def next_part(batch: Batch, epoch: int) -> int:
    return batch.parts[-1].num if batch.parts and batch.parts[-1].epoch == epoch else 0


def part_names(batch: Batch) -> Iterable[str]:
    """Return the counted parts' names in the object store, in order."""
    return [part_name(batch.batch_id, parts.epoch, num) for parts in batch.parts for num in range(parts.num)]


def part_name(batch_id: str, epoch: int, num: int) -> str:
    """Name one part. The epoch keeps former lease holders' parts apart."""
    return f"batches/{batch_id}/{epoch}-{num}"


def next_batches(waiting: Collection[OpenBatch], running: Collection[OpenBatch], most: int) -> list[OpenBatch]:
    """Return the batches to begin: for the tenants with the fewest running, oldest first."""
    per_tenant = Counter(batch.tenant for batch in running)
    left, chosen = sorted(waiting, key=lambda batch: (batch.created_at, batch.batch_id)), list[OpenBatch]()
    while left and len(running) + len(chosen) < most:
        best = min(left, key=lambda batch: per_tenant[batch.tenant])
        left.remove(best)
        chosen.append(best)
        per_tenant[best.tenant] += 1
    return chosen


class Pace:
    """The number of a batch's lines in flight: one more for each that found an engine idle, half as many when lines
    wait long or are refused (additive increase, multiplicative decrease; Chiu and Jain 1989)."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._size, self._shrunk_at = FIRST, float("-inf")

    @property
    def size(self) -> int:
        return max(min(int(self._size), self.most), 1)

    def answered(self, held_s: float, now_s: float) -> None:
        if held_s < HELD_S:
            self._size = min(self._size + 1.0, float(self.most))
        elif held_s > LONG_HELD_S:
            self.refused(now_s)

    def refused(self, now_s: float) -> None:
        if now_s - self._shrunk_at >= SHRINK_EVERY_S:
            self._size, self._shrunk_at = max(self._size / 2, 1.0), now_s


def wait_s(retry_after_s: float | None, num_refused: int) -> float:
    """Return the seconds until a refused line is sent again: as told, else doubling from a second."""
    told = retry_after_s if retry_after_s else float(2 ** min(num_refused, 5))
    return min(max(told, 0.1), LINE_WAIT_S)
