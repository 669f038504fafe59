"""Runs an application's jobs on the connection of a test, by the code that workers run."""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import json
import threading
from collections.abc import Callable, Coroutine, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, Literal, Self, TypeAlias

import sqlalchemy as sa
from sqlalchemy import Connection, event
from sqlalchemy.orm import Session, SessionTransaction

from cyclone_sqla import operations
from cyclone_sqla.actions import Action
from cyclone_sqla.app import Cyclone
from cyclone_sqla.context import ClaimedJob
from cyclone_sqla.dialects.sqlite import begin_before_savepoints
from cyclone_sqla.errors import ConfigurationError, CycloneError
from cyclone_sqla.figures import JobEvent
from cyclone_sqla.job_spec import JobRef
from cyclone_sqla.lifecycle import DUE_BY_TIME, TERMINAL, State
from cyclone_sqla.models import Job
from cyclone_sqla.operations import Claiming, Settlement
from cyclone_sqla.outcomes import Discard, Discarded, Outcome, Retried, Retry
from cyclone_sqla.port import JoinedConnection, Upkeep
from cyclone_sqla.settings import DEFAULT_SETTINGS
from cyclone_sqla.testing.clock import ManualClock
from cyclone_sqla.worker.runs import Run, Written, is_awaitable
from cyclone_sqla.worker.unit_of_work import Books, UnitOfWork
from cyclone_sqla.worker.verdicts import End, conclude, outcome_of

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncSession

CrashPoint: TypeAlias = Literal["claimed", "before_settle", "after_settle"]
"""Where a worker dies: before the action, after it, or when its end is written."""

LIMIT = 1_000
"""Jobs that one :meth:`CycloneEnv.run_until_idle` runs unless it is told otherwise."""

WORKER = "cyclone-env"
"""The name of the worker that a test is."""

_LEASE = DEFAULT_SETTINGS.lease_length


class NotIdleError(CycloneError, AssertionError):
    """The jobs of a test would not come to an end."""


