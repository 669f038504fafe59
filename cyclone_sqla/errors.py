"""Everything that cyclone-sqla raises, as one tree.

::

    CycloneError
    ├── ConfigurationError        settings or wiring that cannot work
    │   ├── RegistrationError     a function that cannot be an action
    │   └── SchemaError           the queue's tables are missing, too old or too new
    ├── InvalidJobError           what was asked for cannot be a job (also a ValueError)
    │   ├── InvalidKeyError       an empty, too long or unstorable key
    │   └── PayloadError          an argument that would not arrive as it was given
    ├── DuplicateError            an active job holds the unique key
    ├── DuplicatePositionError    the position in the sequence is taken
    ├── SequenceGapError          the position before is not there, and a gap was not wanted
    ├── TransactionError          the caller's transaction cannot take part
    │   ├── SnapshotError         SQLite: the transaction read too early to write now
    │   └── DatabaseBusyError     another process holds SQLite's write lock, or migrates
    ├── JobNotFoundError          no job has this id (also a LookupError)
    ├── UnknownKindError          no action is registered for the kind (also a LookupError)
    ├── InvalidTransitionError    the job's state does not allow the verb
    └── LeaseLostError            the run no longer owns its job
        └── NotRunningError       nor does any other: it ended before, or was taken back

``TransactionError.retryable`` says whether running the whole unit of work again can help.

Coming from *orderedjob*, its nine errors are these:

===================== =====================================================================
orderedjob            cyclone-sqla
===================== =====================================================================
ErrNotFound           :class:`JobNotFoundError`
ErrAlreadyExists      :class:`DuplicateError`, or a :class:`~cyclone_sqla.JobRef` with
                      ``created=False`` when the enqueue asked for that
ErrInvalidTransition  :class:`InvalidTransitionError`
ErrLeaseConflict      :class:`LeaseLostError`
ErrChainBlocked       no error: the job waits, and its ``waits_for`` says for what
ErrSequenceGap        :class:`SequenceGapError`
ErrHandlerNotFound    :class:`UnknownKindError` where a person names a kind; a worker never
                      claims a kind that it does not know
ErrNotClaimable       :class:`InvalidTransitionError`
ErrDuplicateChainSeq  :class:`DuplicatePositionError`
===================== =====================================================================
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cyclone_sqla.job_spec import JobRef

__all__ = [
    "ConfigurationError",
    "CycloneError",
    "DatabaseBusyError",
    "DuplicateError",
    "DuplicatePositionError",
    "InvalidJobError",
    "InvalidKeyError",
    "InvalidTransitionError",
    "JobNotFoundError",
    "LeaseLostError",
    "NotRunningError",
    "PayloadError",
    "RegistrationError",
    "SchemaError",
    "SequenceGapError",
    "SnapshotError",
    "TransactionError",
    "UnknownKindError",
]


class CycloneError(Exception):
    """The base of every error of this library."""


class ConfigurationError(CycloneError):
    """Settings or wiring that cannot work; the message names the setting and what to change."""


class RegistrationError(ConfigurationError):
    """A function that cannot be an action, refused where it is decorated or first used."""


class SchemaError(ConfigurationError):
    """The queue's tables are missing here, or of a version that this code can't use."""


class InvalidJobError(CycloneError, ValueError):
    """An option or a combination of options that cannot be a job.

    Nothing was sent to the database.
    """


class InvalidKeyError(InvalidJobError):
    """A unique, sequence or idempotency key that is empty, not storable, or over 256 bytes."""


class PayloadError(InvalidJobError):
    """An argument that would not arrive in the worker as it was given. Nothing was sent to the
    database.

    ``path`` points into the arguments, e.g. ``rows[3].name``.
    """

    def __init__(self, kind: str, path: str, reason: str) -> None:
        super().__init__(f"{kind}: {path}: {reason}" if path else f"{kind}: {reason}")
        self.kind = kind
        self.path = path
        self.reason = reason

    def __reduce__(self) -> tuple[type[PayloadError], tuple[str, str, str]]:
        return type(self), (self.kind, self.path, self.reason)


class DuplicateError(CycloneError):
    """An active job already holds this unique key: a normal answer, not a crash.

    ``job`` is the holder; ``duplicates`` lists every refused input of a bulk enqueue (its first
    entry is what ``kind``, ``key`` and ``job`` speak of). Nothing was inserted, and the caller's
    transaction is usable.
    """

    def __init__(self, duplicates: Sequence[Duplicate]) -> None:
        first = duplicates[0]
        more = f" (and {len(duplicates) - 1} more)" if len(duplicates) > 1 else ""
        holder = "another job of the same call" if first.job is None else f"job {first.job_id}"
        super().__init__(
            f"an active {first.kind} job already holds the unique key {first.key!r}: {holder}{more}"
        )
        self.duplicates = tuple(duplicates)
        self.kind = first.kind
        self.key = first.key
        self.job = first.job

    @property
    def job_id(self) -> int | None:
        """The holder's id; None only where the key is twice in one bulk enqueue."""
        return self.duplicates[0].job_id

    def __reduce__(self) -> tuple[type[DuplicateError], tuple[tuple[Duplicate, ...]]]:
        return type(self), (self.duplicates,)


