"""Async actions cancelled in the middle of a query leave the application's pool as it was."""

import random
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from sqlalchemy import Engine, text
from sqlalchemy.ext.asyncio import AsyncEngine, async_sessionmaker, create_async_engine

from cyclone_sqla.outcomes import CancelledOutcome, Completed, Outcome
from cyclone_sqla.worker.runs import Interruption
from tests.databases import Database
from tests.waiting import wait_until
from tests.worker.stage import PATIENCE, Stage, opened

RUNS = 300
AT_ONCE = 10


@pytest.mark.parametrize("driver", ["psycopg_async", "asyncpg"])
def test_cancelled_queries_leave_no_connection_behind(
    postgresql_database: Database, driver: str
) -> None:
    url = postgresql_database.url_for(driver)
    engine = create_async_engine(url, pool_size=AT_ONCE, max_overflow=0)
    observer = postgresql_database.engine(isolation_level="AUTOCOMMIT")
    with opened() as stage:
        with _hunted(stage):
            outcomes = _run(stage, stage.register(_query(engine, seconds=0.01)), RUNS)
        assert engine.pool.checkedout() == 0
        wait_until(lambda: _open_transactions(observer) == 0, "no transaction is left open")
        assert _run(stage, stage.register(_query(engine)), 100) == [Completed("1")] * 100
        stage.outcome(_disposal(engine))

    ends = {type(outcome) for outcome in outcomes}
    assert CancelledOutcome in ends, "some were cancelled in time"


def _query(engine: AsyncEngine, seconds: float = 0) -> Callable[[], Coroutine[Any, Any, int]]:
    new_session = async_sessionmaker(engine)

    async def action() -> int:
        async with new_session.begin() as session:
            await session.execute(text("SELECT pg_sleep(:s)"), {"s": seconds * random.random()})
            return int((await session.execute(text("SELECT 1"))).scalar_one())

    return action


def _disposal(engine: AsyncEngine) -> Callable[[], Coroutine[Any, Any, None]]:
    """In the event loop that the connections belong to."""

    async def action() -> None:
        await engine.dispose()

    return action


def _run(stage: Stage, kind: str, count: int) -> list[Outcome]:
    """Run the action so many times, as many at once as the pool has connections."""
    jobs = [stage.claimed(kind) for _ in range(count)]
    for job in jobs:
        wait_until(lambda: len(stage.executor.running()) < AT_ONCE, "a slot is free", every=0.0005)
        stage.executor.start_runs([job])
    return [stage.wait(job).outcome for job in jobs]


@contextmanager
def _hunted(stage: Stage) -> Iterator[None]:
    """A thread cancels runs at random moments, and asks more than once, as renewals do."""
    over = threading.Event()

    def hunt() -> None:
        while not over.is_set():
            for job in stage.executor.running():
                if random.random() < 0.3:
                    stage.executor.cancel(job.id, job.lease, Interruption.CANCELLED)
            time.sleep(0.001)

    hunter = threading.Thread(target=hunt)
    hunter.start()
    yield
    over.set()
    hunter.join(PATIENCE)


def _open_transactions(observer: Engine) -> int:
    with observer.connect() as connection:
        query = "SELECT count(*) FROM pg_stat_activity WHERE state LIKE 'idle in transaction%'"
        return int(connection.execute(text(query)).scalar_one())
