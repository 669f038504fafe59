"""A worker and its producers behind a pooler that gives every transaction another connection."""

import asyncio
import logging
import uuid
from collections import Counter
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest
from sqlalchemy import create_engine, func, make_url, select
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session

from cyclone_sqla import Cyclone, DuplicateError, Job, JobSpec, Worker
from cyclone_sqla.worker.wakeup import PostgresListener
from tests.databases import Database
from tests.dialects.swapping import SwappingPooler
from tests.waiting import wait_until

JOBS = 200


@pytest.fixture
def pooler(postgresql_database: Database) -> Iterator[SwappingPooler]:
    with SwappingPooler(postgresql_database.url) as pooler:
        yield pooler


def test_the_stand_in_breaks_what_a_session_keeps(pooler: SwappingPooler) -> None:
    url = pooler.url.replace("+psycopg", "")
    with (
        psycopg.connect(url, autocommit=True, prepare_threshold=0) as connection,
        pytest.raises(psycopg.errors.InvalidSqlStatementName),
    ):
        connection.execute("SELECT 1")


def test_each_job_runs_once_and_the_worker_says_once_that_it_polls(
    pooler: SwappingPooler, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PostgresListener, "_ECHO_WITHIN", 0.5)
    caplog.set_level(logging.INFO)
    engine = create_engine(pooler.url, connect_args={"prepare_threshold": None})
    cyclone = Cyclone(database=pooler.url)
    ran: Counter[int] = Counter()

    @cyclone.action(backoff=0.05)
    def work(number: int) -> None:
        ran[number] += 1
        if number % 50 == 0 and ran[number] == 1:
            raise ValueError(number)

    with Worker(cyclone, prepare=False, poll=0.1, lease=5, concurrency=20):
        for number in range(JOBS // 2):
            with Session(engine) as session, session.begin():
                work.enqueue(session, number=number)
        with Session(engine) as session, session.begin():
            cyclone.enqueue_many(
                session, [work.job(number=number) for number in range(JOBS // 2, JOBS)]
            )
        open_jobs = select(func.count()).select_from(Job).where(~Job.is_terminal)
        with engine.connect() as connection:
            wait_until(
                lambda: (connection.rollback(), connection.scalar(open_jobs))[1] == 0,
                "all jobs have ended",
                within=60,
            )
        wait_until(lambda: "listen_url" in caplog.text, "it says that it polls")
    engine.dispose()
    assert ran == {number: 2 if number % 50 == 0 else 1 for number in range(JOBS)}
    assert caplog.text.count("listen_url") == 1
    assert "trying again" not in caplog.text, "a loop has met an error"
    assert pooler.swaps > JOBS


ASYNC_WAYS: dict[str, dict[str, Any]] = {
    "psycopg_async": {"prepare_threshold": None},
    "asyncpg": {
        "statement_cache_size": 0,
        "prepared_statement_cache_size": 0,
        "prepared_statement_name_func": lambda: f"__asyncpg_{uuid.uuid4()}__",
    },
}


@pytest.mark.parametrize("driver", ASYNC_WAYS)
def test_async_sessions_enqueue_through_it(pooler: SwappingPooler, driver: str) -> None:
    url = make_url(pooler.url).set(drivername=f"postgresql+{driver}")
    if driver == "asyncpg":
        url = url.set(query={"ssl": "disable"})
    cyclone = Cyclone(hints=False)

    async def enqueue() -> int:
        engine = create_async_engine(url, connect_args=ASYNC_WAYS[driver])
        async with AsyncSession(engine) as session:
            for number in range(20):
                await cyclone.enqueue(session, "work", {}, unique=f"{number}")
                with pytest.raises(DuplicateError):
                    await cyclone.enqueue(session, "work", {}, unique=f"{number}")
                await cyclone.enqueue_many(session, [JobSpec(kind="work", arguments="{}")] * 2)
                await session.commit()
            jobs = await session.scalar(select(func.count()).select_from(Job))
        await engine.dispose()
        return jobs or 0

    assert asyncio.run(enqueue()) == 60
    assert pooler.swaps >= 20
