"""Creates, upgrades and removes the queue's tables.

Either on a connection of the caller's, in the caller's transaction, which nothing here commits::

    with engine.begin() as connection:
        upgrade(connection, schema="queue")

or on a database, with a connection and a transaction of our own::

    migrate_database("postgresql://user:password@host/shop", schema="queue")

Both are safe to run at the same time from any number of processes and threads. The revisions are
Alembic's, and kept apart from the application's: a version table of our own, no configuration file,
no logging set-up, and none of Alembic's module-wide state, so that one of the application's own
migrations may call this too.
"""

from __future__ import annotations

import io
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import sqlalchemy as sa
from alembic.operations import Operations
from alembic.runtime.migration import MigrationContext, MigrationStep, RevisionStep
from alembic.script import ScriptDirectory
from alembic.script.revision import RevisionError
from alembic.util import CommandError
from sqlalchemy import Connection, Engine
from sqlalchemy.schema import DropTable

from cyclone_sqla import schema_version
from cyclone_sqla.dialects.migrating import Migrating, migrating
from cyclone_sqla.errors import ConfigurationError, SchemaError
from cyclone_sqla.schema_version import Installed
from cyclone_sqla.urls import parsed, worker_url

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncEngine

__all__ = [
    "BASE",
    "HEAD",
    "LOCK_TIMEOUT",
    "Revision",
    "Status",
    "check",
    "check_database",
    "current",
    "downgrade",
    "downgrade_script",
    "migrate_database",
    "own_transaction",
    "script_dialect",
    "upgrade",
    "upgrade_script",
]

LOCK_TIMEOUT = timedelta(seconds=30)
"""How long to wait for another migration, and for each table in use, unless told otherwise."""

BASE = "base"
"""Alembic's word for a database without our tables."""

HEAD = "head"
"""Alembic's word for the newest revision."""


@dataclass(frozen=True)
class Revision:
    """One step of the tables' history."""

    id: str
    title: str


@dataclass(frozen=True)
class Status:
    """Where a database stands: what it has (None: no tables), the newest, the steps between."""

    installed: Installed | None
    head: str
    pending: tuple[Revision, ...]

    @property
    def current(self) -> str | None:
        """The database's revision; None if it has no tables of ours."""
        return _revision(self.installed)

    @property
    def is_current(self) -> bool:
        """Whether there is nothing to do."""
        return self.current == self.head


# ---- a database, in a transaction of our own -----------------------------------------------------


def migrate_database(
    database: str | sa.URL | Engine | AsyncEngine,
    *,
    schema: str | None = None,
    revision: str = HEAD,
    lock_timeout: timedelta = LOCK_TIMEOUT,
) -> tuple[Revision, ...]:
    """Upgrade a database, on a connection of our own, and commit.

    On SQLite this also sets the file to WAL, which a worker needs. Returns the revisions that were
    applied: none where another process came first.

    Raises:
        DatabaseBusyError: another migration, or a transaction that uses the tables, did not end
            within ``lock_timeout``.
        ConfigurationError: there is no such revision, or no such kind of database.
        SchemaError: the database is at a revision that this code does not know.
    """
    with own_transaction(database, lock_timeout) as connection:
        return upgrade(connection, schema=schema, revision=revision, lock_timeout=lock_timeout)


def check_database(
    database: str | sa.URL | Engine | AsyncEngine, *, schema: str | None = None
) -> Status:
    """Where a database stands; changes nothing, and creates no SQLite file that is missing."""
    source = _source(database)
    with _migrating(source, LOCK_TIMEOUT).reading(source) as connection:
        return check(connection, schema)


@contextmanager
def own_transaction(
    database: str | sa.URL | Engine | AsyncEngine, lock_timeout: timedelta = LOCK_TIMEOUT
) -> Generator[Connection]:
    """A transaction to migrate in, on a connection of our own; it is committed at the end.

    An engine of the application's is only asked how to connect.
    """
    source = _source(database)
    with _migrating(source, lock_timeout).transaction(source) as connection:
        yield connection


def _source(database: str | sa.URL | Engine | AsyncEngine) -> Engine | sa.URL:
    if isinstance(database, str):
        return parsed(database)
    if isinstance(database, sa.URL | Engine):
        return database
    return database.sync_engine


