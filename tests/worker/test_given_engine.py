"""An engine that the user gives to a worker: it works on it, or says why it can't."""

from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import event
from sqlalchemy.pool import StaticPool

from cyclone_sqla import ConfigurationError, Worker
from tests.databases import Database
from tests.worker.site import Site, nothing


@pytest.mark.parametrize("driver", ["psycopg2", "asyncpg", "psycopg_async"])
def test_a_driver_that_is_not_ours_is_refused_with_what_to_do(
    postgresql_database: Database, driver: str
) -> None:
    site = Site(postgresql_database)
    site.action(nothing)
    engine = postgresql_database.engine(driver)
    with pytest.raises(ConfigurationError) as refused:
        Worker(site.cyclone, engine=engine).start()
    assert str(refused.value) == (
        "Worker(engine=…) takes an engine of postgresql+psycopg://, not of "
        f"postgresql+{driver}://; give yours as Worker(database=…), and the worker makes one for "
        "the same database"
    )
    job_id = site.enqueue()
    with Worker(site.cyclone, database=engine, poll=0.05):
        site.wait_for(job_id, "completed")


def test_one_connection_for_all_is_refused(postgresql_database: Database) -> None:
    site = Site(postgresql_database)
    site.action(nothing)
    engine = postgresql_database.engine("psycopg", poolclass=StaticPool)
    with pytest.raises(ConfigurationError, match="needs several connections at a time"):
        Worker(site.cyclone, engine=engine).start()


def test_every_write_to_a_file_has_the_lock_from_its_beginning(sqlite_database: Database) -> None:
    """Also on an engine that begins as the driver does: at the first write, after the reads."""
    site = Site(sqlite_database)
    site.action(nothing)
    engine, sent = sqlite_database.engine(), list[tuple[int, str]]()

    @event.listens_for(engine, "connect")
    def trace(connection: Any, _record: Any) -> None:
        number = id(connection)
        connection.set_trace_callback(lambda text: sent.append((number, text)))

    ids = [site.enqueue(sequence=key) for key in ("a", "b", None) for _ in range(2)]
    with Worker(site.cyclone, engine=engine, poll=0.05):
        for job_id in ids:
            site.wait_for(job_id, "completed")

    begun: dict[int, str] = {}
    writes = 0
    for number, text in sent:
        word = text.split(maxsplit=1)[0]
        if word in ("BEGIN", "COMMIT", "ROLLBACK"):
            begun[number] = text.strip()
        elif word in ("INSERT", "UPDATE", "DELETE"):
            writes += 1
            assert begun[number] == "BEGIN IMMEDIATE", text
    assert writes > len(ids)


@pytest.mark.parametrize("url", ["sqlite://", "sqlite:///{file}"])
def test_a_file_that_cannot_be_shared_is_refused(
    sqlite_database: Database, tmp_path: Path, url: str
) -> None:
    site = Site(sqlite_database)
    site.action(nothing)
    options = {} if url == "sqlite://" else {"poolclass": StaticPool}
    other = Database(url.format(file=tmp_path / "jobs.db"))
    with pytest.raises(ConfigurationError, match="file of its own connections"):
        Worker(site.cyclone, engine=other.engine(**options)).start()
    other.close()
