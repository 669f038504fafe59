"""Jobs by hand, for whoever brings a worker of their own: enqueue, claim, renew, complete, fail.

It runs what workers run, and needs no loop beside it. :class:`Queue` is all there is to know.
"""

from __future__ import annotations

import math
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Collection, Generator, Iterable, Mapping
from contextlib import AbstractContextManager, contextmanager
from datetime import UTC, datetime, timedelta
from typing import Any, NoReturn, Self, TypeVar

import sqlalchemy as sa
from pydantic_core import to_json
from sqlalchemy import Connection, Engine
from sqlalchemy.exc import DBAPIError
from typing_extensions import Unpack

from cyclone_sqla import operations, schema_version
from cyclone_sqla.app import Cyclone
from cyclone_sqla.backoff import MAX_DELAY
from cyclone_sqla.context import ClaimedJob
from cyclone_sqla.dialects import Dialect, WorkerConnection
from cyclone_sqla.errors import (
    ConfigurationError,
    JobNotFoundError,
    LeaseLostError,
    NotRunningError,
    TransactionError,
)
from cyclone_sqla.failures import Failure
from cyclone_sqla.job_spec import JobRef
from cyclone_sqla.lifecycle import State
from cyclone_sqla.models import Job
from cyclone_sqla.operations import Claiming, HeldRun, Renewal, Settlement
from cyclone_sqla.options import Options, check_name
from cyclone_sqla.outcomes import Cancelled, Completed, Discarded, Outcome, Retried
from cyclone_sqla.payload import find_fault, not_plain_json
from cyclone_sqla.settings import DEFAULT_SETTINGS, MAX_SECONDS, WorkerSettings
from cyclone_sqla.urls import url_of, worker_url
from cyclone_sqla.worker.instance_lock import InstanceLock
from cyclone_sqla.worker.maintenance import Rescuer, Stager
from cyclone_sqla.worker.rhythm import Contact, Rhythm
from cyclone_sqla.worker.verdicts import counted
from cyclone_sqla.worker.wakeup import Source, Wakeup, source_on

T = TypeVar("T")

LONGEST_WAIT = 3600.0
"""Seconds that :meth:`Queue.ready` waits at most."""

TRIES = 10
"""How often a transaction that met another one is run."""


