"""On the caller's connection: in its transaction, and nothing of the application is touched."""

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path

import pytest
from alembic import command
from alembic.config import Config
from sqlalchemy import Connection, Engine, event, inspect, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.pool import NullPool

from cyclone_sqla import migrations, schema_version
from cyclone_sqla.errors import ConfigurationError, SchemaError, TransactionError
from tests.databases import Database

on_postgresql, on_sqlite = pytest.mark.postgresql, pytest.mark.sqlite


def _tables(engine: Engine) -> set[str]:
    return set(inspect(engine).get_table_names())


def _begin_by_events(engine: Engine) -> None:
    """The set-up that SQLAlchemy recommends for SQLite where transactions matter."""
    event.listen(
        engine, "connect", lambda connection, _: setattr(connection, "isolation_level", None)
    )
    event.listen(engine, "begin", lambda connection: connection.exec_driver_sql("BEGIN"))


@pytest.mark.parametrize(
    ("kind", "driver", "prepare"),
    [
        pytest.param("postgresql", "psycopg", None, id="psycopg", marks=on_postgresql),
        pytest.param("postgresql", "psycopg2", None, id="psycopg2", marks=on_postgresql),
        pytest.param("sqlite", "pysqlite", None, id="sqlite3", marks=on_sqlite),
        pytest.param("sqlite", "pysqlite", _begin_by_events, id="begin-by-events", marks=on_sqlite),
    ],
)
class TestEveryDriver:
    @pytest.fixture
    def engine(
        self,
        request: pytest.FixtureRequest,
        kind: str,
        driver: str,
        prepare: Callable[[Engine], None] | None,
    ) -> Engine:
        database: Database = request.getfixturevalue(f"empty_{kind}")
        engine = database.engine(driver)
        if prepare is not None:
            prepare(engine)
        return engine

    def test_the_callers_rollback_leaves_nothing(self, engine: Engine) -> None:
        with engine.connect() as connection:
            migrations.upgrade(connection)
            connection.rollback()
        assert _tables(engine) == set()

    def test_the_callers_commit_keeps_it_with_the_callers_own_work(self, engine: Engine) -> None:
        with engine.begin() as connection:
            connection.execute(text("CREATE TABLE shop (id integer)"))
            connection.execute(text("INSERT INTO shop VALUES (1)"))
            migrations.upgrade(connection)
            connection.execute(text("INSERT INTO shop VALUES (2)"))
        with engine.connect() as connection:
            assert connection.scalar(text("SELECT count(*) FROM shop")) == 2
            assert migrations.check(connection).is_current

    def test_a_rolled_back_downgrade_keeps_the_jobs(self, engine: Engine) -> None:
        with engine.begin() as connection:
            migrations.upgrade(connection)
        before = _tables(engine)
        with engine.connect() as connection:
            migrations.downgrade(connection, revision="base")
            connection.rollback()
        assert _tables(engine) == before


@pytest.mark.parametrize(
    ("kind", "driver"),
    [
        pytest.param("postgresql", "asyncpg", marks=on_postgresql),
        pytest.param("sqlite", "aiosqlite", marks=on_sqlite),
    ],
)
def test_an_async_connection_runs_it_too(
    request: pytest.FixtureRequest, kind: str, driver: str
) -> None:
    database: Database = request.getfixturevalue(f"empty_{kind}")

    async def migrate(commit: bool) -> None:
        engine = create_async_engine(database.url_for(driver), poolclass=NullPool)
        async with engine.connect() as connection:
            await connection.run_sync(migrations.upgrade)
            await (connection.commit() if commit else connection.rollback())

    asyncio.run(migrate(commit=False))
    assert _tables(database.engine()) == set()
    asyncio.run(migrate(commit=True))
    with database.engine().connect() as connection:
        assert migrations.check(connection).is_current


def test_a_migration_that_fails_leaves_nothing(empty_database: Database) -> None:
    engine = empty_database.engine()
    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE cyclone_worker (mine integer)"))
    with pytest.raises(DBAPIError, match="already exists"):
        migrations.migrate_database(empty_database.url)
    assert _tables(engine) == {"cyclone_worker"}


