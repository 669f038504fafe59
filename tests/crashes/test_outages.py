"""Outages of the database: workers live through them, say how they are, and lose no job."""

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from typing import Any, Self

import psycopg
import pytest
import sqlalchemy as sa
from sqlalchemy import Engine, event

from cyclone_sqla import ConfigurationError, Context, Worker, WorkerSettings
from cyclone_sqla.backoff import Constant
from cyclone_sqla.dialects.pipeline import driver_errors
from cyclone_sqla.dialects.sqlite import SqliteDialect
from cyclone_sqla.migrations import migrate_database
from tests.databases import Database
from tests.servers.postgres import PostgresServer
from tests.waiting import wait_until
from tests.worker.site import Gate, Site, messages, nothing, tracebacks

FEW_LINES = 50


@pytest.fixture
def server() -> Iterator[PostgresServer]:
    """A server that may be stopped."""
    with PostgresServer() as server:
        yield server


@pytest.fixture
def private(server: PostgresServer) -> Iterator[Database]:
    """A database on it, with our tables."""
    server.create_database("private")
    migrate_database(server.url("private"))
    with closing(Database(server.url("private"))) as database:
        yield database


def counting(site: Site, seconds: float) -> Counter[int]:
    """An action that takes a while, and how often it ran for each job."""
    ran, lock = Counter[int](), threading.Lock()

    def work(ctx: Context) -> None:
        with lock:
            ran[ctx.job.id] += 1
        time.sleep(seconds)

    site.action(work, backoff=Constant(0.1))
    return ran


# ---- PostgreSQL goes away ------------------------------------------------------------------------


def test_every_job_ends_though_all_sessions_are_terminated_again_and_again(
    postgresql_database: Database, caplog: pytest.LogCaptureFixture
) -> None:
    site = Site(postgresql_database, hints=False)
    ran = counting(site, 0.02)
    ids = site.enqueue_many(300)
    with site.worker(lease=30.0, queues={"default": 8}) as worker:
        for done in (30, 90, 150, 210, 260):
            wait_until(lambda done=done: completed(site) >= done, f"{done} are done")
            terminate_all(site)
        site.wait_until_all_are("completed")
        wait_until(lambda: worker.is_healthy, "every loop is well again")

    assert set(ran) == set(ids)
    assert {site.job(job_id).attempt for job_id in ids} == {1}
    assert not [text for text in messages(caplog.records) if "lease lost" in text]
    assert len(caplog.records) < FEW_LINES
    assert tracebacks(caplog.records) == []


