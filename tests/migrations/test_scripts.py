"""The SQL for people who run it themselves: it needs no driver and leads to the same tables."""

import subprocess
import sys

import pytest
from sqlalchemy import Connection, make_url

from cyclone_sqla import migrations, schema_version
from tests.databases import Database
from tests.migrations.catalogs import Catalog, catalog, engine_with_schema
from tests.migrations.scripts import run_script

NAMES = ["My-App", "user", "1x", 'a"b', "o'brien", "a$$b", "a.b", "ü", "a%b", "a:b", "a b"]


@pytest.mark.parametrize("schema", [None, *NAMES])
def test_the_script_leads_to_the_same_tables(empty_database: Database, schema: str | None) -> None:
    engine = engine_with_schema(empty_database, schema or "unused")
    dialect = migrations.script_dialect(engine.url)
    with engine.connect() as connection:
        migrations.upgrade(connection, schema=schema)
        migrated = _state(connection, schema)
    run_script(empty_database, migrations.upgrade_script(dialect, schema=schema), schema)
    with engine.connect() as connection:
        assert _state(connection, schema) == migrated
    run_script(empty_database, migrations.downgrade_script(dialect, "base", schema=schema), schema)
    with engine.connect() as connection:
        assert catalog(connection, schema) == set()
        assert schema_version.read(connection, schema) is None


def _state(connection: Connection, schema: str | None) -> tuple[Catalog, str | None]:
    return catalog(connection, schema), schema_version.read(connection, schema)


@pytest.mark.sqlite
def test_the_script_for_sqlite_sets_wal(empty_sqlite: Database) -> None:
    dialect = migrations.script_dialect(make_url(empty_sqlite.url))
    run_script(empty_sqlite, migrations.upgrade_script(dialect), None)
    with empty_sqlite.engine().connect() as connection:
        assert connection.exec_driver_sql("PRAGMA journal_mode").scalar() == "wal"


@pytest.mark.parametrize("url", ["postgresql://", "postgresql+asyncpg://", "sqlite://"])
def test_a_script_needs_no_driver(url: str) -> None:
    code = f"""
import sys
for driver in ("psycopg", "psycopg2", "asyncpg", "aiosqlite"):
    sys.modules[driver] = None
from sqlalchemy import make_url
from cyclone_sqla import migrations
print(migrations.upgrade_script(migrations.script_dialect(make_url({url!r}))))
"""
    answer = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True
    )
    assert "CREATE TABLE cyclone_job" in answer.stdout


def test_a_script_for_part_of_the_way() -> None:
    dialect = migrations.script_dialect(make_url("postgresql://"))
    assert "CREATE" not in migrations.upgrade_script(dialect, start="head")
    assert "DROP" not in migrations.downgrade_script(dialect, "base", start="base")
