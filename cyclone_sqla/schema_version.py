"""Which version of the tables this code works with, and which one a database has.

Here stands what a worker needs to know; what changes a database is in ``migrations``.
"""

from __future__ import annotations

import reprlib
import shlex
from dataclasses import dataclass

import sqlalchemy as sa
from sqlalchemy import Connection

from cyclone_sqla.errors import ConfigurationError, SchemaError
from cyclone_sqla.keys import text_fault
from cyclone_sqla.urls import masked

REVISIONS: tuple[str, ...] = ("0001",)
"""Every revision of the tables, oldest first."""

HEAD = REVISIONS[-1]
"""The revision that `cyclone-sqla migrate` leads to."""

SUPPORTED = frozenset({"0001"})
"""The revisions that this code can work with."""

VERSION_TABLE = "cyclone_alembic_version"
"""Where a database says its revision; never the application's own ``alembic_version``."""

BY_APPLICATION = "application:"
"""What stands there before the revision if the application's own history leads to it."""

MAX_SCHEMA_BYTES = 63
"""How long a name may be on PostgreSQL, in bytes of UTF-8; it silently cuts longer ones."""


@dataclass(frozen=True)
class Installed:
    """What a database has: a revision, and whose history led to it.

    ``by_application``: revisions of the application's own Alembic history make and change the
    tables (``op.cyclone_upgrade``), not `cyclone-sqla migrate`.
    """

    revision: str
    by_application: bool = False

    @property
    def version_num(self) -> str:
        """How the version table says it."""
        return BY_APPLICATION * self.by_application + self.revision


def require(connection: Connection, schema: str | None = None) -> None:
    """Return if the tables are fit for this code.

    Raises:
        SchemaError: they are missing, too old or too new; the one line says what to run.
    """
    found = installed(connection, schema)
    if found is None or found.revision not in SUPPORTED:
        raise SchemaError(complaint(found, connection.engine.url, schema))


def read(connection: Connection, schema: str | None = None) -> str | None:
    """The revision of the database's tables; None if it has none of ours. Reads only."""
    found = installed(connection, schema)
    return None if found is None else found.revision


def installed(connection: Connection, schema: str | None = None) -> Installed | None:
    """What the database has; None if it has no tables of ours.

    Two plain reads. A missing table is no error, so the caller's transaction stays usable.
    """
    if not sa.inspect(connection).has_table(VERSION_TABLE, schema=schema):
        return None
    version = connection.scalar(sa.select(version_table(schema).c.version_num))
    if version is None:
        return None
    revision = version.removeprefix(BY_APPLICATION)
    return Installed(revision, by_application=revision != version)


def version_table(schema: str | None) -> sa.Table:
    """The table that holds the revision, as Alembic makes it."""
    return sa.Table(
        VERSION_TABLE,
        sa.MetaData(schema=schema),
        sa.Column("version_num", sa.String(32), nullable=False),
        sa.PrimaryKeyConstraint("version_num", name=f"{VERSION_TABLE}_pkc"),
    )


def check_schema(schema: str | None) -> None:
    """Refuse a name that no schema can have; every other one works, quoted or not.

    Raises:
        ConfigurationError: it is empty, not storable, or so long that PostgreSQL would cut it.
    """
    if schema is None:
        return
    if text_fault(schema, MAX_SCHEMA_BYTES) is not None or not schema.isprintable():
        raise ConfigurationError(
            f"{reprlib.repr(schema)} can't be the name of a schema: give 1 to {MAX_SCHEMA_BYTES} "
            "bytes of printable text"
        )


def complaint(found: Installed | None, url: sa.URL, schema: str | None) -> str:
    """What is wrong with a database that has this, and what to do, in one line."""
    command = upgrade_command(found, url, schema)
    if found is None:
        return f"this database has no tables of cyclone-sqla (needed: {HEAD}); run: {command}"
    tables = f"the tables are at revision {found.revision}"
    if found.revision in REVISIONS:
        return f"{tables}, this code needs {HEAD}; run: {command}"
    return (
        f"{tables}, which this code (up to {HEAD}) does not know; "
        "install the cyclone-sqla that migrated them"
    )


def upgrade_command(found: Installed | None, url: sa.URL, schema: str | None) -> str:
    """The command line that upgrades what this database has."""
    if found is not None and found.by_application:
        return APPLICATIONS_COMMAND
    return migrate_command(url, schema)


def migrate_command(url: sa.URL, schema: str | None) -> str:
    """The command line that migrates this database; a password in it is ``***``."""
    options = ["--database-url", masked(url)]
    if schema is not None:
        options += ["--schema", schema]
    return shlex.join(["cyclone-sqla", "migrate", *options])


APPLICATIONS_COMMAND = (
    "alembic upgrade head (before it alembic revision --autogenerate, if no revision of the "
    "application's leads there yet)"
)
