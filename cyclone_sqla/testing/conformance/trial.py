"""A queue on trial: two workers by hand, a person, and a clock that stands still."""

from __future__ import annotations

import tempfile
import uuid
from collections.abc import Generator
from contextlib import closing, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from sqlalchemy import Engine

from cyclone_sqla import ClaimedJob, ConfigurationError, Cyclone, Job
from cyclone_sqla.figures import JobEvent
from cyclone_sqla.migrations import migrate_database
from cyclone_sqla.models import tables_in
from cyclone_sqla.port import Queue
from cyclone_sqla.testing.clock import ManualClock
from cyclone_sqla.urls import parsed, worker_url

START = datetime(2030, 1, 1, 12, tzinfo=UTC)

KINDS = ("work", "play")

KEY = "account-42"
"""The sequence of most cases."""


class Trial:
    """What every case works with. Nothing of one case is left for the next."""

    def __init__(self, engine: Engine, schema: str | None) -> None:
        self.engine = engine
        self.clock = ManualClock(START)
        self.cyclone = Cyclone(engine, schema=schema, instance="conformance", clock=self.clock)
        self.queue = Queue(self.cyclone, kinds=KINDS, worker="worker-1")
        self.other = Queue(self.cyclone, kinds=KINDS, worker="worker-2")

    def begin_afresh(self) -> None:
        """Forget every job, and set the clock back."""
        self.clock.set(START)
        self.cyclone.use_ids(None)
        tables = tables_in(self.cyclone.schema)
        with self.engine.begin() as connection:
            for table in reversed(tables.of(connection.dialect.name)):
                if table is not tables.counter:
                    connection.execute(sa.delete(table))

    def close(self) -> None:
        """Give back all connections."""
        self.queue.close()
        self.other.close()

    @property
    def told(self) -> str:
        """What database this is."""
        dialect = self.engine.dialect
        version = ".".join(map(str, dialect.server_version_info or ()))
        return f"{dialect.name} {version}, by {dialect.driver}"

    # ---- what cases say in a word ----------------------------------------------------------------

    def enqueue(self, kind: str = "work", **options: Any) -> int:
        """Enqueue one job; its id."""
        return self.queue.enqueue(kind, **options).id

    def line(self, count: int, **options: Any) -> list[int]:
        """Enqueue so many jobs of one sequence; their ids."""
        return [self.enqueue(**{"sequence": KEY, **options}) for _ in range(count)]

    def claim_one(self, queue: str = "default", **options: Any) -> ClaimedJob:
        """Claim the one job that may run."""
        (job,) = self.queue.claim(queue, limit=10, **options)
        return job

    def drain(self) -> list[int]:
        """Run jobs until none may run; their ids in that order."""
        order: list[int] = []
        while jobs := self.queue.claim(limit=10):
            for job in jobs:
                self.queue.complete(job)
                order.append(job.id)
        return order

    def act(self, verb: str, *target: Any, **options: Any) -> None:
        """What a person does: ``act("cancel", job_id)``."""
        with self.engine.begin() as connection:
            getattr(self.cyclone, verb)(connection, *target, **options)

    def job(self, job_id: int) -> Job:
        """The job as it is now."""
        return self.queue.get(job_id)

    def history(self, job_id: int) -> list[JobEvent]:
        """What is written down of a job."""
        with self.engine.connect() as connection:
            return self.cyclone.history(connection, job_id)

    def rows(self) -> list[sa.RowMapping]:
        """Every column of every job."""
        table = tables_in(self.cyclone.schema).job
        with self.engine.connect() as connection:
            return list(connection.execute(sa.select(table).order_by(table.c.id)).mappings())


@contextmanager
def trial_on(text: str) -> Generator[Trial]:
    """A trial on the database of a URL, in a place of its own there, which is removed at the end.

    Raises ConfigurationError for a database that is not supported.
    """
    url = worker_url(parsed(text))
    if url.get_backend_name() == "sqlite":
        place = _file_beside(url)
    elif url.get_backend_name() == "postgresql":
        place = _schema_in(url)
    else:
        raise ConfigurationError(f"{url.get_backend_name()} is not supported")
    with place as (engine, schema), closing(Trial(engine, schema)) as trial:
        yield trial


@contextmanager
def _schema_in(url: sa.URL) -> Generator[tuple[Engine, str | None]]:
    engine = sa.create_engine(url)
    schema = f"cyclone_conformance_{uuid.uuid4().hex[:12]}"
    try:
        migrate_database(engine, schema=schema)
        yield engine, schema
    finally:
        with engine.begin() as connection:
            connection.execute(sa.schema.DropSchema(schema, cascade=True, if_exists=True))
        engine.dispose()


@contextmanager
def _file_beside(url: sa.URL) -> Generator[tuple[Engine, str | None]]:
    """On the same disk, through the same driver, with the same options."""
    given = Path(url.database) if url.database and url.database != ":memory:" else None
    parent = given.absolute().parent if given is not None else None
    with tempfile.TemporaryDirectory(prefix="cyclone-conformance-", dir=parent) as directory:
        engine = sa.create_engine(url.set(database=str(Path(directory, "trial.db"))))
        try:
            migrate_database(engine)
            yield engine, None
        finally:
            engine.dispose()
