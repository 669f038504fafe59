"""What may be wrong with a PostgreSQL server and the way to it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import sqlalchemy as sa
from sqlalchemy import Connection

from cyclone_sqla.dialects import Dialect
from cyclone_sqla.doctor.findings import Finding, Limits, note, warning

CLOCK = sa.text("SELECT clock_timestamp()")

BACKEND = sa.text("SELECT pg_backend_pid()")

OLDEST_TRANSACTION = sa.text("""
    SELECT pid, application_name, usename, state, clock_timestamp() - xact_start AS age
      FROM pg_stat_activity
     WHERE datname = current_database() AND xact_start IS NOT NULL
       AND backend_type = 'client backend' AND pid <> pg_backend_pid()
     ORDER BY xact_start LIMIT 1
""")

HORIZON = sa.text("""
    SELECT what, name, age FROM (
        SELECT 'the transaction of process' AS what, CAST(pid AS text) AS name,
               age(backend_xmin) AS age
          FROM pg_stat_activity WHERE backend_xmin IS NOT NULL AND pid <> pg_backend_pid()
        UNION ALL
        SELECT 'the replication slot', CAST(slot_name AS text),
               greatest(age(xmin), age(catalog_xmin))
          FROM pg_replication_slots WHERE xmin IS NOT NULL OR catalog_xmin IS NOT NULL
        UNION ALL
        SELECT 'the prepared transaction', gid, age(transaction)
          FROM pg_prepared_xacts WHERE database = current_database()
    ) AS holders
     ORDER BY age DESC LIMIT 1
""")

DEAD_ROWS = sa.text("""
    SELECT n_live_tup AS live, n_dead_tup AS dead, last_autovacuum, last_vacuum
      FROM pg_stat_user_tables
     WHERE relid = to_regclass(:job)
""")

CONNECTIONS = sa.text("""
    SELECT count(*) AS used,
           CAST(current_setting('max_connections') AS integer)
           - CAST(current_setting('superuser_reserved_connections') AS integer) AS available
      FROM pg_stat_activity WHERE backend_type = 'client backend'
""")


def findings(
    connection: Connection, dialect: Dialect, limits: Limits, host_now: Callable[[], datetime]
) -> Iterator[Finding]:
    """All that is wrong with the server."""
    yield from _pooler(connection)
    yield from _skew(connection, limits.skew, host_now)
    yield from _oldest_transaction(connection, limits.transaction)
    yield from _horizon(connection, limits.horizon)
    yield from _dead_rows(connection, dialect, limits.dead)
    yield from _connections(connection, limits.connections)


def _pooler(connection: Connection) -> Iterator[Finding]:
    """A pooler tells a process number of its own at the connect."""
    driver: Any = connection.connection.driver_connection
    told = getattr(getattr(driver, "info", None), "backend_pid", None)
    if told is not None and told != connection.scalar(BACKEND):
        yield note(
            "pooler",
            "A connection pooler is between this host and the server.",
            "If it lends a server connection to each transaction, start workers with --listen-url "
            "for a direct way, and with --no-prepare if it doesn't carry prepared statements.",
        )


def _skew(
    connection: Connection, limit: timedelta, host_now: Callable[[], datetime]
) -> Iterator[Finding]:
    before = host_now()
    server: datetime = connection.execute(CLOCK).scalar_one()
    after = host_now()
    skew = max(before - server, server - after, timedelta(0))
    if skew > limit:
        yield warning(
            "clock-skew",
            f"The clocks of this host and of the database differ by {skew.total_seconds():.1f} s. "
            "Leases and due times follow the database; a time that this host computes for a job "
            "does not.",
            "Run NTP on both, and delay jobs by a duration instead of a time.",
        )


def _oldest_transaction(connection: Connection, limit: timedelta) -> Iterator[Finding]:
    row = connection.execute(OLDEST_TRANSACTION).first()
    if row is not None and row.age > limit:
        yield warning(
            "old-transaction",
            f"Process {row.pid} (user {row.usename}, application {row.application_name!r}, "
            f"{row.state}) has had a transaction open for {_duration(row.age)}: claims cost more "
            "from job to job until it ends.",
            f"End it: SELECT pg_terminate_backend({row.pid}); and set "
            "idle_in_transaction_session_timeout.",
        )


def _horizon(connection: Connection, limit: int) -> Iterator[Finding]:
    row = connection.execute(HORIZON).first()
    if row is not None and row.age is not None and row.age > limit:
        yield warning(
            "vacuum-horizon",
            f"Vacuum can't remove what became dead in the last {row.age:,} transactions: "
            f"{row.what} {row.name} may still need it.",
            "End that transaction, or drop the slot or prepared transaction if nobody uses it.",
        )


def _dead_rows(connection: Connection, dialect: Dialect, limit: int) -> Iterator[Finding]:
    job = connection.dialect.identifier_preparer.format_table(dialect.tables.job)
    row = connection.execute(DEAD_ROWS, {"job": job}).first()
    if row is None or row.dead <= max(limit, row.live):
        return
    at = max((time for time in (row.last_autovacuum, row.last_vacuum) if time), default=None)
    last = "never" if at is None else f"last at {at.astimezone(UTC):%Y-%m-%d %H:%M} UTC"
    yield warning(
        "dead-rows",
        f"{job} has about {row.dead:,} dead rows beside {row.live:,} live ones; vacuumed {last}.",
        f"Run: VACUUM {job}; and see that autovacuum is on and keeps up. If it runs and removes "
        "nothing, an old transaction holds it back.",
    )


def _connections(connection: Connection, limit: float) -> Iterator[Finding]:
    row = connection.execute(CONNECTIONS).one()
    if row.used > row.available * limit:
        yield warning(
            "few-connections",
            f"{row.used} of the server's {row.available} connections are in use. A worker needs "
            "five of its own, and up to one more for each run that uses ctx.session.",
            "Raise max_connections, make the pools of applications smaller, or put a pooler "
            "between.",
        )


def _duration(age: timedelta) -> str:
    seconds = int(age.total_seconds())
    return f"{seconds} s" if seconds < 120 else f"{seconds // 60} min"
