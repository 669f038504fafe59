"""The revisions and the models say the same, and a downgrade takes everything away again."""

from pathlib import Path

import pytest
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, select, text

from cyclone_sqla import migrations, schema_version
from cyclone_sqla.models import LEASE_COUNTER, tables_in
from tests.databases import Database
from tests.migrations.catalogs import catalog, engine_with_schema

SCHEMA = "My-App"

in_both_places = pytest.mark.parametrize("schema", [None, SCHEMA])


def _create_all(connection: Connection, schema: str | None) -> None:
    tables = tables_in(schema)
    if schema is not None and connection.dialect.name != "sqlite":
        connection.execute(text(f'CREATE SCHEMA "{schema}"'))
    tables.job.metadata.create_all(connection, tables=tables.of(connection.dialect.name))


@in_both_places
def test_the_migrations_build_what_the_models_say(
    empty_database: Database, schema: str | None
) -> None:
    engine = engine_with_schema(empty_database, SCHEMA)
    with engine.connect() as connection:
        migrations.upgrade(connection, schema=schema)
        migrated = catalog(connection, schema)
        connection.rollback()
        _begin(connection)
        _create_all(connection, schema)
        assert migrated == catalog(connection, schema)
    assert len(migrated) > len(tables_in(schema).of(empty_database.dialect))


def _begin(connection: Connection) -> None:
    """Begin for DDL: Python's sqlite3 begins at a write, and DDL is none to it."""
    if connection.dialect.name == "sqlite":
        connection.exec_driver_sql("BEGIN")


@in_both_places
def test_the_first_lease_can_be_drawn(empty_database: Database, schema: str | None) -> None:
    engine, tables = engine_with_schema(empty_database, SCHEMA), tables_in(schema)
    with engine.connect() as connection:
        migrations.upgrade(connection, schema=schema)
        if empty_database.dialect == "sqlite":
            counters = connection.execute(select(tables.counter)).all()
            assert counters == [(LEASE_COUNTER, 0)]
        else:
            assert connection.scalar(tables.lease_sequence) == 1


@in_both_places
def test_a_downgrade_to_base_leaves_nothing_of_ours(
    empty_database: Database, schema: str | None
) -> None:
    engine = engine_with_schema(empty_database, SCHEMA)
    with engine.begin() as connection:
        before = _everything(connection)
        migrations.upgrade(connection, schema=schema)
        assert _everything(connection) != before
        (undone,) = migrations.downgrade(connection, schema=schema, revision="base")
        assert undone.id == "0001"
        assert _everything(connection) - before <= {SCHEMA}, "the schema may stay: it may be yours"


def _everything(connection: Connection) -> set[str]:
    if connection.dialect.name == "sqlite":
        masters = (
            f'SELECT * FROM main.sqlite_master UNION ALL SELECT * FROM "{SCHEMA}".sqlite_master'
        )
        names = text(f"SELECT name FROM ({masters}) WHERE name <> 'sqlite_sequence'")
    else:
        names = text(
            "SELECT relname FROM pg_class UNION ALL SELECT nspname FROM pg_namespace "
            "UNION ALL SELECT typname FROM pg_type UNION ALL SELECT proname FROM pg_proc"
        )
    return set(connection.scalars(names))


def test_downgrading_an_empty_database_does_nothing(empty_database: Database) -> None:
    with empty_database.engine().begin() as connection:
        assert migrations.downgrade(connection, revision="base") == ()


def test_upgrading_twice_does_nothing_the_second_time(empty_database: Database) -> None:
    applied = migrations.migrate_database(empty_database.url)
    assert [revision.id for revision in applied] == list(schema_version.REVISIONS)
    assert migrations.migrate_database(empty_database.url) == ()


def test_the_code_knows_every_revision_and_the_head() -> None:
    scripts = ScriptDirectory(Path(__file__).parents[2] / "alembic")
    ids = [script.revision for script in scripts.walk_revisions()]
    assert tuple(reversed(ids)) == schema_version.REVISIONS
    assert scripts.get_current_head() == schema_version.HEAD
    assert schema_version.HEAD in schema_version.SUPPORTED
