"""The queue's tables in the application's own Alembic history: what `op.cyclone_upgrade` does.

The steps are those of :mod:`cyclone_sqla.migrations`, taken inside a migration of the
application's: on its connection and in its transaction, or into its script. Our version table keeps
the revision, and says that it is the application's, so that `cyclone-sqla migrate` changes nothing
there.
"""

from __future__ import annotations

import logging
from collections.abc import Generator
from contextlib import contextmanager

import sqlalchemy as sa
from alembic.operations import Operations
from alembic.runtime.migration import MigrationContext
from sqlalchemy import Connection
from sqlalchemy.schema import CreateTable, DropTable

from cyclone_sqla import migrations, schema_version
from cyclone_sqla.dialects.migrating import migrating
from cyclone_sqla.errors import ConfigurationError, SchemaError
from cyclone_sqla.migrations import BASE, LOCK_TIMEOUT
from cyclone_sqla.schema_version import Installed

log = logging.getLogger(__name__)


class ApplicationHistory:
    """The tables of one schema, as a migration of the application's changes them."""

    def __init__(self, context: MigrationContext, schema: str | None) -> None:
        """Args: context: the application's, online or writing a script."""
        schema_version.check_schema(schema)
        self.schema = schema
        self._database = migrating(context.dialect.name, LOCK_TIMEOUT)
        self._context = _own_context(context)
        self._connection = None if context.as_sql else context.connection

    def upgrade(self, revision: str, *, start: str = BASE, adopt: bool = False) -> None:
        """Lead the tables up from ``start`` to ``revision``; nothing to do if they are beyond it.

        Raises:
            ConfigurationError: there is no revision of this id, or it is not above ``start``.
            SchemaError: the tables are before ``revision`` and not at ``start``; or `cyclone-sqla
                migrate` made them, and not ``adopt``.
            DatabaseBusyError, TransactionError: as :func:`cyclone_sqla.migrations.upgrade`.
        """
        first, last = _id_of(start), _id_of(revision)
        _require_order(first, last, "cyclone_upgrade leads up")
        if self._connection is None:
            for statement in self._database.schema_script(self.schema):
                self._context.execute(statement)
            self._go(first, last)
            return
        with self._held(self._connection) as found:
            if self.schema is not None:
                self._database.make_schema(self._connection, self.schema)
            at = None if found is None else found.revision
            if found is not None and not found.by_application:
                self._adopt(found, adopt)
            elif at != first and _is_before(at, last):
                raise SchemaError(_elsewhere(at, "cyclone_upgrade", start))
            if _is_before(at, last):
                self._go(at, last)

    def downgrade(self, revision: str = BASE, *, start: str | None = None) -> None:
        """Lead the tables down to ``revision``, "base" removing all; nothing to do if below it.

        ``start`` is where they are: a script has to be told, a database tells it.

        Raises:
            ConfigurationError: there is no revision of this id, it is not below ``start``, or a
                script is not told ``start``.
            SchemaError: the tables are not at ``start``, or `cyclone-sqla migrate` made them.
            DatabaseBusyError, TransactionError: as :func:`cyclone_sqla.migrations.downgrade`.
        """
        last = _id_of(revision)
        if start is not None:
            _require_order(last, _id_of(start), "cyclone_downgrade leads down")
        if self._connection is None:
            self._go(_start_of_script(start), last)
            return
        with self._held(self._connection) as found:
            if found is None or not _is_before(last, found.revision):
                return
            if not found.by_application:
                raise SchemaError(_not_the_applications(found))
            if start is not None and found.revision != _id_of(start):
                raise SchemaError(_elsewhere(found.revision, "cyclone_downgrade", start))
            self._go(found.revision, last)

    @contextmanager
    def _held(self, connection: Connection) -> Generator[Installed | None]:
        """What the database has, while nobody else migrates it."""
        with self._database.held(connection, self.schema):
            yield migrations.known(connection, self.schema)

    def _adopt(self, found: Installed, adopt: bool) -> None:
        if not adopt:
            raise SchemaError(
                f"{_not_the_applications(found)}; to take them over, write adopt=True into "
                "op.cyclone_upgrade, and run `cyclone-sqla migrate` no more"
            )
        self._record(found.revision, found.revision)

    def _go(self, at: str | None, goal: str | None) -> None:
        """Take the steps from one revision to the other."""
        way = migrations.steps_up if _is_before(at, goal) else migrations.steps_down
        for step in way(at, goal or BASE):
            log.info("the queue's tables: %s", step)
            step.migration_fn(op=Operations(self._context), schema=self.schema)
        self._record(at, goal)

    def _record(self, before: str | None, now: str | None) -> None:
        """Write down that the tables are there now, in the application's history."""
        table = schema_version.version_table(self.schema)
        if before is None:
            self._context.execute(CreateTable(table, if_not_exists=True))
        if now is None:
            self._context.execute(DropTable(table))
            return
        # A literal, because a script has no parameters.
        version = Installed(now, by_application=True).version_num
        version_num: sa.ColumnClause[str] = sa.literal_column(f"'{version}'")
        write = table.insert() if before is None else table.update()
        self._context.execute(write.values(version_num=version_num))


def _own_context(context: MigrationContext) -> MigrationContext:
    """Where the application's writes to, without its naming convention and its other options."""
    if context.as_sql:
        options = {"as_sql": True, "output_buffer": context.output_buffer}
        return MigrationContext.configure(dialect=context.dialect, opts=options)
    return MigrationContext.configure(context.connection)


def _id_of(revision: str) -> str | None:
    """An id as it is, None for "base"; never a word such as "head", which means more later on."""
    if revision == BASE:
        return None
    if revision in schema_version.REVISIONS:
        return revision
    known = ", ".join((BASE, *schema_version.REVISIONS))
    raise ConfigurationError(
        f"{revision!r} is the id of no revision of the queue's tables; this cyclone-sqla has: "
        f"{known}"
    )


def _is_before(revision: str | None, other: str | None) -> bool:
    order = (None, *schema_version.REVISIONS)
    return order.index(revision) < order.index(other)


def _require_order(lower: str | None, upper: str | None, direction: str) -> None:
    if not _is_before(lower, upper):
        raise ConfigurationError(
            f"op.{direction}, so {lower or BASE} and {upper or BASE} are the wrong way round"
        )


def _start_of_script(start: str | None) -> str | None:
    if start is None:
        raise ConfigurationError(
            "a script can't look where the tables are: write it into the revision, as in "
            f'op.cyclone_downgrade("base", start="{schema_version.REVISIONS[0]}")'
        )
    return _id_of(start)


def _elsewhere(at: str | None, operation: str, start: str) -> str:
    return (
        f"the queue's tables are at revision {at or BASE}, and this op.{operation} starts at "
        f'{start}: write start="{at or BASE}" into it, or undo what led there'
    )


def _not_the_applications(found: Installed) -> str:
    return (
        f"the queue's tables are at revision {found.revision} and were made by `cyclone-sqla "
        "migrate`, not by a revision of the application's"
    )
