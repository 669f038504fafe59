"""A database that falls silent: connections that look alive, and never bring an answer."""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import psycopg
import pytest
import sqlalchemy as sa
from sqlalchemy.pool import NullPool

from cyclone_sqla import Context, Worker, WorkerSettings
from cyclone_sqla.hint_senders import NOTIFY, notify_channel
from cyclone_sqla.own_connection import OwnConnection
from cyclone_sqla.patience import Patience, within
from cyclone_sqla.worker.wakeup import PostgresListener, Wakeup
from tests.databases import Database
from tests.processes import App
from tests.servers.silent import SilentProxy
from tests.waiting import wait_until
from tests.worker.site import Gate, Site, messages, nothing, tracebacks

IMPATIENT = {"query_timeout": 2.0, "lease": 6.0, "rescue_interval": 0.5}


@pytest.fixture
def proxy(postgresql_database: Database) -> Iterator[SilentProxy]:
    """Between the workers and the database; the application reaches it directly."""
    with SilentProxy(postgresql_database.url) as proxy:
        yield proxy


@pytest.fixture
def site(postgresql_database: Database) -> Site:
    """The application."""
    return Site(postgresql_database, hints=False)


def through(proxy: SilentProxy, site: Site) -> dict[str, object]:
    """A worker's settings: short of patience, and behind the proxy."""
    return {**IMPATIENT, "database": sa.make_url(proxy.url)}


# ---- a worker ------------------------------------------------------------------------------------


def test_a_worker_whose_connections_fall_silent_works_on_over_new_ones(
    site: Site, proxy: SilentProxy, caplog: pytest.LogCaptureFixture
) -> None:
    gate = Gate()
    site.action(gate.passing(), kind="hold")
    site.action(nothing)
    held = site.enqueue("hold")
    with site.worker(**through(proxy, site)) as worker:
        gate.await_arrival()
        site.wait_for(site.enqueue(), "completed")
        proxy.hush(takes_new=True)
        site.wait_for(site.enqueue(), "completed")
        wait_until(lambda: worker.status().is_ready, "every loop is well again")
        gate.open()
        site.wait_for(held, "completed")

    assert site.job(held).attempt == 1
    assert tracebacks(caplog.records) == []
    assert "the database did not answer within 2 s" in caplog.text


def test_while_the_database_is_silent_a_worker_says_so_and_works_on_afterwards(
    site: Site, proxy: SilentProxy, caplog: pytest.LogCaptureFixture
) -> None:
    site.action(nothing)
    with site.worker(**through(proxy, site)) as worker:
        site.wait_for(site.enqueue(), "completed")
        proxy.hush(takes_new=False)
        job_id = site.enqueue()
        wait_until(lambda: not any(quick(worker)), "no loop is well")
        assert not worker.status().is_ready
        assert worker.status().is_live
        proxy.speak()
        site.wait_for(job_id, "completed")
        wait_until(lambda: worker.status().is_ready, "every loop is well again")

    assert tracebacks(caplog.records) == []
    assert len(messages(caplog.records)) < 40


def quick(worker: Worker) -> list[bool]:
    """How those loops are that have something to ask within a second."""
    health = worker.health()
    return [health[name] for name in ("work", "stage", "rescue")]


