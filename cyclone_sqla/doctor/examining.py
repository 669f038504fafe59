"""The whole look."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import UTC, datetime

import sqlalchemy as sa
from sqlalchemy import Connection, Engine

from cyclone_sqla import inspection, schema_version
from cyclone_sqla.app import Cyclone
from cyclone_sqla.dialects import Dialect
from cyclone_sqla.doctor import engine as of_engine
from cyclone_sqla.doctor import indexes, postgresql, sqlite
from cyclone_sqla.doctor.findings import DEFAULT_LIMITS, Finding, Limits, error
from cyclone_sqla.doctor.queue import Queue
from cyclone_sqla.errors import ConfigurationError
from cyclone_sqla.settings import DEFAULT_CONCURRENCY


def _host_now() -> datetime:
    return datetime.now(UTC)


def examine(
    connection: Connection,
    cyclone: Cyclone,
    *,
    limits: Limits = DEFAULT_LIMITS,
    host_now: Callable[[], datetime] = _host_now,
) -> list[Finding]:
    """All that is found of an application's queue, over a connection to its database; it writes
    nothing.

    Every statement reads a bounded number of rows. If the tables don't fit this code, that is the
    one finding. ``host_now`` is this host's clock.
    """
    wrong_tables = examine_tables(connection, cyclone.schema)
    if wrong_tables is not None:
        return [wrong_tables]
    dialect = cyclone.dialect(connection.dialect.name)
    return [
        *_fitness(connection, dialect),
        *indexes.findings(connection, dialect),
        *_server(connection, dialect, limits, host_now),
        *Queue(connection, dialect, limits).findings(),
    ]


def examine_engine(engine: Engine, connection: Connection, cyclone: Cyclone) -> list[Finding]:
    """All that is found of the engine that an application enqueues with; ``connection`` leads to
    the same database.

    Of an async engine nothing is.
    """
    dialect = cyclone.dialect(connection.dialect.name)
    workers = inspection.workers(connection, dialect)
    served = [sum(worker.queues.values()) for worker in workers if worker.is_alive]
    expected = DEFAULT_CONCURRENCY * len(cyclone.registry.queues())
    return list(of_engine.findings(engine, cyclone, max(served, default=expected)))


def examine_tables(
    connection: Connection, schema: str | None = None, url: sa.URL | None = None
) -> Finding | None:
    """What is wrong with the version of the tables; ``url`` stands in the command that mends it."""
    found = schema_version.installed(connection, schema)
    if found is not None and found.revision in schema_version.SUPPORTED:
        return None
    complaint = schema_version.complaint(found, url or connection.engine.url, schema)
    what, _, advice = complaint.partition("; ")
    return error("schema-version", f"{_capital(what)}.", f"{_capital(advice)}")


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def _fitness(connection: Connection, dialect: Dialect) -> Iterator[Finding]:
    try:
        dialect.refuse_unfit_for_work(connection)
    except ConfigurationError as exc:
        what, _, advice = str(exc).partition(": ")
        yield error("unfit-database", f"{what}.", f"{_capital(advice).rstrip('.')}.")


def _server(
    connection: Connection, dialect: Dialect, limits: Limits, host_now: Callable[[], datetime]
) -> Iterator[Finding]:
    if dialect.name == "postgresql":
        yield from postgresql.findings(connection, dialect, limits, host_now)
    else:
        yield from sqlite.findings(connection, dialect, limits)