class Queue:
    """The verbs of a worker, one by one.

    ::

        with Queue(cyclone, engine, kinds=["resize"]) as queue:
            while not stopping:
                for job in queue.claim(limit=10):
                    try:
                        resize(**json.loads(job.arguments))
                    except OSError as exc:
                        queue.fail(job, exc)
                    else:
                        queue.complete(job)
                queue.ready(timeout=0.5)

    On an Engine (the application's own, if none is given) every call commits by itself, on a
    connection of the queue's own. On a Connection every call takes part in its transaction, and
    nobody sees anything before that commits: see :meth:`within`.

    ``kinds`` are those that it claims, by default those of the application's actions. ``worker`` is
    the name under which it claims, by default one that no other process has. Safe to use from
    several threads, which then take turns.
    """

    def __init__(
        self,
        cyclone: Cyclone,
        database: Engine | Connection | None = None,
        *,
        kinds: Collection[str] | None = None,
        worker: str | None = None,
        settings: WorkerSettings = DEFAULT_SETTINGS,
    ) -> None:
        """``settings``: of them those of the connections count, the limits, and
        ``single_instance``, which keeps every other worker off a SQLite file.
        """
        self.cyclone = cyclone
        self.worker = _own_name() if worker is None else check_name("worker", worker)
        self._kinds = kinds
        self._place = _place_of(cyclone, database, settings)
        self._settings = settings
        self._calls = _Calls()
        self._source: Source | None = None
        self._starting = threading.Lock()
        self._look_at = time.monotonic() + LONGEST_WAIT
        self.upkeep = Upkeep(cyclone, self._place.dialect, self._place.held, settings)

    # ---- the verbs -------------------------------------------------------------------------------

    def enqueue(
        self,
        kind: str,
        arguments: Mapping[str, Any] | None = None,
        /,
        **options: Unpack[Options],
    ) -> JobRef:
        """Enqueue one job, as :meth:`cyclone_sqla.Cyclone.enqueue` does and refuses."""
        with self._place.enqueueing() as connection:
            ref = self.cyclone.enqueue(connection, kind, arguments or {}, **options)
        self._calls.set()
        return ref

    def claim(
        self,
        queue: str | Collection[str] = "default",
        *,
        limit: int = 1,
        lease: timedelta | float = DEFAULT_SETTINGS.lease,
    ) -> list[ClaimedJob]:
        """Take up to ``limit`` jobs of each queue, by priority and age; they are this worker's for
        ``lease`` (a timedelta, or seconds), and each has one attempt less.

        Before that it does what a worker does in the background: jobs whose time or turn has come
        become available; those whose lease ran out go back, or are discarded after their last
        attempt.
        """
        wanted = self._wanted([queue] if isinstance(queue, str) else queue, limit, lease)
        while True:
            pause = self._again(self.upkeep.look)
            self._look_at = time.monotonic() + pause
            claimed = self._again(lambda: self._claim(wanted))
            if claimed or pause > 0:
                return claimed

    def renew(
        self, jobs: Iterable[ClaimedJob], *, lease: timedelta | float = DEFAULT_SETTINGS.lease
    ) -> Renewal:
        """Give claimed jobs a new lease, which counts from now.

        The answer names the runs that have lost theirs, whose work is in vain, and those that were
        asked to stop.
        """
        runs = [HeldRun(job.id, job.lease) for job in jobs]
        length = _length(lease)

        def renew() -> Renewal:
            with self._place.held.step() as connection:
                return operations.renew(connection, self._place.dialect, runs, length)

        return self._again(renew)

    def complete(self, job: ClaimedJob, result: Any = None) -> State:
        """The job is done; the state that follows: completed, or cancelled if it was asked to stop.

        On a Connection a run that was asked to stop raises :class:`~cyclone_sqla.Cancelled` instead
        and so does not commit what it did: roll back, then write its end on an Engine.

        Raises LeaseLostError, NotRunningError, JobNotFoundError, and PayloadError for a result that
        JSON can't hold: then nothing was written.
        """
        action = self.cyclone.registry.find(job.kind)
        encode = action.encode_result if action is not None else _plain_result(job.kind)
        return self._settle(job, Completed(encode(result)))

    def fail(
        self,
        job: ClaimedJob,
        error: BaseException | str,
        *,
        retry_at: datetime | None = None,
        permanent: bool = False,
    ) -> State:
        """The attempt failed; the state that follows.

        While attempts remain the job runs again at ``retry_at`` (aware; at once if that is past),
        or after the backoff of its action. With none left, or with ``permanent``, it is discarded.

        Raises LeaseLostError, NotRunningError, JobNotFoundError: then nothing was written.
        """
        failure = _failure_of(error)
        if permanent or not job.attempts_left:
            return self._settle(job, Discarded(failure))
        backoff = self.cyclone.registry.backoff_of(job.kind)
        delay = backoff.delay(counted(job)) if retry_at is None else self._until(retry_at)
        state = self._settle(job, Retried(min(delay, MAX_DELAY), failure))
        self._calls.set()
        return state

    def get(self, job_id: int, /) -> Job:
        """The job as it is now, an object of no session. Raises JobNotFoundError."""
        with self._place.reading() as connection:
            return self.cyclone.get(connection, job_id)

    def recover(self, worker: str | None = None) -> int:
        """Put back at once what a crashed process left running, without waiting for its leases; how
        many jobs.

        Without ``worker`` these are *all* running jobs: only for one that knows itself alone, at
        its start (see the setting ``single_instance``). With it they are those that a worker of
        that name claimed. Attempts stay counted;
        a job in its last one is discarded.
        """
        self._place.check(self.cyclone.schema)
        count = self._again(lambda: self.upkeep.recover(worker))
        if count:
            self._calls.set()
        return count

    def ready(self, timeout: float | None = None) -> bool:
        """Wait until there may be something to claim; False after ``timeout`` seconds.

        Many calls become one, and none is a promise: look with :meth:`claim`, which may find
        nothing. It hears of jobs that any process enqueues or puts back, and knows when the next
        delayed job is due that the latest :meth:`claim` saw. On a Connection it hears of this
        queue's own alone. No call comes when a lease runs out: look now and then even so.
        """
        self._listen()
        wait = min(math.inf if timeout is None else timeout, self._look_at - time.monotonic())
        if self._calls.wait(max(wait, 0.0)) is not None:
            return True
        return time.monotonic() >= self._look_at

    # ---- life ------------------------------------------------------------------------------------

    def within(self, connection: Connection) -> Queue:
        """The same worker in the transaction of a Connection.

        ``queue.within(connection).complete(job)`` commits together with what the job did, or not at
        all.
        """
        return Queue(
            self.cyclone,
            connection,
            kinds=self._kinds,
            worker=self.worker,
            settings=self._settings,
        )

    def close(self) -> None:
        """Give back the queue's own connections; what is claimed stays claimed."""
        with self._starting:
            source, self._source = self._source, None
        if source is not None:
            source.stop()
        self._place.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- helpers, in calling order ---------------------------------------------------------------

    def _wanted(self, queues: Collection[str], limit: int, lease: timedelta | float) -> Claiming:
        if limit < 1:
            raise ConfigurationError(f"limit: 1 or more, not {limit}")
        kinds = self.cyclone.registry.kinds() if self._kinds is None else self._kinds
        if not kinds:
            raise ConfigurationError(
                "kinds: no action is registered, so say what you can run: Queue(…, kinds=[…])"
            )
        self._place.check(self.cyclone.schema)
        return Claiming(dict.fromkeys(queues, limit), sorted(kinds), self.worker, _length(lease))

    def _claim(self, wanted: Claiming) -> list[ClaimedJob]:
        dialect, held = self._place.dialect, self._place.held
        with held.reading() as connection:
            if not dialect.may_find_work(connection, wanted.slots, wanted.kinds):
                return []
        with held.step() as connection:
            return operations.claim(connection, dialect, wanted)

    def _settle(self, job: ClaimedJob, outcome: Outcome) -> State:
        end = Settlement(job.id, job.lease, job.attempt, self.worker, outcome, job.sequence_key)
        return self._again(lambda: self._write(end))

    def _write(self, end: Settlement) -> State:
        dialect, limit = self._place.dialect, self._settings.history_limit
        with self._place.held.transaction() as connection:
            settled, _ = operations.settle_one(connection, dialect, end, history_limit=limit)
            state = settled.states.get(end.job_id)
            if state is None:
                _refuse(connection, dialect, end.job_id, settled.refused[end.job_id])
            if state == State.CANCELLED and self._place.is_shared:
                raise Cancelled("cancellation was asked for: roll back, and write the end after it")
            return state

    def _until(self, at: datetime) -> timedelta:
        """By the clock that the database goes by: this host's may differ."""
        if at.utcoffset() is None:
            raise ConfigurationError(
                f"retry_at: naive datetime {at.isoformat()}; pass an aware one"
            )
        with self._place.held.reading() as connection:
            now = operations.present(connection, self._place.dialect)
        return max(at.astimezone(UTC) - now, timedelta(0))

    def _listen(self) -> None:
        with self._starting:
            if self._source is None:
                self._source = self._place.source(self._calls)
                if self._source is not None:
                    self._source.start()

    def _again(self, step: Callable[[], T]) -> T:
        """A transaction of the queue's own that met another one is run again."""
        for _ in range(0 if self._place.is_shared else TRIES - 1):
            try:
                return step()
            except DBAPIError as exc:
                if not self._place.dialect.is_passing(exc):
                    raise
        return step()


