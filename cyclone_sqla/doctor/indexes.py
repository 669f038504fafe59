"""The indexes that a database has, compared with those that the statements rely on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import sqlalchemy as sa
from sqlalchemy import Connection
from sqlalchemy.schema import CreateIndex

from cyclone_sqla.dialects import Dialect
from cyclone_sqla.doctor.findings import Finding, error

ON_POSTGRESQL = sa.text("""
    SELECT i.relname AS name, x.indisvalid AND x.indisready AS is_valid
      FROM pg_index x
      JOIN pg_class i ON i.oid = x.indexrelid
      JOIN pg_class t ON t.oid = x.indrelid
      JOIN pg_namespace n ON n.oid = t.relnamespace
     WHERE t.relname = ANY(:tables)
       AND CASE WHEN CAST(:schema AS text) IS NULL THEN pg_table_is_visible(t.oid)
                ELSE n.nspname = :schema END
""").bindparams(sa.bindparam("tables", type_=sa.ARRAY(sa.Text)))

ON_SQLITE = sa.text("SELECT name, 1 AS is_valid FROM sqlite_master WHERE type = 'index'")


def findings(connection: Connection, dialect: Dialect) -> Iterator[Finding]:
    """Indexes that are missing, and those that an interrupted command left unusable."""
    there = _indexes(connection, dialect)
    needed = {
        str(index.name): index
        for table in dialect.tables.of(dialect.name)
        for index in table.indexes
    }
    for name in sorted(needed.keys() - there.keys()):
        yield error(
            "missing-index",
            f"The index {name} is missing: looks and claims read whole tables without it"
            + (", and duplicates are not kept out." if needed[name].unique else "."),
            f"Run: {_create(connection, needed[name])}",
        )
    for name in sorted(name for name, is_valid in there.items() if not is_valid):
        yield error(
            "invalid-index",
            f"The index {name} is invalid: a command that built it was interrupted, and no "
            "statement uses it.",
            f"Run: {_rebuild(connection, dialect, name, is_ours=name in needed)}",
        )


def _indexes(connection: Connection, dialect: Dialect) -> Mapping[str, bool]:
    if dialect.name == "sqlite":
        rows = connection.execute(ON_SQLITE)
    else:
        tables = [table.name for table in dialect.tables.of(dialect.name)]
        rows = connection.execute(ON_POSTGRESQL, {"tables": tables, "schema": dialect.schema})
    return {row.name: bool(row.is_valid) for row in rows}


def _create(connection: Connection, index: sa.Index) -> str:
    statement: Any = CreateIndex(index)
    return " ".join(str(statement.compile(dialect=connection.dialect)).split()) + ";"


def _rebuild(connection: Connection, dialect: Dialect, name: str, *, is_ours: bool) -> str:
    quote = connection.dialect.identifier_preparer.quote
    schema = "" if dialect.schema is None else f"{quote(dialect.schema)}."
    verb = "REINDEX INDEX" if is_ours else "DROP INDEX"
    return f"{verb} CONCURRENTLY {schema}{quote(name)};"
