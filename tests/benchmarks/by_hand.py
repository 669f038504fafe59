"""The references: the same work by statements written by hand, as few and as large as can be.

No retries, leases, delays or history: what a loop costs that does nothing but take rows, do
nothing with them and mark them as done. It has a table of its own with one partial index.
"""

import asyncio
import select
import sqlite3
import threading
import time
from collections.abc import Callable
from typing import Any

import psycopg
import sqlalchemy as sa
from sqlalchemy.orm import Session

_COLUMNS = """
    queue text NOT NULL,
    arguments {json} NOT NULL,
    state smallint NOT NULL DEFAULT 0,
    attempts smallint NOT NULL DEFAULT 0,
    run_at {time} NOT NULL DEFAULT {now},
    finished_at {time}
"""

POSTGRESQL_TABLES = (
    "CREATE TABLE hand_job (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, "
    + _COLUMNS.format(json="json", time="timestamptz", now="clock_timestamp()")
    + ") WITH (fillfactor = 85)",
    "CREATE INDEX hand_job_ready ON hand_job (queue, run_at, id) WHERE state = 0",
    "CREATE TABLE hand_effect (job_id bigint NOT NULL, id bigint GENERATED ALWAYS AS IDENTITY)",
)

SQLITE_TABLES = (
    "CREATE TABLE hand_job (id INTEGER PRIMARY KEY, "
    + _COLUMNS.format(json="text", time="integer", now="(strftime('%s', 'now') * 1000000)")
    + ")",
    "CREATE INDEX hand_job_ready ON hand_job (queue, run_at, id) WHERE state = 0",
)

INSERT = "INSERT INTO hand_job (queue, arguments) VALUES ('default', %s)"

INSERT_AND_TELL = f"WITH job AS ({INSERT}) SELECT pg_notify('hand', '')"

INSERT_OF_OURS = """
INSERT INTO cyclone_job
    (kind, queue, priority, state, arguments, max_attempts, run_at, created_at, updated_at)
VALUES ('work', 'default', 0, 'available', '{"seq":1}', 25, now(), now(), now()) RETURNING id
"""

BATCH = 500

CLAIM = """
WITH picked AS (
    SELECT id FROM hand_job WHERE queue = 'default' AND state = 0 AND run_at <= clock_timestamp()
    ORDER BY run_at, id LIMIT %s FOR UPDATE SKIP LOCKED
)
UPDATE hand_job SET state = 1, attempts = attempts + 1 FROM picked
WHERE hand_job.id = picked.id RETURNING hand_job.id, hand_job.arguments
"""

DONE = "UPDATE hand_job SET state = 2, finished_at = now() WHERE id = ANY(%s) AND state = 1"

EFFECT = "INSERT INTO hand_effect (job_id) VALUES (%s)"

Begin = Callable[[int], None]
"""What is called when a job begins: the action of a loop by hand."""


def connect(dsn: str) -> psycopg.Connection:
    """In autocommit, and with every statement prepared at once."""
    connection = psycopg.connect(dsn, autocommit=True)
    connection.prepare_threshold = 0
    return connection


def loop(dsn: str, begin: Begin, batch: int) -> None:
    """Complete a batch and claim the next in one transaction and one round trip, for ever."""
    connection = connect(dsn)
    connection.execute("LISTEN hand")
    done: list[int] = []
    while True:
        if done:
            with connection.pipeline(), connection.transaction():
                connection.execute(DONE, (done,))
                cursor = connection.execute(CLAIM, (batch,))
            rows = cursor.fetchall()
        else:
            rows = connection.execute(CLAIM, (batch,)).fetchall()
        if not rows and not done:
            _wait(connection)
        done = []
        for job_id, _ in rows:
            begin(job_id)
            done.append(job_id)


def _wait(connection: psycopg.Connection) -> None:
    if not list(connection.notifies(timeout=0)):
        select.select([connection], [], [], 1.0)
    list(connection.notifies(timeout=0))


def transactional(dsn: str, threads: int) -> None:
    """Threads that each take one job, write one row for it and complete it in one transaction."""
    _all_of(threads, lambda: _one_by_one(connect(dsn)))


