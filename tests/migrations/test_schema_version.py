"""What a worker and an enqueue ask: whether the tables are fit for this code."""

import subprocess
import sys

import pytest
from sqlalchemy import Connection, text

from cyclone_sqla import schema_version
from cyclone_sqla.errors import ConfigurationError, SchemaError
from tests.databases import Database


def test_migrated_tables_are_fit(database: Database) -> None:
    with database.engine().connect() as connection:
        assert schema_version.read(connection) == schema_version.HEAD
        schema_version.require(connection)


def test_missing_tables_are_named_with_the_command_to_run(empty_database: Database) -> None:
    with (
        empty_database.engine().connect() as connection,
        pytest.raises(SchemaError, match="no tables of cyclone-sqla") as caught,
    ):
        schema_version.require(connection)
    message = str(caught.value)
    assert "\n" not in message
    assert schema_version.HEAD in message
    assert message.endswith(f"run: cyclone-sqla migrate --database-url {empty_database.url}")


def test_the_command_names_the_schema_quoted(empty_postgresql: Database) -> None:
    with (
        empty_postgresql.engine().connect() as connection,
        pytest.raises(SchemaError, match=r"--schema 'My App'$"),
    ):
        schema_version.require(connection, "My App")


def test_a_revision_that_is_not_known_is_named(database: Database) -> None:
    with database.engine().connect() as connection:
        _pretend(connection, "9999")
        with pytest.raises(SchemaError, match=r"revision 9999.*install the cyclone-sqla that"):
            schema_version.require(connection)


def test_an_old_revision_is_named_beside_ours(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(schema_version, "REVISIONS", ("0000", schema_version.HEAD))
    with database.engine().connect() as connection:
        _pretend(connection, "0000")
        with pytest.raises(
            SchemaError, match=f"revision 0000, this code needs {schema_version.HEAD}"
        ):
            schema_version.require(connection)


def _pretend(connection: Connection, revision: str) -> None:
    connection.execute(schema_version.version_table(None).update().values(version_num=revision))


@pytest.mark.parametrize("schema", [None, "nowhere"])
def test_asking_an_empty_database_leaves_the_transaction_usable(
    empty_database: Database, schema: str | None
) -> None:
    with empty_database.engine().begin() as connection:
        connection.execute(text("CREATE TABLE shop (id integer)"))
        assert schema_version.read(connection, schema) is None
        connection.execute(text("INSERT INTO shop VALUES (1)"))
    with empty_database.engine().connect() as connection:
        assert connection.scalar(text("SELECT count(*) FROM shop")) == 1


def test_the_command_hides_the_password() -> None:
    from sqlalchemy import make_url

    url = make_url("postgresql+psycopg://me:s3cret@db/shop?password=s3cret")
    assert "s3cret" not in schema_version.migrate_command(url, None)


@pytest.mark.parametrize("name", ["", "a\0b", "a\nb", "x" * 64, "ü" * 32, "\ud800"])
def test_a_name_that_no_schema_can_have_is_refused(name: str) -> None:
    with pytest.raises(ConfigurationError, match="can't be the name of a schema"):
        schema_version.check_schema(name)


def test_asking_needs_no_alembic() -> None:
    code = "import sys; sys.modules['alembic'] = None; import cyclone_sqla.schema_version"
    subprocess.run([sys.executable, "-c", code], check=True)
