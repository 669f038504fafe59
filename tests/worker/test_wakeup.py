"""A worker is woken: by its own threads, by PostgreSQL, by a commit in its SQLite file."""

import logging
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from sqlalchemy import Engine, create_engine, text
from sqlalchemy.orm import Session
from sqlalchemy.pool import NullPool

from cyclone_sqla.hint_senders import (
    local_sender,
    notify_channel,
    notify_in_transaction,
)
from cyclone_sqla.hints import queue_after_commit
from cyclone_sqla.worker.wakeup import Linger, PostgresListener, Source, SqliteWatcher, Wakeup
from tests.databases import Database
from tests.servers.postgres import PostgresServer
from tests.waiting import wait_until
from tests.worker.pooler import Pooler

_CHANNEL = notify_channel(None)
_LOGGER = "cyclone_sqla.worker.wakeup"


@pytest.fixture
def wakeup() -> Wakeup:
    return Wakeup(["ledger", "mail"])


def test_a_call_before_the_wait_is_kept(wakeup: Wakeup) -> None:
    wakeup.set("mail")
    assert wakeup.wait(0) == {"mail"}


def test_a_wait_takes_the_call_with_it(wakeup: Wakeup) -> None:
    wakeup.set("mail")
    wakeup.wait(0)
    assert wakeup.wait(0) is None


def test_a_call_during_the_look_is_kept_for_the_next_wait(wakeup: Wakeup) -> None:
    wakeup.set("mail")
    assert wakeup.wait(0) == {"mail"}
    wakeup.set("ledger")  # while the loop looks
    assert wakeup.wait(0) == {"ledger"}


def test_calls_are_collected(wakeup: Wakeup) -> None:
    wakeup.set("mail")
    wakeup.set("ledger")
    assert wakeup.wait(0) == {"ledger", "mail"}


def test_a_call_without_names_is_for_every_queue(wakeup: Wakeup) -> None:
    wakeup.set()
    assert wakeup.wait(0) == {"ledger", "mail"}


def test_a_queue_that_is_not_served_wakes_nobody(wakeup: Wakeup) -> None:
    wakeup.set("elsewhere")
    assert wakeup.wait(0) is None


def test_a_worker_without_queues_can_still_be_woken() -> None:
    wakeup = Wakeup([])
    wakeup.set()
    assert wakeup.wait(0) == frozenset()


def test_a_waiting_loop_is_woken_by_another_thread(wakeup: Wakeup) -> None:
    woken: list[frozenset[str] | None] = []
    loop = threading.Thread(target=lambda: woken.append(wakeup.wait(60)))
    loop.start()
    wakeup.set("mail")
    loop.join(30)
    assert woken == [{"mail"}]


def test_no_call_of_many_threads_is_lost() -> None:
    names = {f"queue-{number}" for number in range(64)}
    wakeup = Wakeup(names)
    callers = [threading.Thread(target=wakeup.set, args=(name,)) for name in names]
    for caller in callers:
        caller.start()
    heard: set[str] = set()
    while called := wakeup.wait(5 if heard != names else 0):
        heard |= called
    assert heard == names


def test_a_loop_lingers_before_it_sleeps_for_the_poll_interval() -> None:
    linger = Linger(poll=10.0)
    linger.reset()
    assert [linger.next_wait() for _ in range(3)] == [0.001, 0.005, 0.025]
    assert all(8.0 <= linger.next_wait() <= 10.0 for _ in range(100))
    linger.reset()
    assert linger.next_wait() == 0.001


def test_a_loop_that_was_never_woken_does_not_linger() -> None:
    assert Linger(poll=10.0).next_wait() >= 8.0


@contextmanager
def running(source: Source) -> Iterator[Source]:
    source.start()
    try:
        wait_until(lambda: source.healthy, "the source hears")
        yield source
    finally:
        source.stop()


def _forget_the_first_call(wakeup: Wakeup) -> None:
    """A source calls when it begins to hear; this test is about later calls."""
    assert wakeup.wait(30) is not None


