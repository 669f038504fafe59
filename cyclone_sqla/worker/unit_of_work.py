"""What one run does in its database, committed together with the run's own end."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

from sqlalchemy import Connection, event
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session

from cyclone_sqla import binding, operations
from cyclone_sqla.context import ClaimedJob
from cyclone_sqla.dialects import Dialect
from cyclone_sqla.errors import ConfigurationError, LeaseLostError, TransactionError
from cyclone_sqla.operations import HeldRun, Settlement
from cyclone_sqla.outcomes import Outcome
from cyclone_sqla.worker.runs import Written

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncSession

log = logging.getLogger("cyclone_sqla.worker")

MOST_STARTS = 5
"""How often an action is run within one attempt because its transaction met another one."""


class SessionSource(Protocol):
    """Makes the sessions of actions."""

    def open(self) -> Session:
        """A new session for a sync action."""
        ...

    def open_async(self) -> AsyncSession:
        """A new session for an async action."""
        ...


@dataclass(frozen=True, slots=True)
class Books:
    """What the runs of one worker have in common when they write their own ends."""

    dialect: Dialect
    sessions: SessionSource
    mapper: type[Any]
    worker: str
    history_limit: int


class UnitOfWork:
    """The session of one run, and its end.

    Nothing happens, and nothing is opened, unless the action asks for its session. All methods are
    synchronous; those of an async action run in a greenlet of SQLAlchemy's.
    """

    __slots__ = ("_async", "_books", "_job", "_session", "_starts", "is_async", "is_ending")

    def __init__(self, books: Books, job: ClaimedJob, is_async: bool) -> None:
        self._books = books
        self._job = job
        self.is_async = is_async
        self._session: Session | None = None
        self._async: AsyncSession | None = None
        self._starts = 1
        self.is_ending = False
        """Whether the worker has begun to end the transaction: how that went may be unknown."""

    # ---- for the action --------------------------------------------------------------------------

    @property
    def session(self) -> Session:
        """The run's session, opened at its first use."""
        if self.is_async:
            raise ConfigurationError("an async action has ctx.async_session, not ctx.session")
        if self._session is None:
            self._session = self._adopt(self._books.sessions.open())
        return self._session

    @property
    def async_session(self) -> AsyncSession:
        """The run's asynchronous session, opened at its first use."""
        if not self.is_async:
            raise ConfigurationError("a sync action has ctx.session, not ctx.async_session")
        if self._async is None:
            self._async = self._books.sessions.open_async()
            self._session = self._adopt(self._async.sync_session)
        return self._async

    def check_lease(self) -> None:
        """Raise LeaseLostError if the run does not hold its lease any more."""
        session = self.session if not self.is_async else self.async_session.sync_session
        run = HeldRun(self._job.id, self._job.lease)

        def look(connection: Connection, _session: object) -> bool:
            return operations.still_holds(connection, self._books.dialect, run)

        if not binding.run_in_session(session, look, self._books.mapper):
            raise LeaseLostError(f"the lease of job {self._job.id} was lost")

    # ---- for the executor ------------------------------------------------------------------------

    @property
    def is_open(self) -> bool:
        """Whether the action asked for its session."""
        return self._session is not None

    def commit(self, outcome: Outcome) -> Written | None:
        """Commit what the action did, and how its run ends; None if it did nothing.

        Raises what the database raises, LeaseLostError if another run has the job by now, Cancelled
        if the run was asked to stop, TransactionError if the action ended the transaction itself.
        """
        session = self._session
        if session is None:
            return None
        session.flush()
        if not session.in_transaction():
            self.roll_back()
            return None
        written = self._write(session, outcome)
        self.is_ending = True
        type(session).commit(session)
        type(session).close(session)
        self._forget()
        return written

    def starts_over(self, exc: BaseException) -> bool:
        """Roll back; whether the action is worth another start in the same attempt.

        It is if its transaction met another one (a deadlock, a serialization failure, SQLite's
        write lock), and that not again and again.
        """
        is_worth = self._was_met(exc) and self._starts < MOST_STARTS
        self.roll_back()
        if is_worth:
            self._starts += 1
            log.debug("job %s starts over: its transaction met another one", self._job.id)
        return is_worth

    def roll_back(self) -> None:
        """Undo what the action did, and give the connection back. Never raises."""
        session = self._session
        if session is None:
            return
        self.is_ending = True
        try:
            type(session).rollback(session)
            type(session).close(session)
        except Exception as exc:  # noqa: BLE001 - any driver; a broken connection has rolled back
            log.debug("the session of job %s was dropped: %r", self._job.id, exc)
            type(session).invalidate(session)
        finally:
            self._forget()

    # ---- the end ---------------------------------------------------------------------------------

    def _write(self, session: Session, outcome: Outcome) -> Written:
        """The fence and the end of the run are the transaction's last statement."""
        job, books = self._job, self._books
        end = Settlement(job.id, job.lease, job.attempt, books.worker, outcome, job.sequence_key)

        def write(connection: Connection, _session: object) -> Written:
            looks = operations.settle_within(
                connection, books.dialect, end, history_limit=books.history_limit
            )
            return Written(calls_for_a_look=looks)

        return binding.run_in_session(session, write, books.mapper)

    def _forget(self) -> None:
        self._session = self._async = None
        self.is_ending = False

    def _was_met(self, exc: BaseException) -> bool:
        """Whether this very transaction was the victim: any other is the action's own affair."""
        session, dialect = self._session, self._books.dialect
        if session is None or not dialect.is_conflict(exc):
            return False
        if dialect.one_writer or not session.is_active:
            return True
        try:
            binding.connection_of(session, self._books.mapper).exec_driver_sql("SELECT 1")
        except DBAPIError:
            return True  # it is aborted
        return False

    # ---- what the action may not do --------------------------------------------------------------

    def _adopt(self, session: Session) -> Session:
        session.info[_UNIT] = self
        for name in ("commit", "rollback", "close", "reset", "invalidate", "prepare"):
            setattr(session, name, _refuse)
        return session


_UNIT = "cyclone_unit_of_work"

_ENDED = (
    "the action ended the transaction of its session by itself, so its writes can't commit "
    "together with its completion. The worker commits after the action has returned and rolls back "
    "if it raises; use session.begin_nested() for a part that may fail, or a session of your own "
    "for what has to be committed at once."
)


def _refuse(*_: object, **__: object) -> NoReturn:
    raise TransactionError(_ENDED)


# Once for all sessions: to listen to one costs 20 µs.
@event.listens_for(Session, "before_commit")
def _refuse_commit(session: Session) -> None:
    unit = session.info.get(_UNIT)
    if unit is None or unit.is_ending or session.in_nested_transaction():
        return  # the event also comes when a savepoint is released
    raise TransactionError(_ENDED)
