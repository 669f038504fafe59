"""Which version of the tables this code works with, and which one a database has.

Here stands what a worker needs to know; what changes a database is in ``migrations``.
"""

from __future__ import annotations

import shlex

import sqlalchemy as sa
from sqlalchemy import Connection

from cyclone_sqla.errors import ConfigurationError, SchemaError
from cyclone_sqla.urls import masked

REVISIONS = ("0001",)
"""Every revision of the tables, oldest first."""

HEAD = REVISIONS[-1]
"""The revision that `cyclone-sqla migrate` leads to."""

SUPPORTED = frozenset({"0001"})
"""The revisions that this code can work with."""

VERSION_TABLE = "cyclone_alembic_version"
"""Where a database says its revision; never the application's own ``alembic_version``."""

MAX_SCHEMA_BYTES = 63
"""How long a name may be on PostgreSQL, in bytes of UTF-8; it silently cuts longer ones."""


def require(connection: Connection, schema: str | None = None) -> None:
    """Return if the tables are fit for this code.

    Raises:
        SchemaError: they are missing, too old or too new; the one line says what to run.
    """
    current = read(connection, schema)
    if current not in SUPPORTED:
        raise SchemaError(complaint(current, connection.engine.url, schema))


def read(connection: Connection, schema: str | None = None) -> str | None:
    """The revision of the database's tables; None if it has none of ours.

    Two plain reads. A missing table is no error, so the caller's transaction stays usable.
    """
    if not sa.inspect(connection).has_table(VERSION_TABLE, schema=schema):
        return None
    return connection.scalar(sa.select(version_table(schema).c.version_num))


def version_table(schema: str | None) -> sa.Table:
    """The table that holds the revision, as Alembic makes it."""
    return sa.Table(
        VERSION_TABLE, sa.MetaData(schema=schema), sa.Column("version_num", sa.String(32))
    )


def check_schema(schema: str | None) -> None:
    """Refuse a name that no schema can have; every other one works, quoted or not.

    Raises:
        ConfigurationError: it is empty, not storable, or so long that PostgreSQL would cut it.
    """
    if schema is None:
        return
    size = len(schema.encode(errors="replace"))
    if not 0 < size <= MAX_SCHEMA_BYTES or "\0" in schema or not schema.isprintable():
        raise ConfigurationError(
            f"{schema!r} can't be the name of a schema: give 1 to {MAX_SCHEMA_BYTES} bytes of "
            "printable text"
        )


def complaint(current: str | None, url: sa.URL, schema: str | None) -> str:
    """What is wrong with a database at the revision ``current``, and what to do, in one line."""
    if current is None:
        command = migrate_command(url, schema)
        return f"this database has no tables of cyclone-sqla (needed: {HEAD}); run: {command}"
    if current in REVISIONS:
        command = migrate_command(url, schema)
        return f"the tables are at revision {current}, this code needs {HEAD}; run: {command}"
    return (
        f"the tables are at revision {current}, which this code (up to {HEAD}) does not know; "
        "install the cyclone-sqla that migrated them"
    )


def migrate_command(url: sa.URL, schema: str | None) -> str:
    """The command line that migrates this database; a password in it is ``***``."""
    options = ["--database-url", masked(url)]
    if schema is not None:
        options += ["--schema", schema]
    return shlex.join(["cyclone-sqla", "migrate", *options])
