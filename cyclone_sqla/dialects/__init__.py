"""What databases do differently. ``dialect_of`` finds the one for a database."""

from __future__ import annotations

from cyclone_sqla.clock import Clock
from cyclone_sqla.dialects.base import Dialect, Ended, HintMode, Rows, Step, Turn, WorkerConnection
from cyclone_sqla.errors import ConfigurationError

__all__ = ["Dialect", "Ended", "HintMode", "Rows", "Step", "Turn", "WorkerConnection", "dialect_of"]


def dialect_of(name: str, schema: str | None, clock: Clock) -> Dialect:
    """The dialect for SQLAlchemy's name of a database; ConfigurationError for one not supported."""
    if name == "postgresql":
        from cyclone_sqla.dialects.postgresql import PostgresDialect

        return PostgresDialect(schema, clock)
    if name == "sqlite":
        from cyclone_sqla.dialects.sqlite import SqliteDialect

        return SqliteDialect(schema, clock)
    raise ConfigurationError(f"{name} is not supported: use PostgreSQL or SQLite")