class Duplicate:
    """One refused input: its place, its kind and key, and the job that holds the key."""

    __slots__ = ("index", "job", "key", "kind")

    def __init__(self, index: int, kind: str, key: str, job: JobRef | None) -> None:
        self.index = index
        self.kind = kind
        self.key = key
        self.job = job

    @property
    def job_id(self) -> int | None:
        """The holder's id; None where another input of the same call holds the key."""
        return self.job.id if self.job is not None else None

    def __repr__(self) -> str:
        return f"Duplicate({self.index}, {self.kind!r}, {self.key!r}, job_id={self.job_id})"


class DuplicatePositionError(CycloneError):
    """A job of the sequence has this position already. Nothing was inserted.

    ``job_id`` is the one that has it; None if retention has removed it since.
    """

    def __init__(self, key: str, position: int, job_id: int | None) -> None:
        who = "a job that is over" if job_id is None else f"job {job_id}"
        super().__init__(f"position {position} of sequence {key!r} is taken by {who}")
        self.key = key
        self.position = position
        self.job_id = job_id

    def __reduce__(self) -> tuple[type[DuplicatePositionError], tuple[str, int, int | None]]:
        return type(self), (self.key, self.position, self.job_id)


class SequenceGapError(CycloneError):
    """The position before is not there, and no gap was wanted. Nothing was inserted."""

    def __init__(self, key: str, position: int) -> None:
        super().__init__(
            f"position {position} of sequence {key!r} would leave a gap: enqueue position "
            f"{position - 1} first, or without reject_gap"
        )
        self.key = key
        self.position = position

    def __reduce__(self) -> tuple[type[SequenceGapError], tuple[str, int]]:
        return type(self), (self.key, self.position)


class TransactionError(CycloneError):
    """The caller's transaction cannot take part in an enqueue; the message says what to do."""

    retryable: bool = False


class SnapshotError(TransactionError):
    """SQLite: this transaction read before another one committed, so it may never write.

    Roll back and run the whole unit of work again.
    """

    retryable = True


class DatabaseBusyError(TransactionError):
    """A lock was not free in time: SQLite's write lock, or one that a migration needs.

    After an enqueue the transaction stays usable.
    """

    retryable = True


class JobNotFoundError(CycloneError, LookupError):
    """No job has this id: it never was, was rolled back, or retention removed it."""


class UnknownKindError(CycloneError, LookupError):
    """No action is registered for this kind in this application."""


class InvalidTransitionError(CycloneError):
    """The job's state does not allow this verb; the message names the state and what it allows."""


class LeaseLostError(CycloneError):
    """Another worker may have this job now: the run's results were not and will not be written."""


class NotRunningError(LeaseLostError):
    """The run has ended already, or was taken back, and no other has the job yet.

    Nothing was written.
    """
