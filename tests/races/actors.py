"""Connections of a race: applications, people and workers, each with a transaction of its own that
stays open until it is told to end.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from contextlib import ExitStack
from datetime import timedelta
from typing import Any

import sqlalchemy as sa
from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError

from cyclone_sqla import Cyclone, Job, JobRef, WorkerSettings, admission, operations
from cyclone_sqla.context import ClaimedJob
from cyclone_sqla.dialects import Dialect
from cyclone_sqla.lifecycle import TERMINAL
from cyclone_sqla.models import Sequence
from cyclone_sqla.operations import Claiming, Settled, Settlement
from cyclone_sqla.outcomes import Completed, Outcome
from tests.databases import Database
from tests.life.hands import ManualClock

PATIENCE = 100
"""Milliseconds that a statement waits for a lock before its transaction is given up."""

LEASE = timedelta(minutes=1)


class RolledBack(Exception):
    """Ends a worker's transaction without a commit."""


class Race:
    """A database, and the actors on it."""

    def __init__(self, database: Database) -> None:
        self.clock = ManualClock()
        self.database = database
        self.is_postgresql = database.dialect == "postgresql"
        options = f"-c lock_timeout={PATIENCE}"
        arguments: dict[str, Any] = {"options": options} if self.is_postgresql else {}
        self.engine = database.engine(connect_args=arguments)
        self.cyclone = Cyclone(self.engine, clock=self.clock, hints=False)
        self.dialect: Dialect = self.cyclone.dialect(database.dialect)
        self.settings = WorkerSettings(lock_timeout=0.05)
        self.worker_engine = self.dialect.worker_engine(self.engine, self.settings)
        self._actors: list[Application | Worker] = []
        self._monitor = database.engine(isolation_level="AUTOCOMMIT")

    def application(self, isolation: str | None = None) -> Application:
        """A connection of an application, or of a person."""
        actor = Application(self, isolation)
        self._actors.append(actor)
        return actor

    def worker(self, name: str = "worker") -> Worker:
        """A connection of a worker."""
        actor = Worker(self, f"{name}-{len(self._actors)}")
        self._actors.append(actor)
        return actor

    def dismiss(self) -> None:
        """Roll back what is open, and have no actors any more."""
        while self._actors:
            self._actors.pop().close()

    def close(self) -> None:
        """Roll back what is open, and close every connection."""
        self.dismiss()
        self.worker_engine.dispose()

    # ---- a look ------------------------------------------------------------------------------

    def rows(self, key: str | None = None) -> list[sa.Row[Any]]:
        """The committed jobs with a key, in the order of their line."""
        with self._monitor.connect() as connection:
            return rows_seen(connection, key)

    def state(self, job_id: int) -> str:
        """The committed state, and what a pending job waits for."""
        (row,) = [row for row in self.rows() if row.id == job_id]
        return row.state if row.waits_for is None else f"{row.state}/{row.waits_for}"

    def check(self, rows: list[sa.Row[Any]] | None = None) -> None:
        """In one snapshot: who waits for its turn has one head before it, and one runs at most."""
        rows = self.rows() if rows is None else rows
        for key in {row.sequence_key for row in rows}:
            line = [row for row in rows if row.sequence_key == key]
            heads = [row.id for row in line if row.admitted]
            waiting = [row.id for row in line if row.waits_for == "turn" and not row.admitted]
            running = [row.id for row in line if row.state == "running"]
            assert len(heads) <= 1, f"{key} has the heads {heads}"
            assert heads or not waiting, f"{key} has no head, and {waiting} wait for their turn"
            assert len(running) <= 1, f"{running} of {key} run together"
            assert set(running) <= set(heads), f"{running} of {key} run and are no heads"
        active = [row for row in rows if row.state not in TERMINAL and row.unique_key is not None]
        held = Counter((row.unique_key) for row in active)
        assert not [key for key, holders in held.items() if holders > 1], f"held twice: {held}"

    def drain(self, worker: Worker) -> list[int]:
        """Run what is there to its end, as a lone worker does; the ids in order of their runs."""
        order: list[int] = []
        while True:
            worker.settle_down()
            jobs = worker.claim()
            worker.commit()
            if not jobs:
                return order
            worker.settle(*jobs)
            worker.commit()
            order += [job.id for job in jobs]