def test_the_applications_loggers_are_left_alone(
    empty_database: Database, caplog: pytest.LogCaptureFixture
) -> None:
    shop, root = logging.getLogger("shop.orders"), logging.getLogger()
    shop.setLevel(logging.WARNING)
    before = (shop.level, shop.disabled, root.level, list(root.handlers), list(shop.handlers))
    migrations.migrate_database(empty_database.url)
    with empty_database.engine().begin() as connection:
        migrations.downgrade(connection, revision="base")
    after = (shop.level, shop.disabled, root.level, list(root.handlers), list(shop.handlers))
    assert after == before
    shop.warning("still heard")
    assert "still heard" in caplog.messages


def test_the_applications_alembic_version_is_left_alone(empty_database: Database) -> None:
    engine = empty_database.engine()
    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE alembic_version (version_num varchar(32))"))
        connection.execute(text("INSERT INTO alembic_version VALUES ('of the shop')"))
    migrations.migrate_database(empty_database.url)
    assert _shop_version(engine) == ["of the shop"]
    with engine.begin() as connection:
        migrations.downgrade(connection, revision="base")
    assert _shop_version(engine) == ["of the shop"]
    assert _tables(engine) == {"alembic_version"}


def _shop_version(engine: Engine) -> list[str]:
    with engine.connect() as connection:
        return list(connection.scalars(text("SELECT version_num FROM alembic_version")))


_ENVIRONMENT = """
from alembic import context
context.configure(connection=context.config.attributes["connection"])
with context.begin_transaction():
    context.run_migrations()
"""

_REVISION = """
import sqlalchemy as sa
from alembic import op
from cyclone_sqla import migrations
revision, down_revision = "shop1", None

def upgrade():
    op.create_table("before", sa.Column("id", sa.Integer))
    migrations.upgrade(op.get_bind())
    op.create_table("after", sa.Column("id", sa.Integer))
"""


def test_the_applications_own_migration_may_call_it(
    empty_database: Database, tmp_path: Path
) -> None:
    (tmp_path / "shop" / "versions").mkdir(parents=True)
    (tmp_path / "shop" / "env.py").write_text(_ENVIRONMENT)
    (tmp_path / "shop" / "versions" / "shop1.py").write_text(_REVISION)
    config = Config()
    config.set_main_option("script_location", str(tmp_path / "shop"))
    engine = empty_database.engine()
    with engine.begin() as connection:
        config.attributes["connection"] = connection
        command.upgrade(config, "head")
    assert {"before", "after", "alembic_version", "cyclone_job"} <= _tables(engine)
    assert _shop_version(engine) == ["shop1"]


@on_postgresql
class TestPostgreSQL:
    def test_the_callers_lock_timeout_is_the_same_afterwards(
        self, empty_postgresql: Database
    ) -> None:
        with empty_postgresql.engine().connect() as connection:
            connection.execute(text("SET LOCAL lock_timeout = '1234ms'"))
            migrations.upgrade(connection)
            assert connection.scalar(text("SHOW lock_timeout")) == "1234ms"
            with pytest.raises(ConfigurationError):
                migrations.downgrade(connection, revision="nowhere")
            assert connection.scalar(text("SHOW lock_timeout")) == "1234ms"
            connection.commit()
            assert connection.scalar(text("SHOW lock_timeout")) == "0"

    def test_autocommit_is_refused(self, empty_postgresql: Database) -> None:
        engine = empty_postgresql.engine(isolation_level="AUTOCOMMIT")
        with engine.connect() as connection, pytest.raises(TransactionError, match="AUTOCOMMIT"):
            migrations.upgrade(connection)
        assert _tables(engine) == set()

    @pytest.mark.parametrize("level", ["REPEATABLE READ", "SERIALIZABLE"])
    def test_a_snapshot_that_could_hide_another_migration_is_refused(
        self, empty_postgresql: Database, level: str
    ) -> None:
        engine = empty_postgresql.engine(isolation_level=level)
        with engine.connect() as connection, pytest.raises(TransactionError, match=level):
            migrations.upgrade(connection)
        assert migrations.migrate_database(engine), "our own transaction is READ COMMITTED"

    def test_a_schema_that_exists_needs_no_right_to_create_one(
        self, empty_postgresql: Database
    ) -> None:
        with empty_postgresql.engine().begin() as connection:
            connection.execute(text("CREATE ROLE cyclone_poor"))
            connection.execute(text("CREATE SCHEMA queue AUTHORIZATION cyclone_poor"))
        try:
            with empty_postgresql.engine().begin() as connection:
                connection.execute(text("SET LOCAL ROLE cyclone_poor"))
                assert migrations.upgrade(connection, schema="queue")
                migrations.downgrade(connection, schema="queue", revision="base")
        finally:
            with empty_postgresql.engine().begin() as connection:
                connection.execute(text("DROP OWNED BY cyclone_poor"))
                connection.execute(text("DROP ROLE cyclone_poor"))