def _migrating(source: Engine | sa.URL, lock_timeout: timedelta) -> Migrating:
    url = source if isinstance(source, sa.URL) else source.url
    return migrating(worker_url(url).get_backend_name(), lock_timeout)


# ---- the caller's connection ---------------------------------------------------------------------


def upgrade(
    connection: Connection,
    *,
    schema: str | None = None,
    revision: str = HEAD,
    lock_timeout: timedelta = LOCK_TIMEOUT,
) -> tuple[Revision, ...]:
    """Create or upgrade the tables in the connection's transaction; the caller commits.

    Takes a lock that the transaction holds until it ends: others that migrate wait for its commit.
    A schema that is missing is created. Returns the revisions that were applied.

    Raises:
        DatabaseBusyError, ConfigurationError, SchemaError: as :func:`migrate_database`.
        TransactionError: the connection is in AUTOCOMMIT, or isolated more than READ COMMITTED.
    """
    schema_version.check_schema(schema)
    database = migrating(connection.dialect.name, lock_timeout)
    with database.held(connection, schema):
        if schema is not None:
            database.make_schema(connection, schema)
        found = known(connection, schema)
        steps = steps_up(_revision(found), revision)
        _refuse_the_applications(found, steps)
        return _take(steps, _online(connection, schema, steps), schema)


def downgrade(
    connection: Connection,
    *,
    schema: str | None = None,
    revision: str,
    lock_timeout: timedelta = LOCK_TIMEOUT,
) -> tuple[Revision, ...]:
    """Go back to an earlier revision in the connection's transaction; the caller commits.

    ``revision="base"`` removes everything that is ours **with all jobs**, except the schema itself.
    Returns the revisions that were undone. Raises as :func:`upgrade`.
    """
    schema_version.check_schema(schema)
    with migrating(connection.dialect.name, lock_timeout).held(connection, schema):
        found = known(connection, schema)
        steps = steps_down(_revision(found), revision)
        _refuse_the_applications(found, steps)
        return _take(steps, _online(connection, schema, steps), schema)


def check(connection: Connection, schema: str | None = None) -> Status:
    """Where the database stands; only reads, and takes no lock."""
    schema_version.check_schema(schema)
    found = schema_version.installed(connection, schema)
    is_known = found is None or found.revision in schema_version.REVISIONS
    steps = steps_up(_revision(found), HEAD) if is_known else []
    return Status(found, schema_version.HEAD, tuple(_revision_of(step) for step in steps))


def current(connection: Connection, schema: str | None = None) -> str | None:
    """The database's revision; None if it has no tables of ours."""
    return schema_version.read(connection, schema)


def known(connection: Connection, schema: str | None) -> Installed | None:
    """What the database has.

    Raises:
        SchemaError: a revision that this code does not know.
    """
    found = schema_version.installed(connection, schema)
    if found is not None and found.revision not in schema_version.REVISIONS:
        raise SchemaError(schema_version.complaint(found, connection.engine.url, schema))
    return found


def _revision(found: Installed | None) -> str | None:
    return None if found is None else found.revision


def _refuse_the_applications(found: Installed | None, steps: list[RevisionStep]) -> None:
    """Else a fresh database would be built by a history that lacks what was done here."""
    if steps and found is not None and found.by_application:
        raise SchemaError(
            f"the tables are at revision {found.revision}, and belong to the application's own "
            "Alembic history: change them there, by op.cyclone_upgrade or op.cyclone_downgrade in "
            f"a revision of it; to upgrade run: {schema_version.APPLICATIONS_COMMAND}"
        )


# ---- without a database --------------------------------------------------------------------------


def script_dialect(url: sa.URL) -> sa.Dialect:
    """How SQL is written for a database; needs no driver."""
    make: Any = worker_url(url).get_dialect()
    # Styles of parameters that are marked by % would double every % in a name.
    dialect: sa.Dialect = make(paramstyle="named")
    return dialect


def upgrade_script(
    dialect: sa.Dialect, revision: str = HEAD, *, schema: str | None = None, start: str = BASE
) -> str:
    """The SQL that leads up from ``start`` to ``revision``, for psql or sqlite3."""
    return _script(steps_up(_number(start), revision), dialect, schema, start)