def _one_by_one(connection: psycopg.Connection) -> None:
    while True:
        with connection.transaction():
            row = connection.execute(CLAIM, (1,)).fetchone()
            if row is not None:
                connection.execute(EFFECT, (row[0],))
                connection.execute(DONE, ([row[0]],))
        if row is None:
            time.sleep(0.01)


def transactional_in_sessions(url: str, threads: int) -> None:
    """The same as an application with SQLAlchemy would write it."""
    engine = sa.create_engine(url, pool_size=threads)
    _all_of(threads, lambda: _one_by_one_in_sessions(engine))


_EFFECT_TABLE = sa.table("hand_effect", sa.column("job_id", sa.BigInteger()))

_JOB = sa.table(
    "hand_job",
    sa.column("id", sa.BigInteger()),
    sa.column("state", sa.SmallInteger()),
    sa.column("finished_at", sa.DateTime(timezone=True)),
)

_CLAIM_ONE = sa.text(CLAIM.replace("%s", "1"))

_COMPLETE = (
    sa.update(_JOB)
    .where(_JOB.c.id == sa.bindparam("job_id"))
    .values(state=2, finished_at=sa.func.now())
)


def _one_by_one_in_sessions(engine: sa.Engine) -> None:
    while True:
        with Session(engine) as session, session.begin():
            row = session.execute(_CLAIM_ONE).first()
            if row is not None:
                session.execute(sa.insert(_EFFECT_TABLE), {"job_id": row.id})
                session.execute(_COMPLETE, {"job_id": row.id})
        if row is None:
            time.sleep(0.01)


def transactional_in_async_sessions(url: str, tasks: int) -> None:
    """The same as an asynchronous application would write it."""
    from sqlalchemy.ext.asyncio import create_async_engine

    async def work() -> None:
        engine = create_async_engine(url, pool_size=tasks)
        await asyncio.gather(*(_one_by_one_in_async_sessions(engine) for _ in range(tasks)))

    asyncio.run(work())


async def _one_by_one_in_async_sessions(engine: Any) -> None:
    from sqlalchemy.ext.asyncio import AsyncSession

    while True:
        async with AsyncSession(engine) as session, session.begin():
            row = (await session.execute(_CLAIM_ONE)).first()
            if row is not None:
                await session.execute(sa.insert(_EFFECT_TABLE), {"job_id": row.id})
                await session.execute(_COMPLETE, {"job_id": row.id})
        if row is None:
            await asyncio.sleep(0.01)


def _all_of(count: int, work: Callable[[], None]) -> None:
    for _ in range(count):
        threading.Thread(target=work, daemon=True).start()
    threading.Event().wait()


def enqueue_in_sqlite(path: str, count: int) -> None:
    """One row a transaction, each on the disk before the next."""
    connection = sqlite3.connect(path, isolation_level=None, timeout=60)
    connection.execute("PRAGMA synchronous = FULL")
    for _ in range(count):
        connection.execute("BEGIN IMMEDIATE")
        connection.execute(INSERT.replace("%s", "?"), ("{}",))
        connection.execute("COMMIT")
    connection.close()


def loop_in_sqlite(path: str, begin: Begin) -> None:
    """Complete a batch and claim the next in one transaction, for ever."""
    connection = sqlite3.connect(path, isolation_level=None, timeout=60)
    connection.execute("PRAGMA synchronous = NORMAL")
    done: list[tuple[int]] = []
    while True:
        connection.execute("BEGIN IMMEDIATE")
        connection.executemany("UPDATE hand_job SET state = 2, finished_at = 0 WHERE id = ?", done)
        rows = connection.execute(
            "UPDATE hand_job SET state = 1, attempts = attempts + 1 WHERE id IN ("
            "SELECT id FROM hand_job WHERE queue = 'default' AND state = 0 ORDER BY run_at, id "
            "LIMIT ?) RETURNING id, arguments",
            (BATCH,),
        ).fetchall()
        connection.execute("COMMIT")
        if not rows and not done:
            time.sleep(0.01)
        done = []
        for job_id, _ in rows:
            begin(job_id)
            done.append((job_id,))
