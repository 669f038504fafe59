"""The databases of the tests keep their promises: alone, with our tables, gone afterwards."""

import psycopg
import pytest
from sqlalchemy import inspect, text
from sqlalchemy.orm import Session

from cyclone_sqla import Cyclone
from tests.databases import Database, PostgresCopies, postgresql_copy
from tests.servers.postgres import Postgres


@pytest.mark.parametrize("round_", ["first", "second"])
def test_each_test_has_a_database_of_its_own(database: Database, round_: str) -> None:
    engine = database.engine()
    tables = inspect(engine).get_table_names()
    assert "cyclone_job" in tables
    assert "only_mine" not in tables, f"the {round_} test sees what another left"
    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE only_mine (id integer)"))


def test_a_database_is_dropped_though_somebody_is_connected(
    postgres: Postgres, postgres_template: str
) -> None:
    with postgresql_copy(postgres, postgres_template) as database:
        stranger = psycopg.connect(database.url.replace("+psycopg", ""))
    with pytest.raises(psycopg.OperationalError, match="terminating connection"):
        stranger.execute("SELECT 1")
    with pytest.raises(psycopg.OperationalError, match="does not exist"):
        psycopg.connect(database.url.replace("+psycopg", ""))
    stranger.close()


def enqueue(database: Database) -> int:
    with Session(database.engine()) as session, session.begin():
        return Cyclone(hints=False).enqueue(session, "work", {}).id


def test_a_database_is_lent_again_as_if_it_were_fresh(postgres_copies: PostgresCopies) -> None:
    with postgres_copies.lend() as first:
        assert enqueue(first) == 1
        with first.engine().begin() as connection:
            connection.execute(text("CREATE TABLE shop (job_id bigint REFERENCES cyclone_job)"))
            connection.execute(text("INSERT INTO shop VALUES (1)"))
        stranger = psycopg.connect(first.url.replace("+psycopg", ""))
        stranger.execute("SELECT * FROM cyclone_job")
    stranger.close()
    with postgres_copies.lend() as second:
        assert second.url == first.url
        assert "shop" not in inspect(second.engine()).get_table_names()
        assert enqueue(second) == 1


@pytest.mark.parametrize(
    "change",
    [
        "ALTER TABLE cyclone_job SET (autovacuum_enabled = false)",
        "CREATE SCHEMA other",
        "ANALYZE cyclone_job",
        "DROP INDEX cyclone_job_line",
        "CREATE FUNCTION one() RETURNS int LANGUAGE sql AS 'SELECT 1'",
    ],
)
def test_a_database_that_was_changed_is_not_lent_again(
    postgres_copies: PostgresCopies, change: str
) -> None:
    with postgres_copies.lend() as first:
        enqueue(first)
        with first.engine(isolation_level="AUTOCOMMIT").connect() as connection:
            connection.execute(text(change))
    with postgres_copies.lend() as second:
        assert second.url != first.url


def test_sqlite_databases_are_in_wal_mode(sqlite_database: Database) -> None:
    with sqlite_database.engine().connect() as connection:
        assert connection.exec_driver_sql("PRAGMA journal_mode").scalar() == "wal"