class Upkeep:
    """What a worker does in the background, done once when it is asked for."""

    def __init__(
        self,
        cyclone: Cyclone,
        dialect: Dialect,
        held: WorkerConnection,
        settings: WorkerSettings = DEFAULT_SETTINGS,
    ) -> None:
        contact = Contact(math.inf)
        self._stager = Stager(
            dialect, held, poll=LONGEST_WAIT, contact=contact, on_staged=_nobody_waits
        )
        self._rescuer = Rescuer(
            dialect,
            held,
            settings,
            rhythm=Rhythm(settings.rescue_interval, threading.Event()),
            contact=contact,
            backoff_of=cyclone.registry.backoff_of,
            on_rescued=_nobody_waits,
        )
        self.recover = self._rescuer.recover
        self.rescue = self._rescuer.rescue_all
        self.stage = self._stager.look_ahead

    def look(self) -> float:
        """Rescue what has lapsed, stage what is due, admit what comes in; seconds until the next
        look, 0 if there is more to do now.
        """
        self.rescue()
        return self.stage()


class JoinedConnection(WorkerConnection):
    """A worker's connection that is somebody else's, inside their transaction."""

    def __init__(self, connection: Connection, dialect: Dialect) -> None:
        self._connection = connection
        self._dialect = dialect

    @contextmanager
    def transaction(self) -> Generator[Connection]:
        """An error leaves the transaction usable, on PostgreSQL by a savepoint."""
        self._dialect.refuse_unfit(self._connection)
        with self._dialect.savepoint(self._connection):
            yield self._connection

    step = transaction

    @contextmanager
    def reading(self) -> Generator[Connection]:
        yield self._connection

    def close(self) -> None:
        """It is not ours to close."""


class _Calls(Wakeup):
    """A flag that is set whatever queue a call is for."""

    def __init__(self) -> None:
        super().__init__(())

    def set(self, *_queues: str) -> None:
        super().set()


