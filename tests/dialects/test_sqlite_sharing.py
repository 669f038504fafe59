"""One SQLite file shared by workers, an application that writes, and a reader that stays."""

import subprocess
import sys
import threading
from pathlib import Path
from typing import Self

import sqlalchemy as sa
from sqlalchemy.orm import Session

from cyclone_sqla import Cyclone, JobSpec, Worker
from tests.databases import Database
from tests.waiting import wait_until

WORKER = """
import sys
from cyclone_sqla import Cyclone, Worker

cyclone = Cyclone(database=sys.argv[1])

@cyclone.action
def work() -> None: ...

Worker(cyclone, poll=0.1, name=sys.argv[2]).run()
"""


class Workers:
    """Worker processes on one file, whose logs are kept."""

    def __init__(self, database: Database, directory: Path, count: int) -> None:
        self.logs = [directory / f"worker-{number}.log" for number in range(count)]
        self.processes = [_start(database, log) for log in self.logs]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            process.kill()
            process.wait()


def _start(database: Database, log: Path) -> "subprocess.Popen[bytes]":
    command = [sys.executable, "-c", WORKER, database.url, log.stem]
    with log.open("wb") as stderr:
        return subprocess.Popen(command, stderr=stderr)


def enqueue(database: Database, count: int) -> None:
    engine = database.engine()
    with Session(engine) as session, session.begin():
        Cyclone().enqueue_many(session, [JobSpec(kind="work", arguments="{}")] * count)
    engine.dispose()


def counts(database: Database, column: str) -> dict[str, int]:
    engine = database.engine()
    with engine.connect() as connection:
        rows = connection.exec_driver_sql(
            f"SELECT {column}, count(*) FROM cyclone_job GROUP BY {column}"
        ).all()
    engine.dispose()
    return {str(key): number for key, number in rows}


def test_two_workers_share_a_file_fairly(sqlite_database: Database, tmp_path: Path) -> None:
    jobs = 4_000
    with Workers(sqlite_database, tmp_path, 2):
        wait_until(lambda: count_of_workers(sqlite_database) == 2, "both are there")
        enqueue(sqlite_database, jobs)
        wait_until(
            lambda: counts(sqlite_database, "state") == {"completed": jobs}, "all ran", within=90
        )
    shares = [number / jobs for number in counts(sqlite_database, "worker").values()]
    assert len(shares) == 2
    assert min(shares) > 0.2


def count_of_workers(database: Database) -> int:
    engine = database.engine()
    with engine.connect() as connection:
        names = connection.exec_driver_sql("SELECT name FROM cyclone_worker").scalars().all()
    engine.dispose()
    return len(names)


def test_no_lock_error_escapes_while_an_application_writes_and_a_reader_stays(
    sqlite_database: Database, tmp_path: Path
) -> None:
    enqueue(sqlite_database, 1_000)
    engine = sqlite_database.engine()
    with engine.begin() as connection:
        connection.exec_driver_sql("CREATE TABLE note (id INTEGER PRIMARY KEY, text TEXT)")
    reader = engine.connect()
    reader.exec_driver_sql("BEGIN")
    reader.exec_driver_sql("SELECT count(*) FROM cyclone_job").scalar()
    done, notes, faults = threading.Event(), [0], []

    def write() -> None:
        while not done.wait(0.005):
            try:
                with engine.begin() as connection:
                    connection.execute(sa.text("INSERT INTO note (text) VALUES ('x')"))
                notes[0] += 1
            except sa.exc.OperationalError as error:
                faults.append(error)

    application = threading.Thread(target=write)
    application.start()
    try:
        with Workers(sqlite_database, tmp_path, 4) as workers:
            wait_until(
                lambda: counts(sqlite_database, "state") == {"completed": 1_000},
                "all ran",
                within=90,
            )
    finally:
        done.set()
        application.join()
        reader.close()
    assert counts(sqlite_database, "attempt") == {"1": 1_000}
    assert faults == []
    assert notes[0] > 0
    assert [log.read_text() for log in workers.logs] == [""] * 4
    engine.dispose()


AS_IF_CLOSING = """
import fcntl, os, sys, time

PENDING_BYTE = 0x40000000  # taken by who closes the file, to see whether it is the last
file = os.open(sys.argv[1], os.O_RDWR)
fcntl.lockf(file, fcntl.LOCK_EX, 1, PENDING_BYTE)
print("locked", flush=True)
time.sleep(0.5)
"""


def test_a_worker_may_start_while_another_process_closes_the_file(
    sqlite_database: Database,
) -> None:
    cyclone = Cyclone(database=sqlite_database.url)

    @cyclone.action
    def work() -> None: ...

    file = str(sqlite_database.engine().url.database)
    command = [sys.executable, "-c", AS_IF_CLOSING, file]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as closing:
        assert closing.stdout is not None
        assert closing.stdout.readline() == b"locked\n"
        with Worker(cyclone, poll=0.1) as worker:
            assert closing.poll() == 0
            wait_until(lambda: worker.is_healthy, "it works")
