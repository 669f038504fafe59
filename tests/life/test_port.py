"""The port for workers of one's own: where it works, and what it refuses."""

import threading
from collections import defaultdict
from datetime import timedelta

import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.pool import StaticPool

from cyclone_sqla import (
    ConfigurationError,
    Constant,
    Cyclone,
    JobSpec,
    SchemaError,
    TransactionError,
    Worker,
    WorkerSettings,
    begin_before_savepoints,
)
from cyclone_sqla.migrations import upgrade
from cyclone_sqla.port import Queue
from tests.databases import Database
from tests.life.hands import ManualClock


def test_it_claims_the_kinds_of_the_applications_actions_and_heeds_what_they_say(
    database: Database,
) -> None:
    clock = ManualClock()
    cyclone = Cyclone(database.engine(), clock=clock)

    @cyclone.action(backoff=Constant(timedelta(minutes=7)))
    def add(a: int, b: int) -> dict[int, str]:
        return {a + b: "sum"}

    with Queue(cyclone) as queue:
        ref = queue.enqueue("add", {"a": 1, "b": 2})
        queue.fail(queue.claim()[0], "down")
        assert queue.get(ref.id).run_at == clock.now() + timedelta(minutes=7)
        clock.advance(minutes=7)
        (job,) = queue.claim()
        queue.complete(job, add.fn(1, 2))
        assert queue.get(ref.id).result == '{"3":"sum"}'


def test_threads_that_claim_at_once_run_each_job_once_and_each_line_in_order(
    database: Database,
) -> None:
    cyclone = Cyclone(database.engine(), hints=False)
    order: dict[str, list[int]] = defaultdict(list)
    with Queue(cyclone, kinds=["work"]) as first, Queue(cyclone, kinds=["work"]) as second:
        ids: dict[str, list[int]] = defaultdict(list)
        for number in range(48):
            key = f"line-{number % 6}"
            ids[key].append(first.enqueue("work", sequence=key).id)
        left = set().union(*ids.values())
        errors: list[BaseException] = []

        def drain(queue: Queue) -> None:
            try:
                while left:
                    for job in queue.claim(limit=3):
                        order[job.sequence_key or ""].append(job.id)
                        queue.complete(job)
                        left.discard(job.id)
            except BaseException as exc:  # noqa: BLE001 - told below
                errors.append(exc)
                left.clear()

        threads = [threading.Thread(target=drain, args=[queue]) for queue in (first, second) * 2]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    assert errors == []
    assert order == ids


def test_a_claim_looks_past_any_number_of_jobs_that_come_in(database: Database) -> None:
    cyclone = Cyclone(database.engine(), hints=False)
    crowd = [JobSpec(kind="work", arguments="{}", sequence="busy", queue="other")] * 1_100
    with Queue(cyclone, kinds=["work"]) as queue:
        with database.engine().begin() as connection:
            cyclone.enqueue_many(connection, crowd)
        ref = queue.enqueue("work", sequence="quiet")
        assert [job.id for job in queue.claim()] == [ref.id]


def test_it_finds_the_database_of_an_asynchronous_application_and_of_a_url(
    database: Database,
) -> None:
    driver = {"postgresql": "asyncpg", "sqlite": "aiosqlite"}[database.dialect]
    for source in (create_async_engine(database.url_for(driver)), database.url):
        with Queue(Cyclone(source), kinds=["work"]) as queue:
            ref = queue.enqueue("work")
            queue.complete(queue.claim()[0])
            assert queue.get(ref.id).state == "completed"


def test_what_fails_within_a_connection_is_told_of_the_same_worker(database: Database) -> None:
    cyclone = Cyclone(database.engine())
    with Queue(cyclone, kinds=["work"], worker="mine") as queue:
        ref = queue.enqueue("work")
        with database.engine().begin() as connection:
            queue.within(connection).fail(queue.claim()[0], "down")
            (event,) = cyclone.history(connection, ref.id)
        assert (event.worker, event.error) == ("mine", "Failed: down")


