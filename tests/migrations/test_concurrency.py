"""Any number of processes and threads may migrate at the same time, and any of them may die."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta

import psutil
import pytest
from sqlalchemy import event, make_url, text

from cyclone_sqla import migrations, schema_version
from cyclone_sqla.errors import DatabaseBusyError
from cyclone_sqla.urls import masked
from tests.databases import Database
from tests.waiting import wait_until

PROCESSES = 5
SOON = timedelta(seconds=0.2)


class Migration:
    """`cyclone-sqla migrate`, as a process."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._process = subprocess.Popen(
            [sys.executable, "-m", "cyclone_sqla", "migrate", "--database-url", database.url],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def is_connected(self) -> bool:
        """Whether it has reached the database."""
        process = psutil.Process(self._process.pid)
        if self._database.dialect == "sqlite":
            file = os.path.realpath(str(make_url(self._database.url).database))
            return any(opened.path == file for opened in process.open_files())
        port = make_url(self._database.url).port
        return any(c.raddr and c.raddr.port == port for c in process.net_connections())

    def is_over(self) -> bool:
        return self._process.poll() is not None

    def output(self) -> str:
        """What it printed; fails if it failed."""
        out, err = self._process.communicate(timeout=60)
        assert self._process.returncode == 0, err
        return out

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


@contextmanager
def _migrations_that_wait(database: Database) -> Iterator[list[Migration]]:
    """Five of them, all at the door of a database that somebody else is migrating."""
    processes = [Migration(database) for _ in range(PROCESSES)]
    try:
        for process in processes:
            wait_until(process.is_connected, "a migration has reached the database")
        yield processes
    finally:
        for process in processes:
            process.close()


def test_of_five_at_once_on_an_empty_database_one_migrates(empty_database: Database) -> None:
    with empty_database.engine().connect() as connection:
        migrations.upgrade(connection)
        with _migrations_that_wait(empty_database) as processes:
            assert not any(process.is_over() for process in processes)
            connection.rollback()
            outputs = [process.output() for process in processes]
    assert sum("0001  " in output for output in outputs) == 1
    assert sum("nothing to do" in output for output in outputs) == PROCESSES - 1
    _assert_migrated_once(empty_database)


def test_those_who_waited_find_the_work_of_the_first(empty_database: Database) -> None:
    with empty_database.engine().connect() as connection:
        migrations.upgrade(connection)
        with _migrations_that_wait(empty_database) as processes:
            assert not any(process.is_over() for process in processes)
            connection.commit()
            assert all("nothing to do" in process.output() for process in processes)
    _assert_migrated_once(empty_database)


def test_five_at_once_on_a_migrated_database_have_nothing_to_do(empty_database: Database) -> None:
    migrations.migrate_database(empty_database.url)
    with _migrations_that_are_free(empty_database) as processes:
        assert all("nothing to do" in process.output() for process in processes)
    _assert_migrated_once(empty_database)


@contextmanager
def _migrations_that_are_free(database: Database) -> Iterator[list[Migration]]:
    processes = [Migration(database) for _ in range(PROCESSES)]
    try:
        yield processes
    finally:
        for process in processes:
            process.close()


_DIES_MIDWAY = """
import os, sys
from sqlalchemy import create_engine
from cyclone_sqla import migrations
with migrations.own_transaction(sys.argv[1]) as connection:
    migrations.upgrade(connection)
    print("midway", flush=True)
    sys.stdin.read()
"""


def test_one_that_is_killed_midway_lets_the_others_go_on(empty_database: Database) -> None:
    command = [sys.executable, "-c", _DIES_MIDWAY, empty_database.url]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as one:
        try:
            assert one.stdout is not None
            assert one.stdout.readline() == "midway\n"
            with _migrations_that_wait(empty_database) as processes:
                one.send_signal(signal.SIGKILL)
                outputs = [process.output() for process in processes]
        finally:
            one.kill()
    assert sum("0001  " in output for output in outputs) == 1
    _assert_migrated_once(empty_database)