class CycloneEnv:
    """The jobs of one test.

    ::

        with engine.connect() as connection, connection.begin() as outer:
            with CycloneEnv(connection, cyclone) as env:
                ...
            outer.rollback()

    ``connection`` has a transaction open, which the test rolls back at its end: jobs run on it, see
    what the test has not committed, and commit to savepoints. Nobody else ever sees anything.
    ``auto_start`` runs the jobs that are due whenever a session on the connection commits; without
    it they wait for :meth:`run_until_idle`. An attempt that fails raises in the test what the
    action raised, unless ``raise_errors`` is False. While it is entered, the application's clock is
    :attr:`clock`.
    """

    def __init__(
        self,
        connection: Connection,
        app: Cyclone,
        *,
        auto_start: bool = True,
        raise_errors: bool = True,
    ) -> None:
        self.connection = connection
        self.app = app
        self.auto_start = auto_start
        self.raise_errors = raise_errors
        self.clock = ManualClock()
        self._session: Session | None = None
        self._is_running = False
        self._has_committed = False
        self._crash: _Crash | None = None

    # ---- running ---------------------------------------------------------------------------------

    def run_until_idle(self, limit: int = LIMIT) -> int:
        """Run jobs that are due, one after the other, until none is; how many runs there were.

        Jobs that are due later don't count: move the clock with :meth:`advance`. Raises what a
        failed action raised (see ``raise_errors``), and NotIdleError after ``limit`` runs.
        """
        self._flush()
        runs = 0
        with self._only_once():
            while (job := self._next_job()) is not None:
                if runs == limit:
                    raise NotIdleError(
                        f"after {limit:,} runs there is still a job to run, a {job.kind!r}: does "
                        "it enqueue itself for ever? If not, give run_until_idle() a larger limit."
                    )
                self._run(job)
                runs += 1
        self._expire()
        return runs

    def run(self, job: JobRef | Job) -> Job:
        """Run one job now, and only that; the job as it is after it.

        A delayed or retrying job need not wait for its time: it is given the present one, which its
        history tells. AssertionError says what else keeps a job from running: that it is not its
        turn, that it is paused or has ended. UnknownKindError if it has no action; JobNotFoundError
        if it is not there. Raises what the action raised (see ``raise_errors``).
        """
        self._flush()
        with self._only_once():
            self._run(self._claim(job.id))
        self._expire()
        return self.app.get(self.connection, job.id)

    def crash(self, at: CrashPoint, job: JobRef | Job | None = None) -> None:
        """Let the worker die in the next run, or the next one of ``job``.

        The job stays as it was, with its lease: :meth:`advance` the clock by more than a minute,
        and it runs again. What the run had not committed is lost.
        """
        self._crash = _Crash(at, None if job is None else job.id)

    # ---- time ------------------------------------------------------------------------------------

    @property
    def now(self) -> datetime:
        """The present time of this test."""
        return self.clock.now()

    def advance(self, by: timedelta | None = None, /, **parts: float) -> None:
        """Let time pass: a timedelta, or its parts, as in ``advance(hours=24)``.

        With ``auto_start``, what becomes due runs.
        """
        self.clock.advance(by if by is not None else timedelta(**parts))
        if self.auto_start:
            self.run_until_idle()

    def freeze(self, at: datetime | None = None) -> None:
        """Make it this time (aware). Without one nothing changes: the clock stands still anyhow,
        until it is advanced.
        """
        if at is not None:
            self.clock.set(at)

    # ---- looking ---------------------------------------------------------------------------------

    @property
    def session(self) -> Session:
        """A session on the connection, for the test's own use; its commits are savepoints."""
        if self._session is None:
            self._session = self._join()
        return self._session

    def enqueued(self, action: Action[..., Any] | str, /, **arguments: Any) -> list[Job]:
        """The jobs of an action (or kind) that have not ended, with at least these arguments."""
        return [job for job in self.jobs(action, **arguments) if job.state not in TERMINAL]

    def jobs(self, action: Action[..., Any] | str, /, **arguments: Any) -> list[Job]:
        """All jobs of an action (or kind) with at least these arguments, by id."""
        self._flush()
        kind = action if isinstance(action, str) else action.kind
        job = self.app.job_class
        with self._only_once(), self._join() as session:
            found = session.scalars(sa.select(job).where(job.kind == kind).order_by(job.id)).all()
            session.expunge_all()
        return [each for each in found if arguments.items() <= self._arguments(each).items()]

    def _arguments(self, job: Job) -> dict[str, Any]:
        """By name, as the action gets them; of a kind without an action, as they are stored.

        Rows are those of the test's own session.
        """
        action = self.app.registry.find(job.kind)
        if action is None:
            stored: dict[str, Any] = json.loads(job.arguments)
            return stored
        args, kwargs = self._decoded(action, job.arguments)
        context = [None] if action.takes_context else []
        bound = inspect.signature(action.fn).bind(*context, *args, **kwargs)
        return dict(bound.arguments)

    def _decoded(
        self, action: Action[..., Any], text: str
    ) -> tuple[Sequence[Any], Mapping[str, Any]]:
        if action.takes_rows:
            with self._only_once():
                return action.load(text, self.session)
        return action.decode(text)

    def history(self, job: JobRef | Job) -> list[JobEvent]:
        """What is written down of a job: its failed attempts, and people's acts."""
        return self.app.history(self.connection, job.id)

    def assert_enqueued(self, action: Action[..., Any] | str, /, **arguments: Any) -> Job:
        """The one job of the action that waits with these arguments; AssertionError if it is not
        one.
        """
        return self._the_one(action, arguments, self.enqueued(action, **arguments), "waits")

    def assert_completed(self, action: Action[..., Any] | str, /, **arguments: Any) -> Job:
        """The one completed job of the action with these arguments; else AssertionError."""
        return self._in_state(State.COMPLETED, action, arguments)

    def assert_discarded(self, action: Action[..., Any] | str, /, **arguments: Any) -> Job:
        """The one discarded job of the action with these arguments; else AssertionError."""
        return self._in_state(State.DISCARDED, action, arguments)

    def _in_state(
        self, state: State, action: Action[..., Any] | str, arguments: Mapping[str, Any]
    ) -> Job:
        found = [job for job in self.jobs(action, **arguments) if job.state == state]
        return self._the_one(action, arguments, found, f"is {state}")

    def _the_one(
        self,
        action: Action[..., Any] | str,
        arguments: Mapping[str, Any],
        found: Sequence[Job],
        what: str,
    ) -> Job:
        if len(found) == 1:
            return found[0]
        kind = action if isinstance(action, str) else action.kind
        told = "".join(
            f"\n  job {job.id}: {job.state}, {job.arguments}, {job.last_error or 'no error'}"
            for job in self.jobs(kind)
        )
        asked = f" with {dict(arguments)!r}" if arguments else ""
        raise AssertionError(
            f"{len(found)} jobs instead of one {what} of {kind!r}{asked}; of this kind there are:"
            f"{told or ' none'}"
        )

    # ---- life ------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        if not self.connection.in_transaction():
            raise ConfigurationError(
                "CycloneEnv needs a connection whose transaction is open: connection.begin()"
            )
        begin_before_savepoints(self.connection.engine)
        self._clock_before = self.app.clock
        self.app.use_clock(self.clock)
        self._dialect = self.app.dialect(self.connection.dialect.name)
        self._held = JoinedConnection(self.connection, self._dialect)
        self._upkeep = Upkeep(self.app, self._dialect, self._held)
        self._rescued_at: datetime | None = None
        event.listen(Session, "after_commit", self._note_commit)
        event.listen(Session, "after_transaction_end", self._start_after_commit)
        return self

    def __exit__(self, *_: object) -> None:
        event.remove(Session, "after_commit", self._note_commit)
        event.remove(Session, "after_transaction_end", self._start_after_commit)
        if self._session is not None:
            self._session.close()
            self._session = None
        self.app.use_clock(self._clock_before)

    def _note_commit(self, session: Session) -> None:
        if not self._is_running and session.bind is self.connection:
            self._has_committed = not session.in_nested_transaction()

    def _start_after_commit(self, session: Session, ended: SessionTransaction) -> None:
        if self._has_committed and ended.parent is None and session.bind is self.connection:
            self._has_committed = False
            if self.auto_start:
                self.run_until_idle()

    # ---- one run ---------------------------------------------------------------------------------

    def _next_job(self) -> ClaimedJob | None:
        """Claim one job that is due, whatever has to be rescued, staged or admitted for that."""
        while True:
            pause = self._look()
            kinds = self.app.registry.kinds()
            for queue in self._queues():
                wanted = Claiming({queue: 1}, kinds, WORKER, _LEASE)
                with self._held.step() as connection:
                    claimed = operations.claim(connection, self._dialect, wanted)
                if claimed:
                    return claimed[0]
            if pause > 0:
                return None

    def _look(self) -> float:
        """A lease runs out as the clock moves, and not otherwise."""
        now = self.clock.now()
        if self._rescued_at != now:
            self._upkeep.rescue()
            self._rescued_at = now
        return self._upkeep.stage()

    def _queues(self) -> Sequence[str]:
        """Where jobs are available: somebody serves every queue."""
        job = self.app.job_class
        waiting = sa.select(job.queue).where(job.state == State.AVAILABLE)
        return self.connection.scalars(waiting.distinct().order_by(job.queue)).all()

    def _claim(self, job_id: int) -> ClaimedJob:
        """This job, which need not be due; refused where more than a time keeps it from running."""
        job = self.app.get(self.connection, job_id)
        self.app.registry.get(job.kind)
        if job.waits_for in DUE_BY_TIME:
            self.app.reschedule(self.connection, job_id, process_in=0, by=WORKER)
        while self._look() <= 0:
            pass
        with self._held.step() as connection:
            claimed = operations.claim_this(connection, self._dialect, job_id, WORKER, _LEASE)
        if claimed is None:
            raise AssertionError(self.app.explain(self.connection, job_id).text)
        return claimed

    def _run(self, job: ClaimedJob) -> None:
        crash = self._crash_of(job)
        if crash == "claimed":
            return
        action = self.app.registry.get(job.kind)
        unit = _Unit(self._books(), job, action.is_async)
        run = Run(job, action, unit)
        run.begin()
        end: End | None = None
        error: Exception | None = None
        while end is None:
            outcome, error = self._try(run)
            if crash == "before_settle":
                unit.roll_back()
                return
            end = conclude(run, outcome, error)
        if end.written is None:
            self._settle(job, end.outcome)
        self._raise(end.outcome, error or unit.error)

    def _try(self, run: Run) -> tuple[Outcome, Exception | None]:
        """As a worker does it, but in this thread: pytest's own exceptions go on to pytest."""
        try:
            value = contextvars.Context().run(run.call)
            if is_awaitable(value):
                value = self._await(value)
            return run.completed(value), None
        except Exception as exc:  # noqa: BLE001 - it is told by the outcome, and raised at the end
            return outcome_of(run, exc), exc
        except BaseException:
            if run.unit is not None:
                run.unit.roll_back()
            raise

    def _raise(self, outcome: Outcome, error: Exception | None) -> None:
        """What an action decided is no accident; everything else ends the test."""
        is_wanted = not self.raise_errors or isinstance(error, Retry | Discard)
        if not is_wanted and isinstance(outcome, Retried | Discarded):
            raise error if error is not None else AssertionError(outcome.failure.error)

    def _settle(self, job: ClaimedJob, outcome: Outcome) -> None:
        limit = DEFAULT_SETTINGS.history_limit
        end = Settlement(job.id, job.lease, job.attempt, WORKER, outcome, job.sequence_key)
        with self._held.transaction() as connection:
            operations.settle(connection, self._dialect, [end], history_limit=limit)

    def _crash_of(self, job: ClaimedJob) -> CrashPoint | None:
        crash = self._crash
        if crash is None or crash.job_id not in (None, job.id):
            return None
        self._crash = None
        return crash.at

    def _books(self) -> Books:
        limit = DEFAULT_SETTINGS.history_limit
        sessions = _Sessions(self._join, self._join_async)
        return Books(self._dialect, sessions, self.app.job_class, WORKER, limit)

    def _await(self, value: Any) -> Any:
        """What an awaitable comes to, in an event loop of its own: the test may be in one."""

        async def wait() -> Any:
            return await value

        return _run_apart(wait())

    # ---- the test's own session ------------------------------------------------------------------

    def _join(self) -> Session:
        return Session(bind=self.connection, join_transaction_mode="create_savepoint")

    def _join_async(self) -> AsyncSession:
        raise ConfigurationError(
            "ctx.async_session needs an asynchronous connection: take AsyncCycloneEnv"
        )

    @contextmanager
    def _only_once(self) -> Generator[None]:
        """What is done inside starts nothing by itself."""
        before, self._is_running = self._is_running, True
        try:
            yield
        finally:
            self._is_running = before

    def _flush(self) -> None:
        if self._session is not None:
            self._session.flush()

    def _expire(self) -> None:
        if self._session is not None:
            self._session.expire_all()


@dataclass(frozen=True)
class _Crash:
    at: CrashPoint
    job_id: int | None


class _Unit(UnitOfWork):
    """The transaction of a run, which remembers why it could not commit."""

    __slots__ = ("error",)

    def __init__(self, books: Books, job: ClaimedJob, is_async: bool) -> None:
        super().__init__(books, job, is_async)
        self.error: Exception | None = None

    def commit(self, outcome: Outcome) -> Written | None:
        self.error = None
        try:
            return super().commit(outcome)
        except Exception as exc:
            self.error = exc
            raise


class _Sessions:
    """Gives runs their sessions: on the test's connection."""

    def __init__(self, join: Callable[[], Session], join_async: Callable[[], AsyncSession]) -> None:
        self.open = join
        self.open_async = join_async


def _run_apart(coroutine: Coroutine[Any, Any, Any]) -> Any:
    came: list[Any] = []
    failed: list[BaseException] = []

    def run() -> None:
        try:
            came.append(asyncio.run(coroutine))
        except BaseException as exc:  # noqa: BLE001 - raised below, in the test's own thread
            failed.append(exc)

    thread = threading.Thread(target=run, name="cyclone-env")
    thread.start()
    thread.join()
    if failed:
        raise failed[0]
    return came[0]
