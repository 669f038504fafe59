"""A place of work for whole workers: an application, its workers, and what became of its jobs."""

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import sqlalchemy as sa
from sqlalchemy import Engine
from sqlalchemy.orm import Session

from cyclone_sqla import Cyclone, Job, JobSpec, Worker
from cyclone_sqla.models import HistoryEntry
from tests.databases import Database
from tests.waiting import wait_until

QUICK = {"poll": 0.1, "rescue_interval": 0.1, "grace": 10.0}
"""Settings with which nothing waits for long."""


class Site:
    """An application, its engine, and its workers inside this process."""

    def __init__(self, database: Database, *, engine: Engine | None = None, **options: Any) -> None:
        """`engine` is the application's, `options` are those of `Cyclone`."""
        self.database = database
        self.engine = engine or database.engine()
        self.cyclone = Cyclone(self.engine, **options)

    @contextmanager
    def worker(self, **settings: Any) -> Iterator[Worker]:
        """A worker that runs in the block."""
        with Worker(self.cyclone, **{**QUICK, **settings}) as worker:
            yield worker

    def action(self, fn: Callable[..., Any], kind: str = "work", **options: Any) -> None:
        """Register a function as the action of a kind."""
        self.cyclone.action(kind=kind, **options)(fn)

    def enqueue(self, kind: str = "work", /, arguments: Any = None, **options: Any) -> int:
        """Enqueue one job and commit; its id."""
        with Session(self.engine) as session, session.begin():
            return self.cyclone.enqueue(session, kind, arguments or {}, **options).id

    def enqueue_many(self, count: int, kind: str = "work", **options: Any) -> list[int]:
        """Enqueue jobs without arguments and commit; their ids, rising."""
        specs = [JobSpec(kind=kind, arguments="{}", **options)] * count
        with Session(self.engine) as session, session.begin():
            return [ref.id for ref in self.cyclone.enqueue_many(session, specs)]

    def execute(self, sql: str, **params: Any) -> int:
        """Execute one statement and commit; how many rows it touched."""
        with self.engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
            return connection.execute(sa.text(sql), params).rowcount

    def job(self, job_id: int) -> Job:
        """The row as it is now."""
        with Session(self.engine) as session:
            job = self.cyclone.get(session, job_id)
            session.expunge(job)
            return job

    def history(self, job_id: int) -> list[HistoryEntry]:
        """What is written down of a job, the oldest first."""
        entries = sa.select(HistoryEntry).where(HistoryEntry.job_id == job_id)
        with Session(self.engine, expire_on_commit=False) as session:
            return list(session.scalars(entries.order_by(HistoryEntry.id)))

    def states(self) -> Counter[str]:
        """How many jobs are in each state."""
        by_state = sa.select(Job.state, sa.func.count()).group_by(Job.state)
        with self.engine.connect() as connection:
            return Counter({row.state: row.count for row in connection.execute(by_state)})

    def wait_for(self, job_id: int, state: str, within: float = 30.0) -> Job:
        """The job, once it is in this state."""
        wait_until(
            lambda: self.job(job_id).state == state, f"job {job_id} is {state}", within=within
        )
        return self.job(job_id)

    def wait_until_all_are(self, state: str, within: float = 60.0) -> None:
        """Return once every job is in this state."""
        wait_until(
            lambda: set(self.states()) <= {state},
            f"all are {state}",
            within=within,
            every=0.05,
        )


class Gate:
    """What an action passes: it tells that it is there, and waits until it may go on."""

    def __init__(self) -> None:
        self.arrived = threading.Semaphore(0)
        self._open = threading.Event()

    def __call__(self) -> None:
        """Pass: by the action."""
        self.arrived.release()
        if not self._open.wait(60.0):
            raise TimeoutError("nobody opened the gate")

    def passing(self) -> Callable[[], None]:
        """An action that does nothing else."""

        def work() -> None:
            self()

        return work

    def open(self) -> None:
        """Let everybody pass, from now on."""
        self._open.set()

    def await_arrival(self, count: int = 1) -> None:
        """Return once so many more have arrived."""
        for _ in range(count):
            assert self.arrived.acquire(timeout=60.0), "nobody arrived"


def nothing() -> None:
    """The least that an action can do."""


def messages(records: Iterable[Any]) -> list[str]:
    """The texts of log records."""
    return [record.getMessage() for record in records]


def tracebacks(records: Iterable[Any]) -> list[str]:
    """The texts of those log records that show a traceback."""
    return [record.getMessage() for record in records if record.exc_info]