class Application:
    """An application, or a person: enqueues and acts, and commits when it likes."""

    def __init__(self, race: Race, isolation: str | None = None) -> None:
        self._race = race
        self._isolation = isolation
        self._connection: Connection | None = None

    @property
    def is_open(self) -> bool:
        """Whether it has a transaction."""
        return self._connection is not None

    @property
    def connection(self) -> Connection:
        """Its connection, in a transaction."""
        if self._connection is None:
            options = {"isolation_level": self._isolation} if self._isolation else {}
            self._connection = self._race.engine.connect().execution_options(**options)
            self._connection.begin()
        return self._connection

    def look(self) -> None:
        """Read, so that a transaction with a snapshot has it from now on."""
        self.connection.execute(sa.text("SELECT count(*) FROM cyclone_job"))

    def enqueue(self, key: str | None, **options: Any) -> int:
        """Enqueue a job of the key."""
        return self.ask_for(key, **options).id

    def ask_for(self, key: str | None, **options: Any) -> JobRef:
        """The same; whether it was created, or another one holds its unique key."""
        return self._race.cyclone.enqueue(self.connection, "work", {}, sequence=key, **options)

    def rows(self) -> list[sa.Row[Any]]:
        """The jobs with a key as its transaction sees them now."""
        return rows_seen(self.connection)

    def act(self, verb: str, *target: Any, **options: Any) -> Any:
        """A person's verb."""
        return getattr(self._race.cyclone, verb)(self.connection, *target, **options)

    def commit(self) -> None:
        """End the transaction well."""
        if self._connection is not None:
            self._connection.commit()
            self.close()

    def roll_back(self) -> None:
        """End it without a trace."""
        self.close()

    def close(self) -> None:
        """Give the connection back."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.rollback()
            connection.close()


class Worker:
    """The operations of a worker; a transaction stays open until :meth:`commit`."""

    def __init__(self, race: Race, name: str) -> None:
        self._race = race
        self.name = name
        self._held = race.dialect.hold(race.worker_engine, race.settings, takes_turns=True)
        self._stack: ExitStack | None = None
        self._connection: Connection | None = None

    @property
    def is_open(self) -> bool:
        """Whether it has a transaction."""
        return self._stack is not None

    @property
    def connection(self) -> Connection:
        """Its connection, in a transaction as a worker begins it."""
        if self._stack is None:
            stack = ExitStack()
            self._connection = stack.enter_context(self._held.transaction())
            self._stack = stack
        assert self._connection is not None
        return self._connection

    def commit(self) -> None:
        """End the transaction well."""
        stack, self._stack = self._stack, None
        if stack is not None:
            stack.close()

    def roll_back(self) -> None:
        """End it without a trace: the connection is dropped, as after an error."""
        stack, self._stack = self._stack, None
        if stack is not None:
            try:
                stack.__exit__(RolledBack, RolledBack(), None)
            except RolledBack:
                return

    def close(self) -> None:
        """Give the connection back."""
        self.roll_back()
        self._held.close()

    # ---- a look ------------------------------------------------------------------------------

    def rows(self) -> list[sa.Row[Any]]:
        """The jobs with a key as its transaction sees them now."""
        return rows_seen(self.connection)

    def paused(self) -> set[str]:
        """The sequences that are paused, by the same view."""
        paused = sa.select(Sequence.key).where(Sequence.paused_at.is_not(None))
        return set(self.connection.scalars(paused))

    # ---- verbs -------------------------------------------------------------------------------

    def admit(self, after: int = 0, limit: int = 1000) -> int:
        """One window of incoming jobs; how many got their place."""
        return admission.admit(self.connection, self._race.dialect, after, limit).changed

    def pay(self) -> None:
        """Every debt that can be paid."""
        debts = admission.payable_debts(self.connection, self._race.dialect, 0, 1000)
        if debts:
            admission.pay(self.connection, self._race.dialect, debts)

    def let_go(self) -> None:
        """Heads held back by a pause that is over."""
        admission.let_go(self.connection, self._race.dialect, 1000)

    def stage(self) -> None:
        """What is due becomes available."""
        operations.stage(self.connection, self._race.dialect, 1000)

    def settle_down(self) -> None:
        """What a stager does until nothing moves, each step committed."""
        for step in (self.admit, self.pay, self.let_go, self.stage):
            step()
            self.commit()

    def sweep(self) -> list[str]:
        """The keys that have lost their head."""
        return admission.sweep(self.connection, self._race.dialect, "", 1000).headless

    def claim(self, count: int = 10) -> list[ClaimedJob]:
        """Claim jobs."""
        return operations.claim(self.connection, self._race.dialect, self.wanted(count))

    def complete_and_claim(
        self,
        jobs: list[ClaimedJob],
        count: int,
        *,
        hands_over: bool = True,
        only_next: bool = False,
    ) -> list[ClaimedJob]:
        """Settle runs as completed and claim others, as a busy worker does: if it hands over, the
        next of a lone head's line first.
        """
        batch = self.ends_of(jobs)
        wanted = self.wanted(count, hands_over=hands_over, only_next=only_next)
        _, claimed = operations.settle_and_claim(
            self.connection, self._race.dialect, batch, wanted, history_limit=5
        )
        return claimed

    def wanted(
        self,
        count: int,
        *,
        kinds: Collection[str] = ("work",),
        hands_over: bool = False,
        only_next: bool = False,
    ) -> Claiming:
        """What it asks for."""
        return Claiming({"default": count}, list(kinds), self.name, LEASE, hands_over, only_next)

    def ends_of(self, jobs: list[ClaimedJob], result: str | None = None) -> list[Settlement]:
        """Ends of runs that returned."""
        return self._settlements([(job, Completed(result)) for job in jobs])

    def settle(self, *jobs: ClaimedJob, outcome: Outcome | None = None) -> Settled:
        """Settle runs as completed, or with another outcome."""
        return self.settle_all([(job, outcome or Completed(None)) for job in jobs])

    def settle_all(self, ends: list[tuple[ClaimedJob, Outcome]]) -> Settled:
        """Settle runs, each with its own outcome."""
        batch = self._settlements(ends)
        return operations.settle(self.connection, self._race.dialect, batch, history_limit=5)

    def _settlements(self, ends: list[tuple[ClaimedJob, Outcome]]) -> list[Settlement]:
        return [
            Settlement(job.id, job.lease, job.attempt, self.name, outcome, job.sequence_key)
            for job, outcome in ends
        ]

    def rescue(self, backoff: timedelta = timedelta(0)) -> Settled:
        """Rescue what is lapsed."""
        connection, dialect = self.connection, self._race.dialect
        runs = operations.expired_runs(connection, dialect, 100)
        return operations.rescue(connection, dialect, runs, lambda _: backoff, history_limit=5)

    def prune(self) -> None:
        """Delete every ended job that retention may have."""
        for state in TERMINAL:
            for dead_letters in (False, True):
                retention = operations.Retention(state, timedelta(0), dead_letters)
                operations.prune(self.connection, self._race.dialect, retention, None, 100)


def rows_seen(connection: Connection, key: str | None = None) -> list[sa.Row[Any]]:
    """The jobs with a key that a connection sees, in the order of their line."""
    job: Any = Job.__table__
    look = sa.select(
        job.c.id, job.c.sequence_key, job.c.state, job.c.waits_for, job.c.admitted,
        job.c.sequence_open, job.c.position, job.c.lease, job.c.unique_key,
    ).where(job.c.sequence_key.is_not(None))  # fmt: skip
    if key is not None:
        look = look.where(job.c.sequence_key == key)
    order = sa.func.coalesce(job.c.position, job.c.id)
    return list(connection.execute(look.order_by(order)))


def sqlstate(error: DBAPIError) -> str | None:
    """The SQLSTATE of an error of psycopg."""
    return getattr(error.orig, "sqlstate", None)
