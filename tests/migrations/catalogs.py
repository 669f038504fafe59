"""What a database says of its own tables, so that two ways of making them can be compared."""

from typing import Any

from sqlalchemy import Connection, Engine, event, text

from cyclone_sqla.schema_version import VERSION_TABLE
from tests.databases import Database

Catalog = set[tuple[Any, ...]]


def engine_with_schema(database: Database, schema: str) -> Engine:
    """An engine on which `schema` can be used: on SQLite it is an attached file."""
    engine = database.engine()
    if database.dialect == "sqlite":
        name = engine.dialect.identifier_preparer.quote_identifier(schema)
        file = f"{engine.url.database}.attached"
        event.listen(engine, "connect", lambda c, _: c.execute(f"ATTACH ? AS {name}", (file,)))
    return engine


def catalog(connection: Connection, schema: str | None = None) -> Catalog:
    """Everything in the schema (None: the default one), except the table that holds the version."""
    if connection.dialect.name == "sqlite":
        return _of_sqlite(connection, schema or "main")
    return _of_postgresql(connection, schema or "public")


def _of_sqlite(connection: Connection, schema: str) -> Catalog:
    master = f"{connection.dialect.identifier_preparer.quote_identifier(schema)}.sqlite_master"
    rows = connection.execute(text(f"SELECT type, name, tbl_name, sql FROM {master}"))
    return {
        (kind, name, table, *_parts(sql))
        for kind, name, table, sql in rows
        if sql is not None and table not in (VERSION_TABLE, "sqlite_sequence")
    }


def _parts(sql: str) -> tuple[tuple[str, ...], frozenset[str]]:
    """The lines of a CREATE statement; constraints apart, because they are in no order."""
    lines = [line.strip(" \t,") for line in sql.splitlines()]
    constraints = frozenset(line for line in lines if line.startswith("CONSTRAINT"))
    return tuple(line for line in lines if line not in constraints), constraints


def _of_postgresql(connection: Connection, schema: str) -> Catalog:
    parameters = {"schema": schema, "version_table": VERSION_TABLE}
    return {
        (name, *row)
        for name, query in _QUERIES.items()
        for row in connection.execute(text(query), parameters)
    }


_RELATIONS = """
    pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace AND n.nspname = :schema
"""

_QUERIES = {
    "relation": f"""
        SELECT c.relname, c.relkind, c.relpersistence, c.reloptions::text FROM {_RELATIONS}
        WHERE c.relname NOT LIKE :version_table || '%'
    """,
    "column": f"""
        SELECT c.relname, a.attnum, a.attname, format_type(a.atttypid, a.atttypmod), a.attnotnull,
               a.attidentity, a.attgenerated, pg_get_expr(d.adbin, d.adrelid), a.attcollation
        FROM {_RELATIONS} JOIN pg_attribute a ON a.attrelid = c.oid AND a.attnum > 0
        LEFT JOIN pg_attrdef d ON d.adrelid = c.oid AND d.adnum = a.attnum
        WHERE c.relkind = 'r' AND c.relname <> :version_table
    """,
    "constraint": f"""
        SELECT c.relname, k.conname, k.contype, pg_get_constraintdef(k.oid)
        FROM {_RELATIONS} JOIN pg_constraint k ON k.conrelid = c.oid
        WHERE c.relname <> :version_table
    """,
    "index": """
        SELECT indexname, indexdef FROM pg_indexes
        WHERE schemaname = :schema AND tablename <> :version_table
    """,
    "sequence": """
        SELECT sequencename, data_type, start_value, min_value, max_value, increment_by, cycle,
               cache_size FROM pg_sequences WHERE schemaname = :schema
    """,
    "function or type": """
        SELECT proname FROM pg_proc p JOIN pg_namespace n ON n.oid = p.pronamespace
        WHERE n.nspname = :schema
        UNION ALL SELECT typname FROM pg_type t JOIN pg_namespace n ON n.oid = t.typnamespace
        WHERE n.nspname = :schema AND t.typtype NOT IN ('c', 'b')
    """,
}