def downgrade_script(
    dialect: sa.Dialect, revision: str, *, schema: str | None = None, start: str = HEAD
) -> str:
    """The SQL that leads down from ``start`` to ``revision``, for psql or sqlite3."""
    return _script(steps_down(_number(start), revision), dialect, schema, start)


def _script(steps: list[RevisionStep], dialect: sa.Dialect, schema: str | None, start: str) -> str:
    schema_version.check_schema(schema)
    written = io.StringIO()
    options = {"as_sql": True, "output_buffer": written, "starting_rev": start}
    context = MigrationContext.configure(
        dialect=dialect, opts=_options(schema, steps) | options | {"script": _scripts()}
    )
    for statement in _preamble(steps, dialect, schema):
        context.execute(statement)
    with context.begin_transaction():
        _take(steps, context, schema)
    return written.getvalue()


def _preamble(
    steps: list[RevisionStep], dialect: sa.Dialect, schema: str | None
) -> Sequence[sa.Executable]:
    database = migrating(dialect.name, LOCK_TIMEOUT)
    return database.preamble(schema) if steps and steps[0].is_upgrade else ()


# ---- Alembic -------------------------------------------------------------------------------------


def _take(
    steps: list[RevisionStep], context: MigrationContext, schema: str | None
) -> tuple[Revision, ...]:
    """Take the steps. Each is handed its operations: ``alembic.op`` would be module-wide state."""
    if steps:
        context.run_migrations(op=Operations(context), schema=schema)
        if not steps[-1].to_revisions:
            # Alembic keeps its empty table at the base (in scripts, some releases drop it).
            table = schema_version.version_table(schema)
            context.execute(DropTable(table, if_exists=True))
    return tuple(_revision_of(step) for step in steps)


def _online(
    connection: Connection, schema: str | None, steps: list[RevisionStep]
) -> MigrationContext:
    return MigrationContext.configure(connection, opts=_options(schema, steps))


def _options(schema: str | None, steps: list[RevisionStep]) -> dict[str, Any]:
    def planned(_heads: object, _context: object) -> list[RevisionStep]:
        return steps

    return {
        "fn": planned,
        "version_table": schema_version.VERSION_TABLE,
        "version_table_schema": schema,
        "transactional_ddl": True,  # SQLite's too, once there is a BEGIN
    }


def steps_up(revision: str | None, target: str) -> list[RevisionStep]:
    """The steps from a revision (None: no tables) up to another, in their order."""
    scripts = _scripts()
    with _clear_errors(target):
        way = list(scripts.iterate_revisions(target, revision, implicit_base=True))
    step = MigrationStep.upgrade_from_script
    return [step(scripts.revision_map, script) for script in reversed(way)]


def steps_down(revision: str | None, target: str) -> list[RevisionStep]:
    """The steps from a revision (None: no tables) down to another, in their order."""
    scripts = _scripts()
    with _clear_errors(target):
        way = list(scripts.iterate_revisions(revision, target, select_for_downgrade=True))
    step = MigrationStep.downgrade_from_script
    return [step(scripts.revision_map, script) for script in way]


def _number(revision: str) -> str | None:
    """The id behind a word such as "head"; None for "base"."""
    with _clear_errors(revision):
        number = _scripts().as_revision_number(revision)
    return number if isinstance(number, str) else None


@contextmanager
def _clear_errors(revision: str) -> Generator[None]:
    try:
        yield
    except (RevisionError, CommandError) as exc:
        known = ", ".join((BASE, *schema_version.REVISIONS))
        raise ConfigurationError(
            f"there is no way to revision {revision!r} ({exc}); there are: {known}"
        ) from exc


def _revision_of(step: RevisionStep) -> Revision:
    ids = step.to_revisions if step.is_upgrade else step.from_revisions
    return Revision(ids[0], (step.doc or "").rstrip("."))


def _scripts() -> ScriptDirectory:
    """The revisions: inside an installed package, or at the top of a checkout."""
    package = Path(__file__).parent
    installed = package / "_alembic"
    return ScriptDirectory(installed if installed.is_dir() else package.parent / "alembic")