def _notify(engine: Engine, queue: str) -> None:
    with engine.begin() as connection:
        notify_in_transaction(connection, _CHANNEL, [queue])


_BACKENDS = text(
    "SELECT pid, state, query FROM pg_stat_activity"
    " WHERE datname = current_database() AND (query LIKE 'LISTEN%' OR query = 'SELECT 1')"
)


def _listening_backends(engine: Engine) -> list[int]:
    with engine.connect() as connection:
        return [row.pid for row in connection.execute(_BACKENDS)]


def _terminate_listener(engine: Engine) -> None:
    [pid] = _listening_backends(engine)
    with engine.connect() as connection:
        connection.execute(text("SELECT pg_terminate_backend(:pid, 30000)"), {"pid": pid})


def test_a_notification_wakes_the_queue_that_it_names(
    postgresql_database: Database, wakeup: Wakeup
) -> None:
    engine = postgresql_database.engine()
    with running(PostgresListener(wakeup, engine, _CHANNEL)):
        _forget_the_first_call(wakeup)
        _notify(engine, "mail")
        assert wakeup.wait(30) == {"mail"}


def test_what_came_before_the_listener_is_looked_for_once(
    postgresql_database: Database, wakeup: Wakeup
) -> None:
    with running(PostgresListener(wakeup, postgresql_database.engine(), _CHANNEL)):
        assert wakeup.wait(30) == {"ledger", "mail"}


def test_a_listener_holds_neither_a_pool_slot_nor_a_transaction(
    postgresql_database: Database, wakeup: Wakeup
) -> None:
    engine = postgresql_database.engine(pool_size=1, max_overflow=0, pool_timeout=5)
    with (
        running(PostgresListener(wakeup, engine, _CHANNEL)),
        engine.connect() as connection,
    ):
        [row] = connection.execute(_BACKENDS)
        assert row.state == "idle"


def test_a_terminated_listener_comes_back_and_hears(
    postgresql_database: Database, wakeup: Wakeup
) -> None:
    engine = postgresql_database.engine()
    with running(PostgresListener(wakeup, engine, _CHANNEL)) as listener:
        for _ in range(3):
            _terminate_listener(engine)
            wait_until(lambda: len(_listening_backends(engine)) == 1, "it listens again")
            wait_until(lambda: listener.healthy, "it is healthy again")
            while wakeup.wait(0):
                pass
            _notify(engine, "mail")
            assert wakeup.wait(30) == {"mail"}


def test_what_came_before_is_looked_for_when_nothing_more_can_be_missed(
    postgresql_database: Database,
) -> None:
    """A look before the LISTEN would miss what comes between them."""
    engine = postgresql_database.engine()
    listening: list[int] = []

    class Looking(Wakeup):
        def set(self, *queues: str) -> None:
            if not queues:
                listening.append(len(_listening_backends(engine)))
            super().set(*queues)

    with running(PostgresListener(Looking(["mail"]), engine, _CHANNEL)):
        _terminate_listener(engine)
        wait_until(lambda: len(listening) == 2, "it looks again")
    assert listening == [1, 1]


def test_a_job_enqueued_while_the_listener_was_gone_is_looked_for(
    postgresql_database: Database, wakeup: Wakeup
) -> None:
    engine = postgresql_database.engine()
    with running(PostgresListener(wakeup, engine, _CHANNEL)):
        _forget_the_first_call(wakeup)
        _terminate_listener(engine)
        _notify(engine, "elsewhere")  # nobody hears it, and no later one says what it said
        assert wakeup.wait(30) == {"ledger", "mail"}