@pytest.mark.sqlite
def test_in_memory_it_works_on_the_callers_connection() -> None:
    engine = sa.create_engine("sqlite://", poolclass=StaticPool)
    begin_before_savepoints(engine)
    with engine.begin() as connection:
        upgrade(connection)
    with engine.connect() as connection:
        queue = Queue(Cyclone(), connection, kinds=["work"])
        ids = [queue.enqueue("work", sequence="line", max_attempts=1).id for _ in range(3)]
        assert queue.ready(timeout=0)
        assert not queue.ready(timeout=0)
        with connection.begin_nested():
            queue.fail(queue.claim()[0], "bad", permanent=True)
            queue.complete(queue.claim(limit=5)[0])
        assert queue.recover() == 0
        assert [job.id for job in queue.claim(limit=5)] == ids[2:]
        assert queue.recover() == 1
        connection.rollback()
        assert connection.scalar(sa.text("SELECT count(*) FROM cyclone_job")) == 0
    engine.dispose()


def test_a_connection_in_autocommit_is_refused(database: Database) -> None:
    with database.engine(isolation_level="AUTOCOMMIT").connect() as connection:
        queue = Queue(Cyclone(), connection, kinds=["work"])
        with pytest.raises(TransactionError, match="AUTOCOMMIT"):
            queue.enqueue("work")
        with pytest.raises(TransactionError, match="AUTOCOMMIT"):
            queue.claim()


def test_who_is_next_is_not_decided_by_an_old_snapshot(postgresql_database: Database) -> None:
    engine = postgresql_database.engine(isolation_level="REPEATABLE READ")
    with engine.connect() as connection:
        queue = Queue(Cyclone(), connection, kinds=["work"])
        ref = queue.enqueue("work")
        with pytest.raises(TransactionError, match="READ COMMITTED"):
            queue.claim()
        connection.commit()
    with Queue(Cyclone(), engine, kinds=["work"]) as queue:
        assert queue.claim()[0].id == ref.id


def test_what_is_missing_is_named(database: Database) -> None:
    engine = database.engine()
    with pytest.raises(ConfigurationError, match="Queue\\(cyclone, engine\\)"):
        Queue(Cyclone())
    with Queue(Cyclone(), engine) as queue, pytest.raises(ConfigurationError, match="kinds="):
        queue.claim()
    with Queue(Cyclone(), engine, kinds=["work"]) as queue:
        job_id = queue.enqueue("work").id
        with pytest.raises(ConfigurationError, match="naive"):
            queue.fail(queue.claim()[0], "down", retry_at=ManualClock().now().replace(tzinfo=None))
        assert queue.get(job_id).state == "running"


def test_a_database_without_tables_is_told(database: Database) -> None:
    engine = database.engine()
    with engine.begin() as connection:
        connection.execute(sa.text("DROP TABLE cyclone_alembic_version"))
    with Queue(Cyclone(), engine, kinds=["work"]) as queue, pytest.raises(SchemaError):
        queue.claim()
    with engine.connect() as connection, pytest.raises(SchemaError):
        Queue(Cyclone(), connection, kinds=["work"]).claim()


def test_whoever_must_be_alone_on_a_file_is_alone(sqlite_database: Database) -> None:
    cyclone = Cyclone(sqlite_database.engine())

    @cyclone.action
    def work() -> None: ...

    alone = WorkerSettings(single_instance=True)
    with Queue(cyclone) as queue:
        queue.claim()
        with pytest.raises(ConfigurationError, match="another worker"):
            Worker(cyclone, single_instance=True).start()
        other = Queue(cyclone, settings=alone)
        with pytest.raises(ConfigurationError, match="another worker"):
            other.recover()
        other.close()
    with Queue(cyclone, settings=alone) as queue:
        assert queue.recover() == 0
