"""A job before it is a row, and the answer to an enqueue."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime, timedelta
from operator import itemgetter
from types import MappingProxyType
from typing import Literal, NamedTuple

from cyclone_sqla.lifecycle import State

OnDuplicate = Literal["raise", "return"]
"""What an enqueue does when an active job holds its unique key."""

OnFailure = Literal["dead-letter", "skip", "halt"]
"""What the end of a failed head means for its sequence: go on and keep it as a dead letter, go on,
or stop until a person replays or skips it."""

MAX_ID = 2**63 - 1
"""The largest id of a job, and the largest position in a sequence."""

MAX_PRIORITY = 32767
"""Priorities are small integers: -32768 … 32767, smaller first."""


class JobRef(NamedTuple):
    """The answer to an enqueue: which job there is now.

    ``created`` is False when the enqueue found the job there (``on_duplicate="return"``, or a known
    idempotency key). ``state`` is the state in which the job was inserted or found; None when only
    its idempotency key is left because retention removed the job. Don't send or log a JobRef before
    the transaction commits: after a rollback SQLite can give the same id to another job.
    """

    id: int
    kind: str
    queue: str
    created: bool
    state: State | None


class JobSpec(NamedTuple):
    """A checked job that waits to be enqueued: what :meth:`Action.job` returns.

    ``arguments`` is the JSON text that will be stored. ``None`` in an option means "the default".
    Times: ``process_in``, ``timeout`` are durations; ``process_at``, ``deadline`` are aware
    datetimes.
    """

    kind: str
    arguments: str
    queue: str = "default"
    priority: int = 0
    unique: str | None = None
    on_duplicate: OnDuplicate = "raise"
    idempotency_key: str | None = None
    sequence: str | None = None
    on_failure: OnFailure | None = None
    position: int | None = None
    reject_gap: bool = False
    sequence_lock: bool = False
    process_in: timedelta | None = None
    process_at: datetime | None = None
    deadline: datetime | None = None
    max_attempts: int = 25
    timeout: timedelta | None = None
    tenant: str | None = None
    trace_id: str | None = None
    headers: Mapping[str, str] = MappingProxyType({})

    def carrying(self, arguments: str) -> JobSpec:
        """The same job with other arguments. A hundred thousand are made in a bulk enqueue."""
        return JobSpec._make((self[0], arguments, *self[2:]))

    @property
    def is_plain(self) -> bool:
        """Whether nothing is asked of it but to run: its columns beside those of every job are
        empty.
        """
        return bool(_asked(self) == _NOTHING)

    @property
    def rest(self) -> tuple[object, ...]:
        """All but the kind and the arguments."""
        return self[2:]


_COLUMNS_OF_EVERY_JOB = {"kind", "arguments", "queue", "priority", "max_attempts"}
_OF_NO_COLUMN = {"on_duplicate", "idempotency_key", "reject_gap", "sequence_lock"}

# Whatever else there is, or comes one day, has a column that a plain job leaves empty.
_asked = itemgetter(
    *(
        place
        for place, name in enumerate(JobSpec._fields)
        if name not in _COLUMNS_OF_EVERY_JOB | _OF_NO_COLUMN
    )
)
_NOTHING = _asked(JobSpec(kind="", arguments=""))