def test_a_restart_of_the_server_is_two_lines_in_the_log(
    wakeup: Wakeup, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger=_LOGGER)
    with PostgresServer() as server:
        engine = create_engine(server.url("postgres"), poolclass=NullPool)
        with running(PostgresListener(wakeup, engine, _CHANNEL)) as listener:
            server.stop()
            wait_until(lambda: not listener.healthy, "it knows that it is deaf")
            time.sleep(2)  # several attempts to connect
            server.start()
            wait_until(lambda: listener.healthy, "it hears again")
            _forget_the_first_call(wakeup)
            _notify(engine, "mail")
            assert wakeup.wait(30) == {"mail"}
    lines = [record.getMessage() for record in caplog.records if record.name == _LOGGER]
    assert len(lines) == 2
    assert lines[0].startswith("Listening for new jobs failed")
    assert lines[1].startswith("Listening for new jobs again, after")


def test_a_listener_starts_before_its_server(wakeup: Wakeup) -> None:
    with PostgresServer() as server:
        server.stop()
        listener = PostgresListener(wakeup, create_engine(server.url("postgres")), _CHANNEL)
        listener.start()
        try:
            server.start()
            wait_until(lambda: listener.healthy, "it hears")
        finally:
            listener.stop()


def test_a_silent_connection_is_tried_from_time_to_time(
    postgresql_database: Database, wakeup: Wakeup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PostgresListener, "_SILENCE", 0.1)
    engine = postgresql_database.engine()

    def was_tried() -> bool:
        with engine.connect() as connection:
            return [row.query for row in connection.execute(_BACKENDS)] == ["SELECT 1"]

    with running(PostgresListener(wakeup, engine, _CHANNEL)):
        wait_until(was_tried, "it asked the server")


def test_a_listener_stops_soon(postgresql_database: Database, wakeup: Wakeup) -> None:
    engine = postgresql_database.engine()
    with running(PostgresListener(wakeup, engine, _CHANNEL)) as listener:
        before = time.monotonic()
        listener.stop(timeout=60)
        assert time.monotonic() - before < 5
    assert not listener.healthy
    wait_until(lambda: not _listening_backends(engine), "its connection is closed")


def test_a_listener_that_never_started_can_be_stopped(
    postgresql_database: Database, wakeup: Wakeup
) -> None:
    PostgresListener(wakeup, postgresql_database.engine(), _CHANNEL).stop()


