"""Direct hands on a queue: what a worker does, verb by verb, with a clock that is moved by hand."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from typing import Any

import sqlalchemy as sa
from sqlalchemy import Connection, Row
from sqlalchemy.orm import Session

from cyclone_sqla import Clock, Cyclone, Job, JobSpec, WorkerSettings, admission, operations
from cyclone_sqla.context import ClaimedJob
from cyclone_sqla.failures import Failure
from cyclone_sqla.models import HistoryEntry
from cyclone_sqla.operations import Claiming, HeldRun, LostRun, Renewal, Settled, Settlement
from cyclone_sqla.outcomes import Completed, Discarded, Outcome, Retried, Snoozed
from tests.databases import Database

BROKE = Failure.of(ValueError("it broke"))
DONE = Completed('"done"')
FAILED = Retried(timedelta(seconds=30), BROKE)
HOPELESS = Discarded(BROKE)
NOT_NOW = Snoozed(timedelta(minutes=5), BROKE)

MINUTE = timedelta(minutes=1)


class ManualClock:
    """The one clock of a test."""

    def __init__(self) -> None:
        self._now = datetime(2030, 1, 1, 12, tzinfo=UTC)

    def now(self) -> datetime:
        return self._now

    def advance(self, **duration: float) -> None:
        """Let `timedelta(**duration)` pass."""
        self._now += timedelta(**duration)


class Hands:
    """The operations of a life, each in a transaction that is committed when the call returns."""

    def __init__(self, database: Database, clock: Clock | None = None) -> None:
        self.clock = ManualClock()
        self.database = database
        self.engine = database.engine()
        self.cyclone = Cyclone(database=self.engine, clock=clock or self.clock)
        self.dialect = self.cyclone.dialect(database.dialect)
        self._settings = WorkerSettings()
        self.worker_engine = self.dialect.worker_engine(self.engine, self._settings)
        self.held = self.dialect.hold(self.worker_engine, self._settings)

    def close(self) -> None:
        """Give back the worker's connection."""
        self.held.close()
        self.worker_engine.dispose()

    @contextmanager
    def transaction(self) -> Iterator[Connection]:
        """A transaction of a worker's own."""
        with self.held.transaction() as connection:
            yield connection

    # ---- the application ---------------------------------------------------------------------

    def enqueue(self, kind: str = "work", **options: Any) -> int:
        """Enqueue one job and commit; its id."""
        with self.engine.begin() as connection:
            return self.cyclone.enqueue(connection, kind, {}, **options).id

    def enqueue_many(self, count: int, kind: str = "work", **fields: Any) -> list[int]:
        """Enqueue equal jobs and commit; their ids, rising."""
        specs = [JobSpec(kind=kind, arguments="{}", **fields)] * count
        with self.engine.begin() as connection:
            return [ref.id for ref in self.cyclone.enqueue_many(connection, specs)]

    def act(self, verb: str, *target: Any, **options: Any) -> Any:
        """A person's verb, committed: `act("cancel", job_id)`, `act("pause_sequence", key)`."""
        with self.engine.begin() as connection:
            return getattr(self.cyclone, verb)(connection, *target, **options)

    def ask_to_cancel(self, job_id: int) -> None:
        """What a person's cancel writes while the job runs."""
        self.change(job_id, cancel_requested_at=self.clock.now())

    def change(self, job_id: int, **values: Any) -> None:
        """Write columns by plain SQL."""
        with self.engine.begin() as connection:
            connection.execute(sa.update(Job).where(Job.id == job_id).values(**values))

    def execute(self, sql: str, **params: Any) -> None:
        """Execute one statement of the application's and commit."""
        with self.engine.begin() as connection:
            connection.execute(sa.text(sql), params)

    def forget(self, job_id: int) -> None:
        """Delete a job, as nobody would."""
        self.execute("DELETE FROM cyclone_history WHERE job_id = :id", id=job_id)
        self.execute("DELETE FROM cyclone_job WHERE id = :id", id=job_id)

    # ---- a worker ----------------------------------------------------------------------------

    def claim(
        self,
        count: int = 10,
        *,
        queues: Sequence[str] = ("default",),
        kinds: Sequence[str] = ("work",),
        worker: str = "worker-1",
        lease: timedelta = MINUTE,
    ) -> list[ClaimedJob]:
        """Claim up to `count` jobs of each queue."""
        wanted = Claiming(dict.fromkeys(queues, count), kinds, worker, lease)
        with self.transaction() as connection:
            return operations.claim(connection, self.dialect, wanted)

    def claim_one(self, **options: Any) -> ClaimedJob:
        """Claim one job, which must be there."""
        (job,) = self.claim(1, **options)
        return job

    def settle(
        self, job: ClaimedJob, outcome: Outcome, worker: str = "worker-1", history_limit: int = 25
    ) -> Settled:
        """Write the end of one run."""
        return self.settle_all([(job, outcome)], worker=worker, history_limit=history_limit)

    def settle_all(
        self,
        outcomes: Sequence[tuple[ClaimedJob, Outcome]],
        worker: str = "worker-1",
        history_limit: int = 25,
    ) -> Settled:
        """Write the ends of several runs."""
        batch = [
            Settlement(job.id, job.lease, job.attempt, worker, end, job.sequence_key)
            for job, end in outcomes
        ]
        with self.transaction() as connection:
            return operations.settle(connection, self.dialect, batch, history_limit=history_limit)

    def renew(self, *jobs: ClaimedJob, lease: timedelta = MINUTE) -> Renewal:
        """Renew the leases of these runs."""
        runs = [run_of(job) for job in jobs]
        with self.transaction() as connection:
            return operations.renew(connection, self.dialect, runs, lease)

    def stage(self, limit: int = 100) -> list[str]:
        """Make due jobs available."""
        with self.transaction() as connection:
            return operations.stage(connection, self.dialect, limit)

    def admit(self) -> list[str]:
        """Places for incoming jobs, debts paid, held heads let go; the queues that got work."""
        with self.transaction() as connection:
            queues = admission.admit(connection, self.dialect, 0, 1000).queues
        with self.held.reading() as connection:
            debts = admission.payable_debts(connection, self.dialect, 0, 1000)
        if debts:
            with self.transaction() as connection:
                queues += admission.pay(connection, self.dialect, debts)
        with self.transaction() as connection:
            return queues + admission.let_go(connection, self.dialect, 1000)

    def expired(self, limit: int = 100) -> list[LostRun]:
        """List lapsed runs, as rescue does before it acts."""
        with self.held.reading() as connection:
            return operations.expired_runs(connection, self.dialect, limit)

    def rescue(self, runs: Sequence[LostRun] | None = None, backoff: timedelta = MINUTE) -> Settled:
        """Rescue the listed runs; without a list, all that are lapsed now."""
        listed = self.expired() if runs is None else runs
        with self.transaction() as connection:
            return operations.rescue(
                connection, self.dialect, listed, lambda _run: backoff, history_limit=25
            )

    # ---- a look ------------------------------------------------------------------------------

    def job(self, job_id: int) -> Job:
        """The row, as an object of no session."""
        with self.engine.connect() as connection:
            return self.cyclone.get(connection, job_id)

    def rows(self) -> list[Row[Any]]:
        """Every column of every job and of its history, to compare."""
        with self.engine.connect() as connection:
            jobs = connection.execute(sa.select(Job.__table__).order_by(Job.id)).all()
            entries = sa.select(HistoryEntry.__table__).order_by(HistoryEntry.id)
            return [*jobs, *connection.execute(entries).all()]

    def history(self, job_id: int) -> list[HistoryEntry]:
        """What is written down of a job, the oldest first."""
        entries = sa.select(HistoryEntry).where(HistoryEntry.job_id == job_id)
        with Session(self.engine, expire_on_commit=False) as session:
            return list(session.scalars(entries.order_by(HistoryEntry.id)))


def run_of(job: ClaimedJob) -> HeldRun:
    """The run that this claim began."""
    return HeldRun(job.id, job.lease)
