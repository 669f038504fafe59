"""Any number of processes and threads may migrate at the same time, and any of them may die."""

import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
from sqlalchemy import event, text

from cyclone_sqla import migrations, schema_version
from cyclone_sqla.errors import DatabaseBusyError
from cyclone_sqla.urls import masked
from tests.databases import Database
from tests.migrations.processes import Migration, five_migrations, five_that_wait

SOON = timedelta(seconds=0.2)


def test_of_five_at_once_on_an_empty_database_one_migrates(
    empty_database: Database, tmp_path: Path
) -> None:
    with empty_database.engine().connect() as connection:
        migrations.upgrade(connection)
        with five_that_wait(empty_database, tmp_path) as processes:
            connection.rollback()
            _assert_one_migrated(processes)
    _assert_migrated_once(empty_database)


def test_those_who_waited_find_the_work_of_the_first(
    empty_database: Database, tmp_path: Path
) -> None:
    with empty_database.engine().connect() as connection:
        migrations.upgrade(connection)
        with five_that_wait(empty_database, tmp_path) as processes:
            connection.commit()
            assert all("nothing to do" in process.result() for process in processes)
    _assert_migrated_once(empty_database)


def test_five_at_once_on_a_migrated_database_have_nothing_to_do(
    empty_database: Database, tmp_path: Path
) -> None:
    migrations.migrate_database(empty_database.url)
    with five_migrations(empty_database, tmp_path) as processes:
        assert all("nothing to do" in process.result() for process in processes)
    _assert_migrated_once(empty_database)


_DIES_MIDWAY = """
import os, sys
from sqlalchemy import create_engine
from cyclone_sqla import migrations
with migrations.own_transaction(sys.argv[1]) as connection:
    migrations.upgrade(connection)
    print("midway", flush=True)
    sys.stdin.read()
"""


def test_one_that_is_killed_midway_lets_the_others_go_on(
    empty_database: Database, tmp_path: Path
) -> None:
    command = [sys.executable, "-c", _DIES_MIDWAY, empty_database.url]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as one:
        try:
            assert one.stdout is not None
            assert one.stdout.readline() == "midway\n"
            with five_that_wait(empty_database, tmp_path) as processes:
                one.send_signal(signal.SIGKILL)
                _assert_one_migrated(processes)
        finally:
            one.kill()
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
    """Two that read before they have the lock hinder each other's write, and one fails."""
    engine = empty_sqlite.engine()
    has_read = threading.Event()
    event.listen(engine, "connect", lambda c, _: setattr(c, "isolation_level", None))
    event.listen(engine, "begin", lambda connection: connection.exec_driver_sql("BEGIN"))

    def migrate() -> int:
        with engine.begin() as connection:
            event.listen(connection, "after_cursor_execute", lambda *_: has_read.set())
            return len(migrations.upgrade(connection))

    with engine.connect() as first, ThreadPoolExecutor(1) as thread:
        migrations.upgrade(first)
        second = thread.submit(migrate)
        assert not has_read.wait(1)
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


def _assert_one_migrated(processes: list[Migration]) -> None:
    results = [process.result() for process in processes]
    assert sum("0001  The tables of the queue" in result for result in results) == 1
    assert sum("nothing to do" in result for result in results) == len(processes) - 1


def _assert_migrated_once(database: Database) -> None:
    with database.engine().connect() as connection:
        versions = connection.scalars(
            text(f"SELECT version_num FROM {schema_version.VERSION_TABLE}")
        )
        assert versions.all() == [schema_version.HEAD]
        assert migrations.check(connection).is_current, masked(connection.engine.url)
