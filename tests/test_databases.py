"""The databases of the tests keep their promises: alone, with our tables, gone afterwards."""

import psycopg
import pytest
from sqlalchemy import inspect, text

from tests.databases import Database, postgresql_copy
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


def test_sqlite_databases_are_in_wal_mode(sqlite_database: Database) -> None:
    with sqlite_database.engine().connect() as connection:
        assert connection.exec_driver_sql("PRAGMA journal_mode").scalar() == "wal"