def test_a_worker_does_not_stay_with_sessions_that_may_only_read(
    postgresql_database: Database,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As after a failover: they stay open, and go on refusing when the server would take writes."""
    monkeypatch.setattr("cyclone_sqla.worker.loop.LOG_EVERY", 0.0)  # every failure is told
    site = Site(postgresql_database, hints=False)
    gate = Gate()
    site.action(gate.passing())
    ids = site.enqueue_many(5)
    name = site.engine.url.database
    outside = sa.create_engine(site.engine.url.set(database="postgres"))
    writes = outside.execution_options(isolation_level="AUTOCOMMIT")

    with site.worker(lease=600.0) as worker, writes.connect() as keeper:
        gate.await_arrival(5)
        keeper.exec_driver_sql(f"ALTER DATABASE {name} SET default_transaction_read_only = on")
        terminate_all(site)
        gate.open()
        wait_until(lambda: "read-only transaction" in caplog.text, "a write is refused")
        assert not worker.is_healthy
        keeper.exec_driver_sql(f"ALTER DATABASE {name} RESET default_transaction_read_only")
        site.engine.dispose()
        site.wait_until_all_are("completed")
        wait_until(lambda: worker.is_healthy, "every loop is well again")
    outside.dispose()

    assert {site.job(job_id).attempt for job_id in ids} == {1}
    assert tracebacks(caplog.records) == []


def test_a_standby_is_refused_and_looked_at_until_it_is_the_primary(
    server: PostgresServer, private: Database
) -> None:
    site = Site(private, hints=False)
    site.action(nothing)
    job_id = site.enqueue()
    server.stop()
    (server.data / "standby.signal").touch()
    server.start()
    site.engine.dispose()

    with pytest.raises(ConfigurationError, match="read-only standby: point the worker at the"):
        Worker(site.cyclone).start()
    with site.engine.connect() as connection:
        assert site.cyclone.explain(connection, job_id).reason == "no-worker"

    site.execute("SELECT pg_promote()")
    with site.worker():
        site.wait_for(job_id, "completed")


def test_a_server_that_takes_no_writes_refuses_a_starting_worker_with_an_error_of_the_database(
    postgresql_database: Database,
) -> None:
    """Not with one of the driver's own: whoever starts a worker makes one line of the others."""
    site = Site(postgresql_database, hints=False)
    site.action(nothing)
    site.execute(f"ALTER DATABASE {site.engine.url.database} SET default_transaction_read_only=on")
    try:
        with pytest.raises(sa.exc.DBAPIError, match="read-only transaction"):
            Worker(site.cyclone).start()
    finally:
        site.execute(f"ALTER DATABASE {site.engine.url.database} RESET ALL")


def completed(site: Site) -> int:
    """How many are, though the session that asks may be terminated too."""
    with suppress(sa.exc.OperationalError):
        return site.states()["completed"]
    return 0


def terminate_all(site: Site) -> None:
    site.execute(
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
        "WHERE datname = current_database() AND pid <> pg_backend_pid()"
    )


def test_a_worker_outlives_a_stop_of_its_server_and_shows_it(
    server: PostgresServer, private: Database, caplog: pytest.LogCaptureFixture
) -> None:
    site = Site(private, hints=False)
    ran = counting(site, 0.02)
    ids = site.enqueue_many(300)
    with site.worker(lease=30.0, rescue_interval=0.5) as worker:
        wait_until(lambda: completed(site) >= 50, "some are done")
        server.stop("immediate")
        for name in ("work", "stage", "rescue"):
            wait_until(lambda name=name: not worker.health()[name], f"{name} shows the outage")
        time.sleep(5.0)
        assert not worker.is_healthy
        server.start()
        site.engine.dispose()
        site.wait_until_all_are("completed")
        wait_until(lambda: worker.is_healthy, "every loop is well again")

    assert set(ran) == set(ids)
    assert len(caplog.records) < FEW_LINES
    assert tracebacks(caplog.records) == []


def test_no_healthy_job_is_taken_over_after_the_server_stood_still(
    server: PostgresServer, private: Database, caplog: pytest.LogCaptureFixture
) -> None:
    """Every lease has run out when it goes on, and nobody's worker is lost."""
    site, gate, runs = Site(private, hints=False), Gate(), Counter[int]()

    def work(ctx: Context) -> None:
        runs[ctx.job.id] += 1
        gate()

    site.action(work)
    ids = site.enqueue_many(6)
    settings = {"lease": 1.5, "rescue_interval": 0.2, "queues": {"default": 3}}
    with site.worker(**settings), site.worker(**settings):
        gate.await_arrival(6)
        for _ in range(2):
            server.freeze()
            time.sleep(2.5)
            server.thaw()
            time.sleep(1.0)
        gate.open()
        site.wait_until_all_are("completed")

    assert runs == dict.fromkeys(ids, 1)
    assert not [text for text in messages(caplog.records) if "rescued" in text]


def test_a_worker_stops_though_its_server_is_gone(
    server: PostgresServer, private: Database, caplog: pytest.LogCaptureFixture
) -> None:
    site, gate = Site(private, hints=False), Gate()
    site.action(gate.passing())
    site.enqueue()
    with site.worker(lease=600.0):
        gate.await_arrival()
        server.stop("immediate")
        gate.open()
    assert tracebacks(caplog.records) == []
    server.start()
    site.engine.dispose()
    assert site.states() == {"running": 1}  # until its lease has run out


# ---- a reply is lost -----------------------------------------------------------------------------


def watch_cursors(engine: Engine, kind: type[psycopg.Cursor[Any]]) -> None:
    """Let every connection make such cursors: what goes through a pipeline meets no listener."""

    @event.listens_for(engine, "connect")
    def install(connection: Any, _record: object) -> None:
        connection.cursor_factory = kind


TURN = "SELECT * FROM pg_temp.cyclone_turn"

Which = Callable[[str, Any], bool]
"""Says of a statement's text and values whether it is meant."""


def is_claim(sql: str, _values: Any) -> bool:
    """Alone, or as a turn that settles nothing."""
    is_idle_turn = sql.startswith(TURN) and "_done_id" not in sql
    return is_idle_turn or sql.startswith("UPDATE cyclone_job SET state='running'")


def is_settling_turn(sql: str, _values: Any) -> bool:
    return sql.startswith(TURN) and "_done_id" in sql


def is_commit(sql: str, _values: Any) -> bool:
    return sql == "COMMIT"


def lose_reply(engine: Engine, which: Which, *, times: int = 1) -> list[str]:
    """Let the replies to such statements get lost, with the connection, after their commit."""
    lost: list[str] = []

    class Cursor(psycopg.Cursor[Any]):
        text = ""
        values: Any = None

        def execute(self, query: Any, params: Any = None, **kwargs: Any) -> Self:
            self.text, self.values = str(query), params
            super().execute(query, params, **kwargs)
            if query == "COMMIT":
                self.drop()
            return self

        def fetchall(self) -> list[Any]:
            self.drop()
            return super().fetchall()

        def drop(self) -> None:
            if which(self.text, self.values) and len(lost) < times:
                lost.append(self.text)
                self.connection.close()
                raise psycopg.OperationalError("the reply was lost")

    watch_cursors(engine, Cursor)
    return lost


@pytest.fixture
def site(postgresql_database: Database) -> Site:
    return Site(postgresql_database, hints=False)


@contextmanager
def unlucky_worker(site: Site, which: Which, **settings: object) -> Iterator[Worker]:
    """A worker that loses the reply to the first such statement."""
    engine = site.database.engine(pool_size=6)
    lost = lose_reply(engine, which)
    settings = {"poll": 0.05, "lease": 600.0, **settings}
    with Worker(site.cyclone, WorkerSettings(**settings), engine=engine) as worker:  # type: ignore[arg-type]
        yield worker
    assert len(lost) == 1


@pytest.mark.parametrize("prepare", [True, False])
def test_jobs_whose_claim_was_not_answered_are_given_back_with_their_attempt(
    site: Site, prepare: bool, caplog: pytest.LogCaptureFixture
) -> None:
    site.action(nothing)
    ids = site.enqueue_many(12, max_attempts=1)
    with unlucky_worker(site, is_claim, queues={"default": 5}, prepare=prepare):
        site.wait_until_all_are("completed")

    rows = [site.job(job_id) for job_id in ids]
    assert {(row.attempt, row.crashes) for row in rows} == {(1, 0)}
    assert [text for text in messages(caplog.records) if text.startswith("giving back 5 job(s)")]


@pytest.mark.parametrize("ending", ["returns", "fails", "discards"])
def test_an_end_whose_commit_was_not_answered_is_not_reported_as_a_lost_lease(
    site: Site, ending: str, caplog: pytest.LogCaptureFixture
) -> None:
    runs: list[int] = []

    def work(ctx: Context) -> str:
        runs.append(ctx.attempt)
        if ending != "returns":
            raise ValueError("it broke")
        return "done"

    site.action(work, backoff=Constant(3_600), max_attempts=1 if ending == "discards" else 5)
    job_id = site.enqueue()
    statement = is_settling_turn if ending == "returns" else is_commit
    state = {"returns": "completed", "fails": "pending", "discards": "discarded"}[ending]
    with unlucky_worker(site, statement):
        site.wait_for(job_id, state)
        other = site.enqueue()
        site.wait_for(other, state)

    assert runs == [1, 1]
    assert len(site.history(job_id)) == (0 if ending == "returns" else 1)
    texts = messages(caplog.records)
    assert not [text for text in texts if "lease lost" in text or "not known" in text]


def test_a_connection_whose_server_went_in_the_middle_of_a_pipeline_is_not_used_again(
    postgresql_database: Database, caplog: pytest.LogCaptureFixture
) -> None:
    """It may be unable to leave the pipeline and look alive: its pool would roll it back in vain,
    and tell of that with a traceback.
    """
    engine = postgresql_database.engine()
    with engine.connect() as connection:
        driver: Any = connection.connection.driver_connection
        driver.pgconn.enter_pipeline_mode()
        driver.pgconn.send_query_params(b"SELECT 1", None)
        with pytest.raises(sa.exc.OperationalError) as caught, driver_errors(connection):
            driver.pgconn.exit_pipeline_mode()
        assert connection.invalidated
    assert caught.value.connection_invalidated
    assert tracebacks(caplog.records) == []


# ---- passing errors ------------------------------------------------------------------------------


@pytest.mark.parametrize("state", ["40001", "40P01", "55P03"])
@pytest.mark.parametrize("which", [is_claim, is_settling_turn])
def test_a_deadlock_or_serialization_failure_is_run_again_and_is_no_outage(
    site: Site, state: str, which: Which, caplog: pytest.LogCaptureFixture
) -> None:
    engine = site.database.engine(pool_size=6)
    failed: list[str] = []

    class Cursor(psycopg.Cursor[Any]):
        def execute(self, query: Any, params: Any = None, **kwargs: Any) -> Self:
            if which(str(query), params) and len(failed) < 3:
                failed.append(str(query))
                query, params = f"DO $$ BEGIN RAISE SQLSTATE '{state}'; END $$", None
            return super().execute(query, params, **kwargs)

    watch_cursors(engine, Cursor)
    site.action(nothing)
    ids = site.enqueue_many(20)
    settings = WorkerSettings(poll=0.05, queues={"default": 4})
    with Worker(site.cyclone, settings, engine=engine), caplog.at_level(logging.INFO):
        site.wait_until_all_are("completed")

    assert len(failed) == 3
    assert {site.job(job_id).attempt for job_id in ids} == {1}
    assert not [r for r in caplog.records if r.levelno >= logging.WARNING]


# ---- SQLite --------------------------------------------------------------------------------------


def test_a_write_lock_that_others_hold_for_long_is_an_outage_that_ends(
    sqlite_database: Database, caplog: pytest.LogCaptureFixture
) -> None:
    site, gate = Site(sqlite_database), Gate()
    site.action(gate.passing())
    with site.worker(lock_timeout=0.2, lease=30.0) as worker:
        row = site.enqueue()
        gate.await_arrival()
        with site.engine.connect() as greedy:
            greedy.exec_driver_sql("BEGIN IMMEDIATE")
            gate.open()
            wait_until(lambda: not worker.health()["work"], "it shows that it can't write")
            greedy.exec_driver_sql("COMMIT")
        site.wait_for(row, "completed")
        wait_until(lambda: worker.is_healthy, "it is well again")

    assert [text for text in messages(caplog.records) if "write lock was held by others" in text]
    assert tracebacks(caplog.records) == []


def test_a_full_disk_loses_no_end_and_no_job(
    sqlite_database: Database, caplog: pytest.LogCaptureFixture
) -> None:
    """The worker's connections may not let the file grow; results that need room wait for it."""
    site, gate = Site(sqlite_database), Gate()

    def work(size: int) -> str:
        gate()
        return "x" * size

    site.action(work)
    large = site.enqueue("work", {"size": 1_000_000})
    lift = threading.Event()
    original: Callable[..., Engine] = SqliteDialect.worker_engine
    with pytest.MonkeyPatch.context() as patch:

        def with_limit(self: SqliteDialect, *args: object) -> Engine:
            engine = original(self, *args)

            @event.listens_for(engine, "checkout")
            def set_limit(dbapi: sa.engine.interfaces.DBAPIConnection, *_: object) -> None:
                pages = 1_000_000 if lift.is_set() else 1
                dbapi.execute(f"PRAGMA max_page_count={pages}")  # type: ignore[attr-defined]

            return engine

        patch.setattr(SqliteDialect, "worker_engine", with_limit)
        with site.worker(lease=600.0) as worker:
            gate.await_arrival()
            gate.open()
            wait_until(lambda: not worker.health()["work"], "it shows that it can't write")
            assert site.job(large).state == "running"
            lift.set()
            site.wait_for(large, "completed")

    assert site.job(large).attempt == 1
    assert len(caplog.records) < FEW_LINES
    assert tracebacks(caplog.records) == []
