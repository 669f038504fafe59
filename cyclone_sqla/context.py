"""What an action is given about its run."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta

from cyclone_sqla.outcomes import Cancelled


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimedJob:
    """A job as it was claimed: everything a run needs, and no more SQL.

    ``lease`` is the fencing token of this run; it rises with every claim. ``attempt`` counts runs
    from 1. ``expired`` and ``time_left`` compare the deadline with the claim's own clock, so that a
    worker's clock is never compared with the database's.
    """

    id: int
    kind: str
    queue: str
    arguments: str
    attempt: int
    max_attempts: int
    snoozes: int
    lease: int
    run_at: datetime
    created_at: datetime
    deadline: datetime | None = None
    expired: bool = False
    time_left: timedelta | None = None
    timeout: timedelta | None = None
    unique_key: str | None = None
    sequence_key: str | None = None
    tenant: str | None = None
    trace_id: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict[str, str])

    @property
    def attempts_left(self) -> int:
        """How many more runs the job may have after this one."""
        return max(0, self.max_attempts - (self.attempt - self.snoozes))


class Context:
    """The first argument of an action that asks for it: this run, seen from inside."""

    __slots__ = ("_cancel_reason", "_cancelled", "job", "log")

    def __init__(
        self, job: ClaimedJob, log: logging.Logger | logging.LoggerAdapter[logging.Logger]
    ):
        self.job = job
        self.log = log
        self._cancelled = threading.Event()
        self._cancel_reason = ""

    @property
    def attempt(self) -> int:
        """The number of this run: 1 for the first."""
        return self.job.attempt

    @property
    def lease(self) -> int:
        """The fencing token: larger than that of every earlier run of any job."""
        return self.job.lease

    @property
    def deadline(self) -> datetime | None:
        """When the job as a whole must have ended (aware), or None."""
        return self.job.deadline

    @property
    def trace_id(self) -> str | None:
        """The trace id that was given at the enqueue."""
        return self.job.trace_id

    @property
    def cancelled(self) -> bool:
        """Whether this run was asked to stop: cancelled, timed out, past its deadline, or its lease
        lost.
        """
        return self._cancelled.is_set()

    def raise_if_cancelled(self) -> None:
        """Raise :class:`~cyclone_sqla.Cancelled` if this run was asked to stop: call it between
        steps.
        """
        if self._cancelled.is_set():
            raise Cancelled(self._cancel_reason)

    def wait_cancelled(self, seconds: float) -> bool:
        """Sleep for up to ``seconds``, ending early with True when the run is asked to stop."""
        return self._cancelled.wait(seconds)

    def _cancel(self, reason: str) -> None:
        self._cancel_reason = self._cancel_reason or reason
        self._cancelled.set()