def test_threads_of_one_process_take_turns(empty_database: Database) -> None:
    barrier = threading.Barrier(2)

    def migrate() -> int:
        barrier.wait(30)
        return len(migrations.migrate_database(empty_database.url))

    for _ in range(3):
        with ThreadPoolExecutor(2) as threads:
            steps = [threads.submit(migrate), threads.submit(migrate)]
            assert sorted(step.result() for step in steps) == [0, len(schema_version.REVISIONS)]
        _assert_migrated_once(empty_database)
        with migrations.own_transaction(empty_database.url) as connection:
            migrations.downgrade(connection, revision="base")


def test_an_application_that_sends_begin_itself_waits_too(empty_sqlite: Database) -> None:
    """Deferred: two that read first would hinder each other's write, and one would fail."""
    engine = empty_sqlite.engine()
    event.listen(engine, "connect", lambda c, _: setattr(c, "isolation_level", None))
    event.listen(engine, "begin", lambda connection: connection.exec_driver_sql("BEGIN"))
    asked = threading.Event()

    def migrate() -> int:
        with engine.connect() as connection, connection.begin():
            asked.set()
            return len(migrations.upgrade(connection))

    with engine.connect() as first, ThreadPoolExecutor(1) as thread:
        migrations.upgrade(first)
        second = thread.submit(migrate)
        assert asked.wait(30)
        first.commit()
        assert second.result() == 0
    _assert_migrated_once(empty_sqlite)


def test_the_wait_for_another_migration_has_an_end(empty_database: Database) -> None:
    with empty_database.engine().connect() as holder:
        migrations.upgrade(holder)
        with pytest.raises(DatabaseBusyError, match=r"for more than 0[.]2 s"):
            migrations.migrate_database(empty_database.url, lock_timeout=SOON)


def test_who_waits_in_vain_is_told_whom_to_look_for(empty_postgresql: Database) -> None:
    with migrations.own_transaction(empty_postgresql.url) as holder:
        migrations.upgrade(holder)
        pid = holder.scalar(text("SELECT pg_backend_pid()"))
        with pytest.raises(DatabaseBusyError) as caught:
            migrations.migrate_database(empty_postgresql.url, lock_timeout=SOON)
    assert f"server process {pid} (cyclone-sqla migrate from 127.0.0.1" in str(caught.value)


def test_schemas_are_migrated_independently(empty_postgresql: Database) -> None:
    with empty_postgresql.engine().connect() as holder:
        migrations.upgrade(holder, schema="one")
        assert migrations.migrate_database(empty_postgresql.url, schema="two", lock_timeout=SOON)


def test_the_default_schema_and_its_name_are_one_lock(empty_postgresql: Database) -> None:
    with empty_postgresql.engine().connect() as holder:
        migrations.upgrade(holder)
        with pytest.raises(DatabaseBusyError):
            migrations.migrate_database(empty_postgresql.url, schema="public", lock_timeout=SOON)


def test_a_table_in_use_is_waited_for_for_a_time(postgresql_database: Database) -> None:
    with postgresql_database.engine().connect() as reader:
        reader.execute(text("SELECT count(*) FROM cyclone_job"))
        with (
            pytest.raises(DatabaseBusyError, match=r"in use for more than 0[.]2 s"),
            migrations.own_transaction(postgresql_database.url) as connection,
        ):
            migrations.downgrade(connection, revision="base", lock_timeout=SOON)
    _assert_migrated_once(postgresql_database)


def _assert_migrated_once(database: Database) -> None:
    with database.engine().connect() as connection:
        versions = connection.scalars(
            text(f"SELECT version_num FROM {schema_version.VERSION_TABLE}")
        )
        assert versions.all() == [schema_version.HEAD]
        assert migrations.check(connection).is_current, masked(connection.engine.url)