class _OwnPlace:
    """A database on which the queue has connections of its own."""

    is_shared = False

    def __init__(
        self, dialect: Dialect, database: Engine | sa.URL, settings: WorkerSettings
    ) -> None:
        self.dialect = dialect
        self._ours = dialect.worker_engine(database, settings)
        self._owned = [self._ours]
        if isinstance(database, Engine) and not database.dialect.is_async:
            self._applications = database
        else:
            self._applications = dialect.session_engine(database, 1)
            self._owned.append(self._applications)
        self._alone = settings.single_instance
        self._lock: InstanceLock | None = None
        self._is_checked = False
        self._checking = threading.Lock()
        self.held = dialect.hold(self._ours, settings)

    def check(self, schema: str | None) -> None:
        """Whether a worker can work here, once; on SQLite, keep out whoever must be alone."""
        with self._checking:
            if not self._is_checked:
                self._check(schema)
                self._is_checked = True

    def _check(self, schema: str | None) -> None:
        with self.held.reading() as connection:
            schema_version.require(connection, schema)
            self.dialect.refuse_unfit_for_work(connection)
            file = self.dialect.file_of(connection)
        if file is not None:
            lock = InstanceLock(file, alone=self._alone)
            lock.acquire()
            self._lock = lock
        elif self._alone:
            raise ConfigurationError("single_instance is for a SQLite file: leave it out")

    def enqueueing(self) -> AbstractContextManager[Connection]:
        """A transaction like any of the application's."""
        return self._applications.begin()

    def reading(self) -> AbstractContextManager[Connection]:
        return self._applications.connect()

    def source(self, calls: Wakeup) -> Source | None:
        """Hears of jobs that others enqueue."""
        return source_on(self._ours, self.dialect, calls)

    def close(self) -> None:
        self.held.close()
        for engine in self._owned:
            engine.dispose()
        if self._lock is not None:
            self._lock.release()


class _SharedPlace:
    """A connection of somebody else's, inside their transaction."""

    is_shared = True

    def __init__(self, dialect: Dialect, connection: Connection) -> None:
        self.dialect = dialect
        self.held = JoinedConnection(connection, dialect)
        self.enqueueing = self.reading = self.held.reading
        self._connection = connection
        self._is_checked = False

    def check(self, schema: str | None) -> None:
        """Who is next in a line is decided by what others have committed by now."""
        self.dialect.refuse_unfit(self._connection)
        if not self._is_checked:
            schema_version.require(self._connection, schema)
            self._is_checked = True
        if not self.dialect.sees_commits(self._connection):
            raise TransactionError(
                "claim() and recover() need a READ COMMITTED transaction, or an Engine"
            )

    def source(self, calls: Wakeup) -> Source | None:
        """Nobody tells it anything."""

    def close(self) -> None:
        """Nothing of it is ours to close."""


def _place_of(
    cyclone: Cyclone, database: Engine | Connection | None, settings: WorkerSettings
) -> _OwnPlace | _SharedPlace:
    given = cyclone.resolve_database() if database is None else database
    if given is None:
        raise ConfigurationError("no database: give Cyclone(database=…), or Queue(cyclone, engine)")
    if isinstance(given, Connection):
        return _SharedPlace(cyclone.dialect(given.dialect.name), given)
    dialect = cyclone.dialect(worker_url(url_of(given)).get_backend_name())
    return _OwnPlace(dialect, given, settings)


def _own_name() -> str:
    return f"{socket.gethostname()}:{os.getpid()}/{uuid.uuid4().hex[:12]}"


def _length(lease: timedelta | float) -> timedelta:
    seconds = lease.total_seconds() if isinstance(lease, timedelta) else lease
    if not 0 < seconds <= MAX_SECONDS:
        raise ConfigurationError(f"lease: above 0 and at most a hundred years, not {lease!r}")
    return timedelta(seconds=seconds)


def _failure_of(error: BaseException | str) -> Failure:
    if isinstance(error, str):
        return Failure.because(error, kind="Failed")
    return Failure.of(error)


def _plain_result(kind: str) -> Callable[[Any], str | None]:
    def encode(value: Any) -> str | None:
        fault = find_fault(value, not_plain_json)
        if fault is not None:
            raise fault.error(kind)
        return None if value is None else to_json(value).decode()

    return encode


def _refuse(connection: Connection, dialect: Dialect, job_id: int, state: State | None) -> NoReturn:
    """``state`` is the job's, if no later run was given it."""
    if state is not None:
        raise NotRunningError(f"job {job_id} is {state}: this run has ended, or was taken back")
    if not operations.is_there(connection, dialect, job_id):
        raise JobNotFoundError(f"there is no job {job_id} in this database")
    raise LeaseLostError(f"the lease of job {job_id} was lost: another run was given the job")


def _nobody_waits() -> None:
    """Whoever asks for the upkeep looks right after it."""
