"""What may be wrong with an application's engine."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from sqlalchemy import Connection, Engine

from cyclone_sqla.app import Cyclone
from cyclone_sqla.dialects import Dialect
from cyclone_sqla.doctor.findings import Finding, error, note, warning
from cyclone_sqla.errors import TransactionError


def findings(engine: Engine, cyclone: Cyclone, slots: int) -> Iterator[Finding]:
    """All that is wrong with how an engine's connections are used; nothing of an async one, whose
    connections belong to the application's event loop.
    """
    if engine.dialect.is_async:
        return
    dialect = cyclone.dialect(engine.dialect.name)
    with engine.connect() as connection:
        yield from _mode(connection, dialect)
    yield from _pool(engine, cyclone, dialect, slots)


def _mode(connection: Connection, dialect: Dialect) -> Iterator[Finding]:
    try:
        with connection.begin():
            dialect.refuse_unfit(connection)
    except TransactionError as exc:
        yield error("autocommit", "The application's engine is in AUTOCOMMIT.", str(exc))
        return
    level = connection.get_isolation_level()
    if dialect.name == "postgresql" and level not in ("READ COMMITTED", "READ UNCOMMITTED"):
        yield note(
            "isolation",
            f"Transactions of the application's engine are {level}: an enqueue whose unique key "
            "meets a job that the snapshot doesn't see is refused (DuplicateError).",
            "Nothing, if the application runs such transactions again.",
        )


def _pool(engine: Engine, cyclone: Cyclone, dialect: Dialect, slots: int) -> Iterator[Finding]:
    pool: Any = engine.pool
    beyond: int = getattr(pool, "_max_overflow", -1)
    uses_sessions = any(a.takes_context and not a.is_async for a in cyclone.registry)
    is_used = uses_sessions and not dialect.one_writer  # else they have an engine of the worker's
    if beyond < 0 or not is_used:
        return
    if (size := pool.size() + beyond) < slots:
        yield warning(
            "small-pool",
            f"The application's pool has at most {size} connections for {slots} runs at the same "
            "time: sync actions that use ctx.session wait for one.",
            "Raise pool_size or max_overflow of create_engine, or give workers fewer slots.",
        )