def test_a_wait_that_is_not_over_is_seen_before_it_fails(
    site: Site, proxy: SilentProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cyclone_sqla.worker.worker.ANSWERED_WITHIN", 0.5)
    monkeypatch.setattr("cyclone_sqla.worker.worker.LAST_SETTLE", 0.2)
    site.action(nothing)
    with site.worker(**{**through(proxy, site), "query_timeout": 600.0}, poll=0.2) as worker:
        site.wait_for(site.enqueue(), "completed")
        wait_until(lambda: worker.status().is_ready, "all is well")
        proxy.hush(takes_new=True)
        wait_until(lambda: not worker.status().is_reachable, "somebody waits for long")
        assert all(quick(worker))
        worker.stop(0.0)


def test_a_statement_that_takes_too_long_is_ended_by_the_server_itself(site: Site) -> None:
    """Else each new connection would leave another session behind that waits for the same lock."""
    settings = WorkerSettings(query_timeout=1.0)
    assert statement_timeout(site, settings) == "900ms"
    with pytest.raises(sa.exc.OperationalError, match="statement timeout"):
        in_a_step(site, settings, "SELECT pg_sleep(60)")
    name = site.engine.url.database
    site.execute(f"ALTER DATABASE {name} SET statement_timeout = '70ms'")
    assert statement_timeout(site, settings) == "70ms"
    pooled = WorkerSettings(query_timeout=1.0, prepare=False)
    site.execute(f"ALTER DATABASE {name} RESET statement_timeout")
    assert statement_timeout(site, pooled) == "0"


def statement_timeout(site: Site, settings: WorkerSettings) -> object:
    """That of a worker's connection."""
    return in_a_step(site, settings, "SHOW statement_timeout")


def in_a_step(site: Site, settings: WorkerSettings, sql: str) -> object:
    """What one statement returns that a worker sends."""
    dialect = site.cyclone.dialect("postgresql")
    engine = dialect.worker_engine(site.engine, settings)
    with closing(dialect.hold(engine, settings)) as held, held.step() as connection:
        return connection.exec_driver_sql(sql).scalar()


def test_the_queries_of_actions_are_not_limited(site: Site, proxy: SilentProxy) -> None:
    def sleep(ctx: Context) -> None:
        ctx.session.execute(sa.text("SELECT pg_sleep(1.1)"))

    site.action(sleep)
    with site.worker(**through(proxy, site)):
        assert site.wait_for(site.enqueue(), "completed").attempt == 1


# ---- the stop ------------------------------------------------------------------------------------


def test_a_stop_leaves_no_thread_waiting_for_a_silent_database(
    site: Site, proxy: SilentProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cyclone_sqla.worker.worker.LAST_SETTLE", 0.5)
    site.action(nothing)
    worker = Worker(site.cyclone, poll=0.1, listen=False, database=sa.make_url(proxy.url))
    before = set(threading.enumerate())
    worker.start()
    site.wait_for(site.enqueue(), "completed")
    proxy.hush(takes_new=False)
    wait_until(lambda: worker._parts.connections[0].waiting > 0.2, "it waits")
    assert worker.stop(0.0) is False
    wait_until(lambda: loops_of(before) == [], "its loops have ended")


def loops_of(before: set[threading.Thread]) -> list[str]:
    """The threads that there are since then, those of the connections that nobody takes aside."""
    new = set(threading.enumerate()) - before
    return [t.name for t in new if t.name.startswith("cyclone-") and "connect" not in t.name]


@pytest.mark.slow
def test_a_process_ends_at_sigterm_though_the_database_never_answers(
    postgresql_database: Database, proxy: SilentProxy, tmp_path: Path
) -> None:
    app = App(tmp_path, postgresql_database)
    with app.work("--grace", "0", APP_DATABASE_URL=proxy.url) as process:
        process.wait_for("started")
        proxy.hush(takes_new=False)
        job_id = app.enqueue("say", text="hello")
        asked = time.monotonic()
        assert process.stop() == 4
        assert time.monotonic() - asked < 20
    assert app.job(job_id).state == "available"


# ---- listeners, and those who send hints ---------------------------------------------------------


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """No answer for long is what half a second is."""
    monkeypatch.setattr("cyclone_sqla.own_connection._ANSWER_WITHIN", 0.5)


def test_a_listener_whose_connection_fell_silent_hears_again(
    site: Site, proxy: SilentProxy, impatient: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PostgresListener, "_SILENCE", 0.2)
    monkeypatch.setattr(PostgresListener, "_PATIENCE", 0.05)
    channel = notify_channel(None)
    wakeup = Wakeup(["mail"])
    listener = PostgresListener(wakeup, sa.create_engine(proxy.url, poolclass=NullPool), channel)
    listener.start()
    try:
        wait_until(lambda: listener.healthy, "it hears")
        proxy.hush(takes_new=False)
        wait_until(lambda: not listener.healthy, "it knows that it is deaf")
        proxy.speak()
        wait_until(lambda: listener.healthy, "it hears again")
    finally:
        listener.stop()


@pytest.mark.parametrize("driver", ["psycopg", "psycopg2"])
def test_a_hint_is_not_waited_for_for_ever(
    driver: str, proxy: SilentProxy, impatient: None
) -> None:
    url = sa.make_url(proxy.url).set(drivername=f"postgresql+{driver}")
    engine = sa.create_engine(url, poolclass=NullPool)
    with closing(OwnConnection(engine.pool, engine.dialect)) as connection:
        connection.execute(NOTIFY, channels=["c"], queues=["q"])
        proxy.hush(takes_new=False)
        with pytest.raises(engine.dialect.loaded_dbapi.OperationalError):
            connection.execute(NOTIFY, channels=["c"], queues=["q"])
    with pytest.raises(TimeoutError):
        OwnConnection(engine.pool, engine.dialect)


# ---- patience itself -----------------------------------------------------------------------------


def test_a_connection_that_comes_too_late_is_dropped() -> None:
    may_connect, dropped = threading.Event(), threading.Event()

    def connect() -> str:
        assert may_connect.wait(60)
        return "a connection"

    def drop(connection: str) -> None:
        assert connection == "a connection"
        dropped.set()

    with pytest.raises(TimeoutError):
        within(0.05, connect, drop)
    may_connect.set()
    assert dropped.wait(60)


def test_what_keeps_a_connection_from_being_made_is_raised() -> None:
    def connect() -> None:
        raise TimeoutError("of the driver's own")

    with pytest.raises(TimeoutError, match="driver's own"):
        within(60, connect, lambda _connection: None)


def test_a_wait_that_is_over_is_not_cut(postgresql_database: Database) -> None:
    with psycopg.connect(driver_url(postgresql_database)) as connection:
        patience, impatience = Patience(connection, 0.05), Patience(connection, 60.0)
        for _ in range(20):
            patience.begin()
            connection.execute("SELECT 1")
            patience.end()
            time.sleep(0.01)
        assert (patience.waiting, patience.was_cut) == (0.0, False)
        patience.close()
        impatience.close()
        wait_until(lambda: not watches(), "nobody is watched, so nobody watches")


def watches() -> list[str]:
    """The thread that looks after connections, if there is one."""
    return [t.name for t in threading.enumerate() if t.name == "cyclone-patience"]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the system has no fork")
def test_a_forked_child_never_cuts_a_connection_of_its_parent(
    postgresql_database: Database,
) -> None:
    program = f"""
import os, time, psycopg
from cyclone_sqla.patience import Patience
connection = psycopg.connect({driver_url(postgresql_database)!r})
patience = Patience(connection, 0.1)
if os.fork() == 0:
    patience.begin()
    other = Patience(psycopg.connect({driver_url(postgresql_database)!r}), 0.1)  # has a thread
    time.sleep(0.5)
    os._exit(0)
os.wait()
connection.execute("SELECT 1")
os._exit(0)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0, b"")


def driver_url(database: Database) -> str:
    """For the driver itself."""
    return sa.make_url(database.url).set(drivername="postgresql").render_as_string(False)
