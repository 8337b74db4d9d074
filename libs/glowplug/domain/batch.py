"""Files that clients store and batches of requests that they have answered later.

    validating ──▶ in_progress ──▶ finalizing ──▶ completed
        │  │           │  │             └───────▶ expired       (the window ended first; lines without a result say so)
        │  └▶ cancelling ◀┘ ──────────────────▶ cancelled       (lines with a result keep it)
        └───▶ failed                                            (the input cannot be used: no line was sent)

A batch's row is written by the router that runs it (services/router/batches/runner.py), under a fence. What a client
asks of a batch that is not over, to begin and to cancel, is a row of its own in `BATCHES_OPEN`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

FILES, BATCHES, BATCHES_OPEN = "files", "batches", "batches_open"  # the tables, by file id and by batch id


class BatchStatus(StrEnum):
    """The states of a batch, as OpenAI's API names them."""

    VALIDATING = "validating"  # its input is read, or it waits for others of its tenant
    FAILED = "failed"
    IN_PROGRESS = "in_progress"
    FINALIZING = "finalizing"  # its output is written
    COMPLETED = "completed"
    EXPIRED = "expired"
    CANCELLING = "cancelling"
    CANCELLED = "cancelled"

    @property
    def is_over(self) -> bool:
        return self in _OVER


_OVER: Final = (BatchStatus.FAILED, BatchStatus.COMPLETED, BatchStatus.EXPIRED, BatchStatus.CANCELLED)


class Purpose(StrEnum):
    """What a file is for."""

    BATCH = "batch"
    BATCH_OUTPUT = "batch_output"


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredFile:
    """One file of a tenant. Times are epoch seconds, 0: never. Its bytes stand in the object store under its id."""

    file_id: str
    tenant: str
    name: str
    purpose: Purpose
    num_bytes: int
    created_at: float
    expires_at: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LineError:
    """One thing that is wrong with an input. `line` counts from 1; 0: it is no single line."""

    code: str
    message: str
    line: int = 0
    param: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """The parts that one holder of the lease has stored: `num` of them, numbered from 0, named with its `epoch`."""

    epoch: int
    num: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """One batch. Times are epoch seconds, 0: not yet. A result is part of the batch once its part is counted here."""

    batch_id: str
    tenant: str
    key_id: str  # whose key sends the lines; "": the tenant needs none
    endpoint: str
    input_file_id: str
    created_at: float
    expires_at: float  # the end of its completion window
    output_expires_s: float = 0.0  # for which its output is kept; 0: for ever
    metadata: Mapping[str, str] = field(default_factory=dict)
    status: BatchStatus = BatchStatus.VALIDATING
    errors: tuple[LineError, ...] = ()
    num_lines: int = 0
    num_completed: int = 0
    num_failed: int = 0
    parts: tuple[Parts, ...] = ()
    ends_as: BatchStatus = BatchStatus.COMPLETED  # of one that is being finalized
    output_file_id: str = ""
    error_file_id: str = ""
    in_progress_at: float = 0.0
    finalizing_at: float = 0.0
    cancelling_at: float = 0.0
    ended_at: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenBatch:
    """A batch that is not over, and since when its end has been asked for; 0: nobody has."""

    batch_id: str
    tenant: str
    created_at: float
    cancelled_at: float = 0.0
