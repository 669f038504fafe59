"""The queue lives in any schema of PostgreSQL, whatever its name."""

from collections.abc import Iterator
from typing import Any

import pytest
from sqlalchemy import func, select
from sqlalchemy.orm import Session

from cyclone_sqla import Cyclone, DuplicateError, JobNotFoundError, Worker
from cyclone_sqla.migrations import migrate_database
from tests.binding.doors import KINDS, Door, drivers
from tests.databases import Database, postgresql_copy
from tests.servers.postgres import Postgres
from tests.shop import settled
from tests.waiting import wait_until

NAMES = [
    "My-App", "user", "1x", 'a"b', "o'brien", "a$$b", "a.b", "50%", "%s", "a:b", "ünï", "[a]",
    "SELECT", "public ", "a\\b", "{a}",
]  # fmt: skip


@pytest.fixture(scope="module")
def database(postgres: Postgres, postgres_template: str) -> Iterator[Database]:
    """One database with all these schemas."""
    with postgresql_copy(postgres, postgres_template) as database:
        for name in NAMES:
            migrate_database(database.url, schema=name)
        yield database


@pytest.mark.parametrize("name", NAMES)
def test_a_worker_runs_the_jobs_of_a_schema_of_any_name(database: Database, name: str) -> None:
    engine = database.engine()
    cyclone = Cyclone(engine, schema=name)

    @cyclone.action
    def count(number: int) -> int:
        return number + 1

    with Session(engine) as session, session.begin():
        refs = cyclone.enqueue_many(session, [count.job(1), count.using(process_in=0.01).job(2)])
    job = cyclone.job_class
    completed = select(func.count()).where(job.state == "completed", job.result.is_not(None))

    def are_completed() -> bool:
        with Session(engine) as session:
            return session.scalar(completed) == len(refs)

    with Worker(cyclone, poll=0.05) as worker:
        wait_until(are_completed, "all are completed")
        assert worker.is_healthy


@pytest.mark.parametrize("driver", drivers("psycopg", "psycopg2", "psycopg_async", "asyncpg"))
def test_every_driver_enqueues_into_a_schema_of_any_name(database: Database, driver: str) -> None:
    async def story(target: Any) -> None:
        for name in NAMES:
            await _use(target, Cyclone(schema=name))
        await settled(target.rollback())

    Door(database, driver, KINDS[driver][0]).run(story)


async def _use(target: Any, cyclone: Cyclone) -> None:
    options: dict[str, Any] = {"unique": "u", "idempotency_key": "i"}
    ref = await settled(cyclone.enqueue(target, "mail", {}, **options))
    again = await settled(cyclone.enqueue(target, "mail", {}, **options))
    assert (again.id, again.created) == (ref.id, False)

    @cyclone.action
    def mail() -> None:
        """Nobody runs it."""

    many = [mail.job(), mail.using(unique="v", idempotency_key="j").job()]
    last = (await settled(cyclone.enqueue_many(target, many)))[-1]
    with pytest.raises(DuplicateError):
        await settled(cyclone.enqueue_many(target, [mail.job(), mail.using(unique="u").job()]))
    job = await settled(cyclone.get(target, ref.id))
    assert isinstance(job, cyclone.job_class)
    assert job.unique_key == "u"
    with pytest.raises(JobNotFoundError):
        await settled(cyclone.get(target, last.id + 1))
