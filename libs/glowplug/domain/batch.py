"""Describe clients' files and batches of requests to be answered later.

    validating ──▶ in_progress ──▶ finalizing ──▶ completed
        │  │           │  │             └───────▶ expired       (the window ended first; lines without a result say so)
        │  └▶ cancelling ◀┘ ──────────────────▶ cancelled       (lines with a result keep it)
        └───▶ failed                                            (the input cannot be used: no line was sent)

Only the router that runs a batch (services/router/batches/runner.py) writes its row, under a fence. A client's request
to begin or cancel it is a row of its own in `BATCHES_OPEN`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

FILES, BATCHES, BATCHES_OPEN = "files", "batches", "batches_open"  # tables, by file id and batch id


class BatchStatus(StrEnum):
    """The states of a batch, as OpenAI's API names them."""

    VALIDATING = "validating"  # input is read, or waits for the tenant's others
    FAILED = "failed"
    IN_PROGRESS = "in_progress"
    FINALIZING = "finalizing"
    COMPLETED = "completed"
    EXPIRED = "expired"
    CANCELLING = "cancelling"
    CANCELLED = "cancelled"

    @property
    def is_over(self) -> bool:
        return self in _OVER


_OVER: Final = (BatchStatus.FAILED, BatchStatus.COMPLETED, BatchStatus.EXPIRED, BatchStatus.CANCELLED)


class Purpose(StrEnum):
    BATCH = "batch"
    BATCH_OUTPUT = "batch_output"


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredFile:
    """A tenant's file. Epoch seconds, 0: never. Its bytes are in the object store under its id."""

    file_id: str
    tenant: str
    name: str
    purpose: Purpose
    num_bytes: int
    created_at: float
    expires_at: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LineError:
    """A fault in an input. `line` counts from 1; 0: no single line."""

    code: str
    message: str
    line: int = 0
    param: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """Parts stored by one lease holder, numbered from 0, named by its `epoch`."""

    epoch: int
    num: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Epoch seconds, 0: not yet. A result belongs to the batch once its part is counted here."""

    batch_id: str
    tenant: str
    key_id: str  # key of its lines; "": not required
    endpoint: str
    input_file_id: str
    created_at: float
    expires_at: float  # end of the completion window
    output_expires_s: float = 0.0  # lifetime of the output; 0: for ever
    metadata: Mapping[str, str] = field(default_factory=dict)
    status: BatchStatus = BatchStatus.VALIDATING
    errors: tuple[LineError, ...] = ()
    num_lines: int = 0
    num_completed: int = 0
    num_failed: int = 0
    parts: tuple[Parts, ...] = ()
    ends_as: BatchStatus = BatchStatus.COMPLETED  # after finalizing
    output_file_id: str = ""
    error_file_id: str = ""
    in_progress_at: float = 0.0
    finalizing_at: float = 0.0
    cancelling_at: float = 0.0
    ended_at: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenBatch:
    """A batch that is not over, and when its end was requested; 0: never."""

    batch_id: str
    tenant: str
    created_at: float
    cancelled_at: float = 0.0