@on_sqlite
class TestSQLite:
    def test_a_schema_that_is_not_attached_is_refused(self, empty_sqlite: Database) -> None:
        with (
            empty_sqlite.engine().connect() as connection,
            pytest.raises(SchemaError, match="no schema 'queue': leave the schema out"),
        ):
            migrations.upgrade(connection, schema="queue")

    def test_our_own_transaction_sets_wal(self, empty_sqlite: Database) -> None:
        migrations.migrate_database(empty_sqlite.url)
        with empty_sqlite.engine().connect() as connection:
            assert connection.exec_driver_sql("PRAGMA journal_mode").scalar() == "wal"

    def test_a_check_creates_no_file(self, empty_sqlite: Database) -> None:
        engine = empty_sqlite.engine()
        status = migrations.check_database(empty_sqlite.url)
        assert (status.current, len(status.pending)) == (None, len(schema_version.REVISIONS))
        assert not Path(str(engine.url.database)).exists()


def test_the_applications_engine_is_only_asked_how_to_connect(empty_database: Database) -> None:
    engine = empty_database.engine()
    assert migrations.migrate_database(engine)
    assert "Connections in pool: 0" in engine.pool.status(), "the pool has never made one"


@pytest.mark.parametrize(
    ("kind", "driver"),
    [
        pytest.param("postgresql", "asyncpg", marks=on_postgresql),
        pytest.param("postgresql", "psycopg", marks=on_postgresql),
        pytest.param("sqlite", "aiosqlite", marks=on_sqlite),
    ],
)
def test_an_async_engine_names_its_database(
    request: pytest.FixtureRequest, kind: str, driver: str
) -> None:
    database: Database = request.getfixturevalue(f"empty_{kind}")
    engine = create_async_engine(database.url_for(driver))
    assert migrations.migrate_database(engine)
    assert migrations.check_database(engine).is_current


def test_a_revision_of_the_future_is_left_alone(empty_database: Database) -> None:
    migrations.migrate_database(empty_database.url)
    with empty_database.engine().begin() as connection:
        connection.execute(schema_version.version_table(None).update().values(version_num="9999"))
    for change in (_upgrade, _downgrade):
        with (
            empty_database.engine().begin() as connection,
            pytest.raises(SchemaError, match="at revision 9999, which this code"),
        ):
            change(connection)
    status = migrations.check_database(empty_database.url)
    assert (status.current, status.pending, status.is_current) == ("9999", (), False)


def _upgrade(connection: Connection) -> None:
    migrations.upgrade(connection)


def _downgrade(connection: Connection) -> None:
    migrations.downgrade(connection, revision="base")


def test_alembics_own_commands_work_in_the_checkout(
    empty_postgresql: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For whoever writes the next revision: autogenerate has nothing to add to this one, nor to
    drop of an application that lives in the same database.
    """
    with empty_postgresql.engine().begin() as connection:
        connection.execute(text("CREATE TABLE shop (id integer PRIMARY KEY, note text)"))
        connection.execute(text("CREATE INDEX shop_note ON shop (note)"))
    monkeypatch.setenv("CYCLONE_DATABASE_URL", empty_postgresql.url)
    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parents[2] / "alembic"))
    command.upgrade(config, "head")
    command.check(config)