def test_behind_a_pooler_in_transaction_mode_it_says_so_once_and_leaves(
    postgresql_database: Database,
    wakeup: Wakeup,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(PostgresListener, "_ECHO_WITHIN", 0.5)
    monkeypatch.setattr(PostgresListener, "_DEAF_FOR", 0.1)  # so that it tries again, silently
    with Pooler(postgresql_database.url, forwards_notifications=False) as pooler:
        engine = create_engine(pooler.url, poolclass=NullPool)
        listener = PostgresListener(wakeup, engine, _CHANNEL)
        listener.start()
        try:
            wait_until(lambda: caplog.records, "it says so")
            time.sleep(1.5)  # more attempts
        finally:
            listener.stop()
    assert not listener.healthy
    [record] = caplog.records
    assert "listen_url" in record.getMessage()


def test_behind_a_pooler_in_session_mode_it_hears(
    postgresql_database: Database, wakeup: Wakeup
) -> None:
    with Pooler(postgresql_database.url, forwards_notifications=True) as pooler:
        engine = create_engine(pooler.url, poolclass=NullPool)
        with running(PostgresListener(wakeup, engine, _CHANNEL)):
            _forget_the_first_call(wakeup)
            _notify(postgresql_database.engine(), "mail")
            assert wakeup.wait(30) == {"mail"}


def test_two_schemas_do_not_wake_each_other(postgresql_database: Database, wakeup: Wakeup) -> None:
    engine = postgresql_database.engine()
    with running(PostgresListener(wakeup, engine, _CHANNEL)):
        _forget_the_first_call(wakeup)
        with engine.begin() as connection:
            notify_in_transaction(connection, notify_channel("other"), ["mail"])
        _notify(engine, "ledger")
        assert wakeup.wait(30) == {"ledger"}


def _commit_something(path: str) -> None:
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE IF NOT EXISTS shop (id INTEGER)")
        connection.execute("INSERT INTO shop VALUES (1)")
    connection.close()


@pytest.fixture
def file(sqlite_database: Database) -> str:
    return sqlite_database.url.removeprefix("sqlite:///")


def test_a_commit_of_another_process_wakes(
    sqlite_database: Database, file: str, wakeup: Wakeup
) -> None:
    program = (
        "import sqlite3, sys\n"
        "with sqlite3.connect(sys.argv[1]) as connection:\n"
        "    connection.execute('CREATE TABLE shop (id INTEGER)')\n"
    )
    with running(SqliteWatcher(wakeup, sqlite_database.engine())):
        _forget_the_first_call(wakeup)
        subprocess.run([sys.executable, "-c", program, file], check=True)
        assert wakeup.wait(30) == {"ledger", "mail"}


def test_a_watcher_that_has_slowed_down_still_sees_each_commit(
    sqlite_database: Database, file: str, wakeup: Wakeup
) -> None:
    with running(SqliteWatcher(wakeup, sqlite_database.engine())):
        _forget_the_first_call(wakeup)
        for _ in range(2):
            time.sleep(1.3)  # longer than it hurries
            _commit_something(file)
            assert wakeup.wait(30) == {"ledger", "mail"}


def test_a_watcher_never_holds_a_lock(sqlite_database: Database, file: str, wakeup: Wakeup) -> None:
    with running(SqliteWatcher(wakeup, sqlite_database.engine())):
        connection = sqlite3.connect(file, timeout=0, isolation_level=None)
        for _ in range(200):
            connection.execute("BEGIN EXCLUSIVE")
            connection.execute("COMMIT")
            connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        connection.close()


def test_an_enqueue_of_the_same_process_names_its_queue(
    sqlite_database: Database, wakeup: Wakeup
) -> None:
    application = sqlite_database.engine()
    with running(SqliteWatcher(wakeup, sqlite_database.engine())):
        _forget_the_first_call(wakeup)
        with Session(application) as session:
            # Nothing is written, so that only the call can wake it.
            connection = session.connection()
            queue_after_commit(
                connection, _CHANNEL, ["mail"], local_sender(application), session=session
            )
            session.commit()
        assert wakeup.wait(30) == {"mail"}


def test_a_stopped_watcher_is_not_called_any_more(
    sqlite_database: Database, wakeup: Wakeup
) -> None:
    engine = sqlite_database.engine()
    with running(SqliteWatcher(wakeup, engine)):
        _forget_the_first_call(wakeup)
    with engine.connect() as connection:
        queue_after_commit(connection, _CHANNEL, ["mail"], local_sender(engine))
    assert wakeup.wait(0) is None


def test_a_watcher_waits_for_its_file(
    tmp_path: Path, wakeup: Wakeup, caplog: pytest.LogCaptureFixture
) -> None:
    watcher = SqliteWatcher(wakeup, create_engine(f"sqlite:///{tmp_path}/later/cyclone.db"))
    watcher.start()
    try:
        wait_until(lambda: caplog.records, "it says that it can't watch")
        assert not watcher.healthy
        (tmp_path / "later").mkdir()
        wait_until(lambda: watcher.healthy, "it watches")
    finally:
        watcher.stop()


def test_sqlite_needs_no_psycopg() -> None:
    program = (
        "import sys\n"
        "import cyclone_sqla.hints, cyclone_sqla.hint_senders, cyclone_sqla.worker.wakeup\n"
        "from sqlalchemy import create_engine\n"
        "cyclone_sqla.hint_senders.local_sender(create_engine('sqlite:///none.db'))\n"
        "print(*({'psycopg', 'alembic', 'rich'} & sys.modules.keys()))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True
    )
    assert done.stdout.strip() == ""


def test_a_call_for_every_queue_is_no_errand() -> None:
    wakeup = Wakeup(["mail"], ["renew"])
    wakeup.set()
    assert wakeup.wait(0) == {"mail"}
    wakeup.set("renew")
    assert wakeup.wait(0) == {"renew"}
