"""What an action is given about its run."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, NamedTuple, Protocol

from cyclone_sqla.errors import ConfigurationError
from cyclone_sqla.outcomes import Cancelled

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncSession
    from sqlalchemy.orm import Session


class ClaimedJob(NamedTuple):
    """A job as it was claimed: everything a run needs, and no more SQL.

    ``lease`` is the fencing token of this run; it rises with every claim. ``attempt`` counts runs
    from 1. ``time_left`` compares the deadline with the claim's own clock, so that a worker's clock
    is never compared with the database's.

    Its fields are the columns that a claim returns, in their order.
    """

    id: int
    kind: str
    queue: str
    priority: int
    arguments: str
    attempt: int
    max_attempts: int
    snoozes: int
    lease: int
    run_at: datetime
    created_at: datetime
    deadline: datetime | None = None
    time_left: timedelta | None = None
    timeout: timedelta | None = None
    unique_key: str | None = None
    sequence_key: str | None = None
    tenant: str | None = None
    trace_id: str | None = None
    headers_json: str | None = None

    @property
    def headers(self) -> Mapping[str, str]:
        """What was enqueued as the job's headers; empty without any."""
        headers: dict[str, str] = json.loads(self.headers_json) if self.headers_json else {}
        return headers

    @property
    def expired(self) -> bool:
        """Whether the deadline had passed at the claim."""
        return self.time_left is not None and self.time_left <= timedelta(0)

    @property
    def attempts_left(self) -> int:
        """How many more runs the job may have after this one."""
        return max(0, self.max_attempts - (self.attempt - self.snoozes))


class Transaction(Protocol):
    """What a run does in its database, as the run's context shows it."""

    @property
    def session(self) -> Session:
        """See :attr:`Context.session`."""
        ...

    @property
    def async_session(self) -> AsyncSession:
        """See :attr:`Context.async_session`."""
        ...

    def check_lease(self) -> None:
        """See :meth:`Context.check_lease`."""
        ...


class Context:
    """The first argument of an action that asks for it: this run, seen from inside."""

    __slots__ = ("_cancel_reason", "_cancelled", "_transaction", "job", "log")

    def __init__(
        self,
        job: ClaimedJob,
        log: logging.Logger | logging.LoggerAdapter[logging.Logger],
        transaction: Transaction | None = None,
    ):
        self.job = job
        self.log = log
        self._transaction = transaction
        self._cancelled = threading.Event()
        self._cancel_reason = ""

    @property
    def session(self) -> Session:
        """A Session of a sync action, opened at its first use.

        What is written through it, the jobs enqueued in it and the job's own completion commit in
        one transaction after the action has returned: all of it happens exactly once. If the action
        raises, or its lease was lost meanwhile, all of it is rolled back. The worker commits; the
        action may flush, and use ``begin_nested()``.

        It comes from the sessionmaker, or for the engine, that ``Cyclone(database=…)`` got. Raises
        ConfigurationError in an async action, which has :attr:`async_session`.
        """
        return self._its_transaction().session

    @property
    def async_session(self) -> AsyncSession:
        """An AsyncSession of an async action: the same as :attr:`session` is for a sync one."""
        return self._its_transaction().async_session

    def check_lease(self) -> None:
        """Raise LeaseLostError if another run has the job by now: a look, in :attr:`session`.

        The commit looks again by itself. In an async action call it by
        ``await ctx.async_session.run_sync(lambda _: ctx.check_lease())``.
        """
        self._its_transaction().check_lease()

    def _its_transaction(self) -> Transaction:
        if self._transaction is None:
            raise ConfigurationError("this run has no database: it is not a worker's")
        return self._transaction

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
