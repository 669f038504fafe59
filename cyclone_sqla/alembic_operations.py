"""`op.cyclone_upgrade` and `op.cyclone_downgrade`: importing this gives them to Alembic.

Autogenerate writes them where the application's history leads to our tables and ends before the
newest revision. This is loaded in the middle of Alembic's own import, when `alembic.autogenerate`
isn't whole yet.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import sqlalchemy as sa
from alembic.operations import MigrateOperation, Operations
from alembic.util import CommandError
from sqlalchemy import Connection

from cyclone_sqla import schema_version
from cyclone_sqla.errors import CycloneError

if TYPE_CHECKING:
    from alembic.autogenerate.api import AutogenContext
    from alembic.operations.ops import UpgradeOps

BASE = "base"


@Operations.register_operation("cyclone_upgrade")
class CycloneUpgrade(MigrateOperation):
    """Our tables go up to a revision."""

    def __init__(
        self,
        revision: str,
        *,
        start: str = BASE,
        schema: str | None = None,
        adopt: bool = False,
    ) -> None:
        self.revision = revision
        self.start = start
        self.schema = schema
        self.adopt = adopt

    @classmethod
    def cyclone_upgrade(
        cls,
        operations: Operations,
        revision: str,
        *,
        start: str = BASE,
        schema: str | None = None,
        adopt: bool = False,
    ) -> None:
        """Create the queue's tables, or lead them up from ``start`` to ``revision``.

        ``adopt``: take over tables that `cyclone-sqla migrate` made.
        """
        operations.invoke(cls(revision, start=start, schema=schema, adopt=adopt))

    def reverse(self) -> CycloneDowngrade:
        return CycloneDowngrade(self.start, start=self.revision, schema=self.schema)

    def to_diff_tuple(self) -> tuple[Any, ...]:
        return ("cyclone_upgrade", self.schema, self.start, self.revision)


@Operations.register_operation("cyclone_downgrade")
class CycloneDowngrade(MigrateOperation):
    """Our tables go down to a revision."""

    def __init__(
        self, revision: str = BASE, *, start: str | None = None, schema: str | None = None
    ) -> None:
        self.revision = revision
        self.start = start
        self.schema = schema

    @classmethod
    def cyclone_downgrade(
        cls,
        operations: Operations,
        revision: str = BASE,
        *,
        start: str | None = None,
        schema: str | None = None,
    ) -> None:
        """Lead the queue's tables down to ``revision``; "base" removes them **with all jobs**."""
        operations.invoke(cls(revision, start=start, schema=schema))

    def reverse(self) -> CycloneUpgrade:
        return CycloneUpgrade(self.start or BASE, start=self.revision, schema=self.schema)

    def to_diff_tuple(self) -> tuple[Any, ...]:
        return ("cyclone_downgrade", self.schema, self.start, self.revision)


@Operations.implementation_for(CycloneUpgrade)
def _upgrade(operations: Operations, operation: CycloneUpgrade) -> None:
    with _one_line_failures():
        from cyclone_sqla.application_history import ApplicationHistory

        history = ApplicationHistory(operations.get_context(), operation.schema)
        history.upgrade(operation.revision, start=operation.start, adopt=operation.adopt)


@Operations.implementation_for(CycloneDowngrade)
def _downgrade(operations: Operations, operation: CycloneDowngrade) -> None:
    with _one_line_failures():
        from cyclone_sqla.application_history import ApplicationHistory

        history = ApplicationHistory(operations.get_context(), operation.schema)
        history.downgrade(operation.revision, start=operation.start)


@contextmanager
def _one_line_failures() -> Generator[None]:
    """Alembic prints the message of its own errors, and the traceback of all others."""
    try:
        yield
    except CycloneError as exc:
        raise CommandError(str(exc)) from exc


# ---- autogenerate --------------------------------------------------------------------------------


def propose_upgrades(
    context: AutogenContext, upgrade_ops: UpgradeOps, _schemas: set[str | None]
) -> None:
    """Lead tables of the application's history to the newest revision, before all else it does."""
    _register_renderers()
    assert context.connection is not None, "autogenerate has a database"
    for schema in _schemas_of(context, context.connection):
        found = schema_version.installed(context.connection, schema)
        if found is not None and found.by_application and _is_behind(found.revision):
            upgrade = CycloneUpgrade(schema_version.HEAD, start=found.revision, schema=schema)
            upgrade_ops.ops.insert(0, upgrade)


def _schemas_of(context: AutogenContext, connection: Connection) -> Iterator[str | None]:
    """All that the application's `include_name` doesn't leave out, also without include_schemas:
    the application's tables and ours may be in different ones.
    """
    default = connection.dialect.default_schema_name
    for name in sa.inspect(connection).get_schema_names():
        schema = None if name == default else name
        if context.run_name_filters(schema, "schema", {}):
            yield schema


def _is_behind(revision: str) -> bool:
    return revision in schema_version.REVISIONS[:-1]


@cache
def _register_renderers() -> None:
    from alembic.autogenerate import renderers

    renderers.dispatch_for(CycloneUpgrade)(partial(_render, "cyclone_upgrade"))
    renderers.dispatch_for(CycloneDowngrade)(partial(_render, "cyclone_downgrade"))


def _render(
    name: str, context: AutogenContext, operation: CycloneUpgrade | CycloneDowngrade
) -> str:
    schema = f", schema={operation.schema!r}" if operation.schema is not None else ""
    prefix = context.opts["alembic_module_prefix"] or ""
    return f"{prefix}{name}({operation.revision!r}, start={operation.start!r}{schema})"
